"""The fast path as a library, over an index and shared memory that Python has made."""

import ctypes
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hypothesis import settings

from cachefs.contract import c_header
from cachefs.fastpath.shared_memory import Shared
from cachefs.metadata.validity import FOREVER_NS
from cachefs.options import Options
from cachefs.store.index.environment import Environment
from cachefs.store.index.records import Dentry, Inode

SOURCES = Path(__file__).parents[2] / "cachefs" / "fastpath" / "c"
_C_FOREVER_NS = (1 << 64) - 1
_PATH_BYTES = 32 << 10
MAX_VALUE_BYTES = 1024
OWN_SOURCE = Path(__file__).with_name("library.c")
LINK = ["-shared", "-pthread", "-Wl,-Bsymbolic"]
"""Its own clock_gettime, pread and fcntl are meant."""


def examples(usual: int) -> settings:
    """How many examples a comparison of a rule draws: AGREEMENT_EXAMPLES, if that is set."""
    return settings(max_examples=int(os.environ.get("AGREEMENT_EXAMPLES", usual)))


def build(directory: Path) -> ctypes.CDLL:
    """Compile it, but for `main`; or load what AGREEMENT_LIBRARY names."""
    if prepared := os.environ.get("AGREEMENT_LIBRARY"):
        return _load(Path(prepared))
    library = directory / "fastpath.so"
    c_header.write(directory)
    sources = [path for path in SOURCES.glob("*/*.c") if path.name != "main.c"]
    flags = ["-std=gnu11", "-O1", "-g", "-fPIC", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror"]
    command = ["cc", *flags, *LINK, f"-I{directory}", f"-I{SOURCES}", OWN_SOURCE, *sources]
    subprocess.run([*command, "-llmdb", "-o", library], check=True)
    return _load(library)


def _load(library: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library))
    for name, result in {
        "remaining_ns": ctypes.c_uint64,
        "note_young": ctypes.c_uint64,
        "now": ctypes.c_void_p,
        "begin": ctypes.c_void_p,
        "record_bytes": ctypes.c_uint64,
        "write_record": ctypes.c_size_t,
        "ask": ctypes.c_ssize_t,
    }.items():
        getattr(loaded, name).restype = result
    for name in (
        "is_pinned", "entry_holds", "knows_absent", "is_immutable", "is_immutable_on_open", "is_small", "read_blob",
        "read_source", "path_of", "add_fetch", "attach", "open_answers",
    ):  # fmt: skip
        getattr(loaded, name).restype = ctypes.c_bool
    return loaded


UNIQUE = 2
IN = struct.Struct("<2I2Q4I")  # struct fuse_in_header: length, opcode, unique, nodeid, uid, gid, pid, padding
OUT = struct.Struct("<IiQ")  # struct fuse_out_header: length, error, unique
_REPLY_BYTES = (1 << 20) + 4096


class Answer(NamedTuple):
    error: int
    data: bytes


def request(opcode: int, number: int, body: bytes, *, unique: int = UNIQUE, uid: int = 0, pid: int = 1) -> bytes:
    """As the kernel sends it."""
    return IN.pack(IN.size + len(body), opcode, unique, number, uid, 0, pid, 0) + body


