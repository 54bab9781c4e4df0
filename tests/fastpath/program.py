"""A running fast path. /dev/fuse is a socket that keeps messages apart, which is all that the program relies on. The
index is what a test writes into it. What the program reports is committed as the daemon would.
"""

import errno
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cachefs.contract import messages
from cachefs.contract.blob import SLAB_BYTES
from cachefs.contract.index import ROOT_INODE, Table
from cachefs.contract.messages import Message
from cachefs.data.commit import Filled
from cachefs.fastpath import connection, processes
from cachefs.fastpath.shared_memory import Shared
from cachefs.options import Options
from cachefs.store.index.environment import Environment
from cachefs.store.index.records import FLAGS_PINNED, IMMUTABLE, IMMUTABLE_ON_OPEN, PINNED, Inode, inode_key, pair_key
from cachefs.system import syscalls
from tests.agreement.library import IN, OUT, request

GETATTR, OPEN, READ, READDIR, INTERRUPT = 3, 14, 15, 28, 36
THREADS = 8
SEED, RUN = 77, 3
TIMEOUT_S = float(os.environ.get("FASTPATH_TIMEOUT_S", "20"))
"""Of whatever is waited for."""
BUFFER_BYTES = 256 << 20
MESSAGE_BYTES = (1 << 20) + 4096
READ_IN = struct.Struct("<2Q2IQ2I")  # struct fuse_read_in: fh, offset, size, …
_PREFETCH_REQUEST = struct.Struct("<2Q")