def _u64(number: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(number)


class FastPath:
    """What the fast path says. Each method but `set_up` and `reading` is one of its rules."""

    def __init__(self, library: ctypes.CDLL, shared: Shared) -> None:
        self._c = library
        self.shared = shared
        assert library.attach(shared.fd)
        library.set_clock(ctypes.c_int64(0))

    def set_up(self, options: Options, *, seed: int = 0, run: int = 1, **floors: int) -> None:
        """`floors`: those of validity.py that are not 0."""
        self.shared.configure(options, seed=seed, root_device=0, threads=4)
        for field in ("floor", "strict_floor", "links_floor"):
            self.shared[field] = floors.get(field, 0)
        self.shared["run"] = run
        self._c.set_floors()

    def set_clock(self, monotonic_ns: int) -> None:
        self._c.set_clock(ctypes.c_int64(monotonic_ns))

    @contextmanager
    def disk(self, *, most: int = 0, error: int = 0, times: int = 0, stays_direct: bool = False) -> Iterator[None]:
        """A read gives `most` bytes at most (0: all); so many fail first; O_DIRECT cannot be taken back."""
        self._c.set_disk(ctypes.c_size_t(most), error, times, stays_direct)
        try:
            yield
        finally:
            self._c.set_disk(ctypes.c_size_t(0), 0, 0, False)

    def direct_reads(self) -> int:
        """How many there were since `disk`."""
        return int(self._c.direct_reads())

    @contextmanager
    def over(self, session: Environment, durable: Environment) -> Iterator[None]:
        """The index from now on."""
        error = self._c.open_index(str(session.path).encode(), str(durable.path).encode())
        assert error == 0, f"LMDB's error {error}"
        try:
            yield
        finally:
            self._c.close_index()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """One moment of the index."""
        assert self._c.begin()
        try:
            yield
        finally:
            self._c.view_end(self._view())

    def _view(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._c.now())

    # validity

    def is_pinned(self, record: Inode) -> bool:
        return bool(self._c.is_pinned(self._view(), record.pack()))

    def remaining_ns(self, record: Inode) -> int:
        found = int(self._c.remaining_ns(self._view(), record.pack()))
        return FOREVER_NS if found == _C_FOREVER_NS else found

    def entry_holds(self, parent: Inode, dentry: Dentry) -> bool:
        return bool(self._c.entry_holds(self._view(), parent.pack(), dentry.pack()))

    def knows_absent(self, parent: Inode, dentry: Dentry) -> bool:
        return bool(self._c.knows_absent(self._view(), parent.pack(), dentry.pack()))

    def is_immutable(self, record: Inode) -> bool:
        return bool(self._c.is_immutable(self._view(), record.pack()))

    def is_immutable_on_open(self, record: Inode) -> bool:
        return bool(self._c.is_immutable_on_open(record.pack()))

    # age

    def note_young(self, record: Inode) -> int:
        return int(self._c.note_young(_u64(record.number), record.pack()))

    # units and windows

    def unit_of(self, size: int, offset: int) -> tuple[int, int]:
        start, length = ctypes.c_uint64(), ctypes.c_uint32()
        memory = ctypes.c_void_p(ctypes.c_void_p.in_dll(self._c, "shared").value)
        self._c.unit_of(memory, _u64(size), _u64(offset), ctypes.byref(start), ctypes.byref(length))
        return start.value, length.value

    def clear_fetches(self) -> None:
        self._c.clear_fetches()

    def add_fetch(self, record: Inode, offset: int, length: int, *, cached: bool) -> None:
        assert self._c.add_fetch(record.pack(), _u64(record.number), _u64(offset), length, cached)

    def window(self, record: Inode, start: int, end: int) -> tuple[int, int, bool]:
        out = (ctypes.c_uint64 * 3)()
        self._c.window(*map(_u64, (record.number, record.version, record.size, start, end)), out)
        return out[0], out[1], bool(out[2])

    def next_window(self, record: Inode, end: int) -> tuple[int, int]:
        out = (ctypes.c_uint64 * 3)()
        self._c.next_window(*map(_u64, (record.number, record.version, record.size, end)), out)
        return out[0], out[1]

    # paths

    def path(self, number: int) -> bytes | None:
        buffer = ctypes.create_string_buffer(_PATH_BYTES)
        return buffer.value if self._c.path_of(_u64(number), buffer, ctypes.c_size_t(_PATH_BYTES)) else None

    # the blob and the source

    def record_bytes(self, length: int) -> int:
        return int(self._c.record_bytes(ctypes.c_uint32(length)))

    def write_record(self, blob: int, record: Inode, offset: int, payload: bytes, at: int) -> bytes:
        """The value of its extent in the index; empty on an error."""
        out = ctypes.create_string_buffer(MAX_VALUE_BYTES)
        length = self._c.write_record(
            blob, record.pack(), _u64(record.number), _u64(offset), payload, len(payload), _u64(at), out
        )
        return out.raw[:length]

    def read_blob(self, blob: int, value: bytes, start: int, length: int) -> bytes | None:
        out = ctypes.create_string_buffer(length)
        good = self._c.read_blob(blob, value, ctypes.c_size_t(len(value)), start, length, out)
        return out.raw[:length] if good else None

    def read_source(self, root: int, path: bytes, record: Inode, offset: int, length: int) -> bytes | None:
        out = ctypes.create_string_buffer(length)
        good = self._c.read_source(root, path, record.pack(), _u64(offset), length, out)
        return out.raw[:length] if good else None

    # requests

    @contextmanager
    def answering(self, blob: int) -> Iterator[None]:
        """Requests, over the index of `over`."""
        assert self._c.open_answers(blob)
        try:
            yield
        finally:
            self._c.close_answers()

    def ask(self, opcode: int, number: int, body: bytes, *, guessing: bool = False) -> "Answer | None":
        """None: it is passed on."""
        message = request(opcode, number, body)
        buffer = ctypes.create_string_buffer(message, len(message) + 8)
        reply = ctypes.create_string_buffer(_REPLY_BYTES)
        length = self._c.ask(buffer, ctypes.c_size_t(len(message)), reply, ctypes.c_size_t(_REPLY_BYTES), guessing)
        assert length >= -1, "no request"
        if length < 0:
            return None
        if length == 0:
            return Answer(0, b"")
        said, error, unique = OUT.unpack_from(reply.raw)
        assert (said, unique) == (length, UNIQUE)
        return Answer(-error, reply.raw[OUT.size : length])

    def kind_of_request(self, message: bytes) -> int:
        buffer = ctypes.create_string_buffer(message, len(message) + 8)
        return int(self._c.kind_of_request(buffer, ctypes.c_size_t(len(message))))