class Program:
    """`options.settle_ns`: how long the kernel keeps pages of young files."""

    def __init__(
        self,
        place: Path,
        options: Options,
        *,
        capacity: int = 1 << 40,
        flags: int = 0,
        grants: bool = True,
        log: int | None = None,
        device: int | None = None,
    ) -> None:
        """`log`: the descriptor of its stderr. `device`: of /dev/fuse, instead of a socket."""
        self._log = log
        self.source = place / "source"
        self.source.mkdir()
        self._source_fd = os.open(self.source, os.O_RDONLY | os.O_DIRECTORY)
        self.blob = place / "blob"
        self._blob_fd = os.open(self.blob, os.O_RDWR | os.O_CREAT, 0o600)
        self.session = Environment(place / "session", sync=False)
        self.durable = Environment(place / "durable", sync=False)
        self.shared = Shared.create()
        self.shared.configure(options, seed=SEED, root_device=os.stat(self.source).st_dev, threads=THREADS)
        self.shared.set_volume(*syscalls.place_of(self._source_fd), 0)
        self.shared["flags"] |= flags
        for field, value in {"run": RUN, "serving": 1, "capacity_bytes": capacity}.items():
            self.shared[field] = value
        self._kernel, self._socket = _pair()
        self._device = self._socket.fileno() if device is None else device
        self._listener = connection.listen(place / "socket")
        self._path = str(place / "socket")
        self._next_unique = 2
        self._answers: dict[int, list[tuple[int, bytes]]] = {}
        self._changed = threading.Condition()
        """Guards the answers, what was passed on, and what the program has told its daemon."""
        self.passed: list[tuple[int, int, bytes]] = []
        """(opcode, unique of Python's, body)"""
        self.filled: list[Filled] = []
        self.told: list[tuple[Message, int, int, bytes]] = []
        """The rest."""
        self.commits = True
        """Commit what is reported."""
        self.grants = grants
        """Give it a slab when it asks for one."""
        self.python_says: int | None = None
        """The errno with which Python answers; None: the test does."""
        self.make_room: Callable[[], bool] = lambda: True
        """Asked for room, before the answer is sent, if it is."""
        self._slabs = 0
        self._granting = threading.Lock()
        self._ends: list[socket.socket] = []
        self._daemon: socket.socket | None = None
        self._python: socket.socket | None = None
        self._wake, self._woken = os.pipe()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._pump = threading.Thread(target=self._run)
        self._pump.start()
        self.put(Table.INODES, inode_key(ROOT_INODE), self._record(ROOT_INODE, b".", PINNED).pack())
        self.start()

    # --- the process

    def start(self) -> None:
        fds = {"device": self._device, "shared": self.shared.fd, "source": self._source_fd,
               "blob": self._blob_fd, "listener": self._listener.fileno()}  # fmt: skip
        arguments = [part for name, fd in fds.items() for part in (f"--{name}", str(fd))]
        arguments += ["--session", self.session.place, "--durable", self.durable.place]
        self._process = subprocess.Popen([processes.PROGRAM, *arguments], pass_fds=fds.values(), stderr=self._log)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def end(self, number: int = signal.SIGTERM) -> int:
        """Returns its status."""
        assert self._process is not None
        self._process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Until it has ended; its status."""
        assert self._process is not None
        return self._process.wait(TIMEOUT_S)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._ended = True
        os.write(self._woken, b"x")
        self._pump.join()
        for each in (self._kernel, self._socket, self._listener, *self._ends):
            each.close()
        for fd in (self._source_fd, self._blob_fd, self._wake, self._woken):
            os.close(fd)
        self.session.close()
        self.durable.close()
        self.shared.close()

    # --- the index

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        with self.durable.write() as txn:
            txn.put(key, value, db=self.durable.tables[table])

    def _record(self, number: int, name: bytes, flags: int) -> Inode:
        now = syscalls.statx(self._source_fd, name)
        return Inode(number, *[0] * 22).with_stat(now)._replace(flags=flags, version=1, validated_run=RUN, device=0)

    def add(
        self, number: int, data: bytes, flags: int = PINNED | IMMUTABLE | IMMUTABLE_ON_OPEN, name: str = ""
    ) -> Inode:
        """A file of the source, which the index knows."""
        name = name or f"f{number}"
        (self.source / name).write_bytes(data)
        return self.know(number, flags, name)

    def know(self, number: int, flags: int = PINNED | IMMUTABLE | IMMUTABLE_ON_OPEN, name: str = "") -> Inode:
        name = name or f"f{number}"
        record = self._record(number, name.encode(), flags)
        self.put(Table.INODES, inode_key(number), record.pack())
        self.put(Table.LINKS, inode_key(number) + inode_key(ROOT_INODE) + name.encode(), FLAGS_PINNED)
        return record

    # --- the kernel

    def send(self, opcode: int, number: int, body: bytes, *, uid: int = 0) -> int:
        """Returns what its answer is known by."""
        with self._changed:
            unique = self._next_unique
            self._next_unique += 2
            self._answers[unique] = []
        self._kernel.send(request(opcode, number, body, unique=unique, uid=uid, pid=os.getpid()))
        return unique

    def ask(self, number: int, offset: int, size: int, *, uid: int = 0, handle: int = 0) -> int:
        return self.send(READ, number, READ_IN.pack(handle, offset, size, 0, 0, 0, 0), uid=uid)

    def answer(self, unique: int) -> tuple[int, bytes]:
        """(errno, data), once it is there."""
        self.wait_until(lambda: bool(self._answers[unique]))
        ((error, data),) = self._answers[unique]
        return -error, data

    def read(self, number: int, offset: int, size: int, *, uid: int = 0) -> bytes:
        error, data = self.answer(self.ask(number, offset, size, uid=uid))
        assert error == 0, errno.errorcode[error]
        return data

    def read_whole(self, number: int, size: int, piece: int = 128 << 10) -> bytes:
        return b"".join(self.read(number, offset, piece) for offset in range(0, size, piece))

    def ignore_answers(self) -> None:
        """From now on sending an answer fails."""
        self._kernel.shutdown(socket.SHUT_RD)

    def answered_twice(self) -> list[int]:
        with self._changed:
            return [unique for unique, answers in self._answers.items() if len(answers) > 1]

    # --- its daemon and its Python

    def attach(self, *, same: bool = False) -> None:
        """With the Python that is there, or another one. The daemon holds both ends of its socket."""
        if not same:
            self._python, self._python_end = _pair()
            self._ends += [self._python, self._python_end]
        assert self._python is not None
        self._daemon = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ends.append(self._daemon)
        self._daemon.connect(self._path)
        fds = self._python_end.fileno(), self._python.fileno()
        connection.send(self._daemon, Message.ATTACH, messages.ATTACH_SAME_PYTHON * same, fds=fds)
        os.write(self._woken, b"x")
        self.wait_until(lambda: any(kind is Message.ATTACHED for kind, _, _, _ in self.told))

    def detach(self) -> None:
        assert self._daemon is not None
        self._daemon.shutdown(socket.SHUT_RDWR)
        self.wait_until(lambda: self._daemon is None)
        self.told.clear()

    def tell(self, kind: Message, a: int = 0, data: bytes = b"") -> None:
        assert self._daemon is not None
        connection.send(self._daemon, kind, a, data=data)

    def grant(self) -> None:
        with self._granting:  # the test, and the thread that receives
            number, self._slabs = self._slabs, self._slabs + 1
        self.tell(Message.SLAB, number * SLAB_BYTES)

    def prefetch(self, *places: tuple[int, int]) -> None:
        self.tell(Message.PREFETCH, data=b"".join(_PREFETCH_REQUEST.pack(*place) for place in places))

    def answer_for_python(self, unique: int, error: int, data: bytes = b"") -> None:
        assert self._python is not None
        self._python.send(OUT.pack(OUT.size + len(data), -error, unique) + data)

    def commit(self, filled: Filled) -> None:
        self.put(Table.EXTENTS, pair_key(filled.inode, filled.offset), filled.extent.pack())
        self.shared["committed_bytes"] += filled.extent.record_bytes
        self.shared["resolved"] = filled.report

    def counters(self) -> SimpleNamespace:
        return SimpleNamespace(**self.shared.counters())

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Looked at when a message has come, and now and then."""
        deadline = time.monotonic() + TIMEOUT_S
        with self._changed:
            while not holds():
                assert time.monotonic() < deadline, f"{self.told[-3:]} {self.passed[-3:]} {vars(self.counters())}"
                self._changed.wait(0.01)

    def until_idle(self) -> None:
        """What was fetched is in the blob and in the index, or will not be."""
        self.wait_until(lambda: self.shared["buffered_bytes"] == self.shared["pending_bytes"] == 0)

    def until_appended(self, size: int) -> None:
        """So many bytes of files are in the blob, and in the index."""
        self.wait_until(lambda: sum(filled.extent.length for filled in self.filled) >= size)
        self.until_idle()

    def _run(self) -> None:
        while not self._ended:
            sources: list[Any] = [self._wake, self._kernel]
            sources += [each for each in (self._daemon, self._python) if each is not None]
            ready = select.select(sources, [], [])[0]
            with self._changed:
                for each in ready:
                    if each == self._wake:
                        os.read(self._wake, 100)
                    elif each is self._kernel:
                        self._received_answer(self._kernel.recv(MESSAGE_BYTES))
                    else:
                        self._received(each)
                self._changed.notify_all()

    def _received_answer(self, message: bytes) -> None:
        if not message:  # ignore_answers
            return
        length, error, unique = OUT.unpack_from(message)
        assert length == len(message)
        self._answers[unique].append((error, message[OUT.size :]))

    def _received(self, end: socket.socket) -> None:
        try:
            message = end.recv(MESSAGE_BYTES)
        except ConnectionResetError:
            message = b""
        with suppress(BrokenPipeError):  # the program has ended since: the end of its messages comes next
            self._handle(end, message)

    def _handle(self, end: socket.socket, message: bytes) -> None:
        if not message:
            self._daemon = None if end is self._daemon else self._daemon
            self._python = None if end is self._python else self._python
        elif end is self._python:
            _, opcode, unique, _, _, _, _, _ = IN.unpack_from(message)
            self.passed.append((opcode, unique, message[IN.size :]))
            if self.python_says is not None:
                self.answer_for_python(unique, self.python_says)
        else:
            self._heard(message)

    def _heard(self, message: bytes) -> None:
        kind, a, b, data = connection.parse(message)
        if kind is Message.SLAB:
            if self.grants:
                self.grant()
        elif kind is Message.FILLED:
            known = {each.report for each in self.filled}
            filled = [each for each in connection.parse_filled(data) if each.report not in known]  # when it is attached
            self.filled += filled
            for each in filled if self.commits else []:
                self.commit(each)
            return
        elif kind is Message.ROOM and self.make_room():
            self.tell(Message.ROOM, a)
        self.told.append((kind, a, b, data))


def _pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that take a burst of answers."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_SNDBUFFORCE", 32), BUFFER_BYTES)
    return ends


@contextmanager
def running(place: Path, options: Options, **more: Any) -> Iterator[Program]:
    """One that is attached."""
    program = Program(place, options, **more)
    try:
        program.attach()
        yield program
    finally:
        program.close()
