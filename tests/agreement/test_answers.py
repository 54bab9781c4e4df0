"""What the fast path answers by itself: all of fastpath/c/hits against rules in Python.

Over indexes of any content it answers just what it may, and passes on just what it must: the rules are those of
docs/FASTPATH.md, written down once more over `Validity`.
"""

import errno
import math
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.contract.blob import BLOCK_BYTES
from cachefs.contract.index import ROOT_INODE, Table
from cachefs.contract.shared import SharedFlag
from cachefs.fastpath.shared_memory import mount_flags
from cachefs.metadata.validity import FOREVER_NS, Run, Validity
from cachefs.options import CacheLevel, Options
from cachefs.store.blob.record import checksums_of
from cachefs.store.index.environment import TOMBSTONE, Environment, View
from cachefs.store.index.records import (
    FLAGS_PINNED,
    IMMUTABLE,
    IMMUTABLE_ON_OPEN,
    LISTED,
    PINNED,
    STALE,
    UNLINKED,
    UNSETTLED,
    WRITTEN,
    Dentry,
    Extent,
    Inode,
    inode_key,
    pair_key,
)
from cachefs.system.clock import NANOSECONDS, Clock
from policies.globs import Globs
from tests.agreement.library import Answer, FastPath
from tests.agreement.test_window import environments

NOW_NS = 10**15
RUN, SEED = 3, 77
NUMBERS = range(1, 6)
NAMES = [b"a", b"b", b"nn"]
FAST_HANDLE = 1 << 63
KEEP_CACHE, NOFLUSH = 2, 32
MAX_REPLY_PARTS = 8
"""Of more pieces than that Python makes the answer (kernel/reply.h)."""
LOOKUP, FORGET, GETATTR, READLINK, OPEN, READ, GETXATTR, LISTXATTR = 1, 2, 3, 5, 14, 15, 22, 23
RELEASE, FLUSH, OPENDIR, READDIR, FSYNCDIR, ACCESS, BATCH_FORGET, READDIRPLUS = 18, 25, 27, 28, 30, 34, 42, 44
_ATTR = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<4Q2I")  # nodeid, generation, entry_valid, attr_valid, their nanoseconds; attributes follow
_DIRENT = struct.Struct("<2Q2I")
_READ = struct.Struct("<2Q2IQ2I")  # fh, offset, size, …
BLOB_BYTES = 3 * BLOCK_BYTES
BLOB = bytes(number * 37 % 251 for number in range(BLOB_BYTES))
MOUNTS = [
    Options(read_only=True, attr_timeout_s=math.inf),
    Options(read_only=True, attr_timeout_s=math.inf, mutable=Globs(["*.log"])),
    Options(read_only=True),
    Options(),
    Options(cache=CacheLevel.NONE),
]


@dataclass
class Index:
    """What both sides have before them."""

    mount: Options
    validity: Validity
    session: Environment
    durable: Environment

    def view(self) -> View:
        return View(self.session, self.durable)

    def inode(self, view: View, number: int) -> Inode | None:
        value = view.get(Table.INODES, inode_key(number))
        return Inode.unpack(number, value) if value else None

    def dentry(self, view: View, parent: int, name: bytes) -> Dentry | None:
        value = view.get(Table.DENTRIES, inode_key(parent) + name)
        return Dentry.unpack(value) if value else None

    def valid_inode(self, view: View, number: int) -> tuple[Inode, int] | None:
        """A pinned record, and for how long it holds."""
        record = self.inode(view, number)
        if record is None or not self.validity.is_pinned(record):
            return None
        remaining_ns = self.validity.remaining_ns(record)
        return (record, remaining_ns) if remaining_ns else None

    def is_immutable(self, record: Inode) -> bool:
        kept = record.flags & IMMUTABLE or self.mount.pins_everything
        return bool(record.is_regular and self.validity.is_pinned(record) and kept)


# --- what is drawn ---------------------------------------------------------------------------------------------------


rarely = st.sampled_from([False] * 9 + [True])


@st.composite
def records(draw: st.DrawFn, number: int) -> Inode:
    """As they usually are, and sometimes not."""

    kinds = [stat.S_IFREG, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK]
    kind = stat.S_IFDIR if number <= 2 else draw(st.sampled_from(kinds))
    flags = PINNED | IMMUTABLE * (kind == stat.S_IFREG) | LISTED * (kind == stat.S_IFDIR)
    if draw(rarely):
        flags ^= draw(
            st.sampled_from([PINNED, IMMUTABLE, LISTED, STALE, UNLINKED, UNSETTLED, WRITTEN, IMMUTABLE_ON_OPEN])
        )
    if draw(rarely):
        flags = draw(st.integers(0, 511))
    times = st.integers(-(10**9), 10**9) | st.just(NOW_NS - 10**9) | st.just(NOW_NS + 10**9)
    return Inode(number, *[0] * 22)._replace(
        flags=flags,
        mode=kind | draw(st.integers(0, 0o7777)),
        nlink=draw(st.integers(0, 3)),
        uid=draw(st.integers(0, 3)),
        gid=draw(st.integers(4, 7)),
        rdev=draw(st.integers(0, 9)),
        blksize=draw(st.sampled_from([512, 4096])),
        size=draw(st.integers(0, 300) | st.sampled_from([BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1])),
        blocks=draw(st.integers(0, 99)),
        atime_ns=draw(times),
        mtime_ns=draw(times),
        ctime_ns=draw(times),
        device=9 if draw(rarely) else 0,
        version=draw(st.integers(1, 2)),
        validated_run=RUN - 1 if draw(rarely) else RUN,
        entries_valid_from=draw(st.sampled_from([RUN, RUN + 1])) if draw(rarely) else RUN - 1,
        expires_ns=draw(st.sampled_from([0, NOW_NS - 1, NOW_NS + 1, NOW_NS + 1_500_000_000])),
    )


def put(environment: Environment, table: Table, key: bytes, value: bytes) -> None:
    with environment.write() as txn:
        txn.put(key, value, db=environment.tables[table])


@st.composite
def contents(draw: st.DrawFn) -> list[tuple[bool, Table, bytes, bytes]]:
    """(in the session, table, key, value)"""
    found: list[tuple[bool, Table, bytes, bytes]] = []

    def add(table: Table, key: bytes, value: bytes) -> None:
        where = draw(
            st.sampled_from(["session", "session", "durable", "durable", "durable", "durable", "hidden", "twice"])
        )
        if where != "session":
            found.append((False, table, key, value))
        if where != "durable":
            found.append((True, table, key, TOMBSTONE if where == "hidden" else value))

    for number in NUMBERS:
        if draw(rarely):
            continue
        record = draw(records(number))
        add(Table.INODES, inode_key(number), record.pack())
        for position, name in enumerate(NAMES, start=3):
            listed = draw(st.sampled_from([0, 3, 4, 5, 6])) if draw(rarely) else position
            if not draw(rarely):
                inode = draw(st.sampled_from([0, 2, 3, 4, 5, 5, 9]))
                flags = 0 if draw(rarely) else PINNED
                validated_run = RUN - 1 if draw(rarely) else RUN
                add(Table.DENTRIES, inode_key(number) + name, Dentry(flags, inode, validated_run, listed).pack())
            if not draw(rarely):
                add(Table.LISTING, pair_key(number, position), FLAGS_PINNED + name)
            if draw(st.booleans()):
                version = 3 if draw(rarely) else record.version
                value = draw(st.sampled_from([b"\0", b"\1", b"\1value", b"\1a\0bb"]))
                add(Table.XATTRS, inode_key(number) + name, _value(version, value))
        if draw(st.booleans()) or stat.S_ISLNK(record.mode):
            version = 3 if draw(rarely) else record.version
            add(Table.SYMLINKS, inode_key(number), _value(version, b"target"))
        if draw(st.booleans()):
            value = draw(st.sampled_from([b"\0", b"\1", b"\1a\0bb"]))
            add(Table.XATTRS, inode_key(number), _value(record.version, value))
        if draw(st.booleans()):
            add(Table.LINKS, inode_key(number) + inode_key(draw(st.sampled_from([1, 2, 3]))) + b"a", FLAGS_PINNED)
        if record.is_regular:
            found += [(False, Table.EXTENTS, *extent) for extent in draw(extents(record))]
    return found


def _value(version: int, value: bytes) -> bytes:
    return FLAGS_PINNED + bytes(4) + version.to_bytes(8, "little") + value


@st.composite
def extents(draw: st.DrawFn, record: Inode) -> list[tuple[bytes, bytes]]:
    """Pieces of the file in order, of its version or another one, some of them damaged."""
    found: list[tuple[bytes, bytes]] = []
    at = 10 if draw(rarely) else 0
    while at < record.size and not draw(rarely):
        length = min(draw(st.sampled_from([1, 100, 150, BLOCK_BYTES, BLOCK_BYTES + 5])), record.size - at)
        blob_offset = draw(st.integers(0, BLOB_BYTES - length))
        checksums = list(checksums_of(BLOB[blob_offset : blob_offset + length], SEED))
        if draw(rarely):
            checksums[-1] ^= 1
        version = 3 if draw(rarely) else record.version
        extent = Extent(PINNED, length, blob_offset, version, length, tuple(checksums))
        found.append((pair_key(record.number, at), extent.pack()))
        at += length + 7 * (draw(rarely))
    return found


# --- the rules -------------------------------------------------------------------------------------------------------


def attributes(number: int, record: Inode) -> bytes:
    seconds, rest = [], []
    for ns in (record.atime_ns, record.mtime_ns, record.ctime_ns):
        seconds.append(ns // NANOSECONDS & (1 << 64) - 1)
        rest.append(ns % NANOSECONDS)
    return _ATTR.pack(
        number, record.size, record.allocated_blocks, *seconds, *rest, record.mode, record.nlink, record.uid,
        record.gid, record.rdev, record.blksize, 0,
    )  # fmt: skip


def timeout(ns: int) -> tuple[int, int]:
    return ((1 << 64) - 1, 0) if ns == FOREVER_NS else divmod(ns, NANOSECONDS)


def entry(number: int, record: Inode | None, remaining_ns: int) -> bytes:
    valid, rest = timeout(remaining_ns)
    if record is None:  # an absence: the kernel looks at the time of the name alone
        return _ENTRY.pack(0, 0, valid, 0, rest, 0) + bytes(_ATTR.size)
    return _ENTRY.pack(number, 0, valid, valid, rest, rest) + attributes(number, record)


def look_up(index: Index, view: View, parent: int, name: bytes) -> Answer | None:
    above = index.valid_inode(view, parent)
    dentry = index.dentry(view, parent, name)
    if above is None:
        return None
    if index.validity.knows_absent(above[0], dentry):
        return Answer(0, entry(0, None, above[1]))
    if dentry is None or not dentry.inode or not index.validity.entry_holds(above[0], dentry):
        return None
    found = index.valid_inode(view, dentry.inode)
    return Answer(0, entry(dentry.inode, *found)) if found is not None else None


def getattr_(index: Index, view: View, number: int) -> Answer | None:
    found = index.valid_inode(view, number)
    if found is None:
        return None
    valid, rest = timeout(found[1])
    return Answer(0, struct.pack("<Q2I", valid, rest, 0) + attributes(number, found[0]))


def value_of(index: Index, view: View, table: Table, number: int, name: bytes) -> bytes | None:
    found = index.valid_inode(view, number)
    value = view.get(table, inode_key(number) + name)
    if found is None or not value or int.from_bytes(value[8:16], "little") != found[0].version:
        return None
    return value[16:]


def xattr(index: Index, view: View, opcode: int, number: int, name: bytes, size: int) -> Answer | None:
    value = value_of(index, view, Table.XATTRS, number, name)
    if value is None:
        return None
    if value[:1] == b"\0":
        return Answer(errno.ENODATA, b"")
    value = value[1:]
    if opcode == LISTXATTR and value:
        return None
    if not size:
        return Answer(0, struct.pack("<2I", len(value), 0))
    return Answer(0, value) if len(value) <= size else Answer(errno.ERANGE, b"")


def read(index: Index, view: View, number: int, offset: int, size: int, *, ours: bool) -> Answer | None:
    record = index.inode(view, number)
    if record is None:
        return None
    others = IMMUTABLE | WRITTEN | STALE | UNLINKED | IMMUTABLE_ON_OPEN
    opened = (ours or index.mount.is_complete) and record.flags & others == IMMUTABLE_ON_OPEN
    if not opened and not (index.validity.remaining_ns(record) and index.is_immutable(record)):
        return None
    end, parts = min(offset + size, record.size), []
    while offset < end:
        found = view.extents.at(number, offset)
        if found is None or found[1].version != record.version:
            return None
        start, extent = found
        piece = BLOB[extent.blob_offset : extent.blob_offset + extent.length]
        until = min(start + extent.length, end)
        blocks = range((offset - start) // BLOCK_BYTES, (until - start - 1) // BLOCK_BYTES + 1)
        checksums = checksums_of(piece, SEED)
        if any(checksums[block] != extent.checksums[block] for block in blocks):
            return None
        if len(parts) == MAX_REPLY_PARTS:
            return None
        parts.append(piece[offset - start : until - start])
        offset = until
    return Answer(0, b"".join(parts))


def dirent(name: bytes, position: int, number: int, mode: int) -> bytes:
    head = _DIRENT.pack(number, position, len(name), mode >> 12) + name
    return head + bytes(-len(head) % 8)


def list_(index: Index, view: View, number: int, offset: int, size: int, *, plus: bool) -> Answer | None:
    found = index.valid_inode(view, number)
    if not index.mount.pins_everything or found is None or not found[0].flags & LISTED:
        return None
    out = b""
    nothing = bytes(_ENTRY.size + _ATTR.size) if plus else b""

    def add(row: bytes) -> bool:
        nonlocal out
        fits = len(out) + len(row) <= size
        out += row if fits else b""
        return fits

    link = view.first_key(Table.LINKS, inode_key(number)) if number != ROOT_INODE else None
    parent = int.from_bytes(link[8:16], "big") if link is not None else ROOT_INODE
    for position, name, inode in ((1, b".", number), (2, b"..", parent)):
        if offset < position and not add(nothing + dirent(name, position, inode, stat.S_IFDIR)):
            return Answer(0, out)
    start = pair_key(number, max(offset, 2) + 1)
    for key, value in view.scan(Table.LISTING, inode_key(number), start):
        position, name = int.from_bytes(key[8:16], "big"), value[4:]
        dentry = index.dentry(view, number, name)
        holds = dentry is not None and dentry.inode and index.validity.entry_holds(found[0], dentry)
        below = index.valid_inode(view, dentry.inode) if dentry is not None and holds else None
        if dentry is None or below is None:
            return Answer(0, out) if out else None  # the rest is asked for again, and passed on then
        if dentry.position and dentry.position != position:
            continue  # the name is listed elsewhere
        head = entry(dentry.inode, *below) if plus else b""
        if not add(head + dirent(name, position, dentry.inode, below[0].mode)):
            break
    return Answer(0, out)


def open_(index: Index, view: View, number: int, flags: int) -> Answer | None:
    if index.mount.is_complete:
        return Answer(errno.ENOSYS, b"")
    record = index.inode(view, number)
    if record is None or not index.validity.remaining_ns(record) or not index.is_immutable(record):
        return None
    if record.flags & UNLINKED or flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
        return None
    return Answer(0, struct.pack("<Q2I", FAST_HANDLE | number, NOFLUSH | KEEP_CACHE * (not record.is_young), 0))


def forget(index: Index, view: View, numbers: Sequence[int]) -> Answer | None:
    records = [index.inode(view, number) for number in numbers]
    counts = any(record is None or record.flags & (PINNED | UNLINKED) != PINNED for record in records)
    return None if counts else Answer(0, b"")


# --- both ------------------------------------------------------------------------------------------------------------

Ask = Callable[..., Answer | None]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Environment, Environment, int]]:
    directory = tmp_path_factory.mktemp("answers")
    (directory / "blob").write_bytes(BLOB)
    blob = os.open(directory / "blob", os.O_RDONLY)
    with environments(directory) as (session, durable):
        yield session, durable, blob
    os.close(blob)


def know(environments: Sequence[Environment], content: list[tuple[bool, Table, bytes, bytes]]) -> None:
    for environment, is_session in zip(environments, (True, False), strict=True):
        with environment.write() as txn:
            for table in environment.tables:
                txn.drop(table, delete=False)
            for in_session, table, key, value in content:
                if in_session == is_session:
                    txn.put(key, value, db=environment.tables[table])


def check_all(index: Index, ask: Ask) -> int:
    """Every request that tells something. How many the fast path has answered."""
    answered = 0
    with index.view() as view:
        cases: list[tuple[str, Answer | None, tuple[Any, ...]]] = []
        for number in NUMBERS:
            for name in [*NAMES, b"other"]:
                cases.append(("lookup", look_up(index, view, number, name), (LOOKUP, number, name + b"\0")))
                for size in (0, 3, 100):
                    body = struct.pack("<2I", size, 0)
                    known = xattr(index, view, GETXATTR, number, name, size)
                    cases.append((f"getxattr {size}", known, (GETXATTR, number, body + name + b"\0")))
            for size in (0, 100):
                known = xattr(index, view, LISTXATTR, number, b"", size)
                cases.append((f"listxattr {size}", known, (LISTXATTR, number, struct.pack("<2I", size, 0))))
            cases.append(("getattr", getattr_(index, view, number), (GETATTR, number, bytes(16))))
            target = value_of(index, view, Table.SYMLINKS, number, b"")
            cases.append(("readlink", None if target is None else Answer(0, target), (READLINK, number, b"")))
            for handle in (0, FAST_HANDLE | number):
                for offset, size in ((0, 1 << 20), (0, 100), (99, 2), (5, 140), (BLOCK_BYTES - 1, 2), (400_000, 9)):
                    body = _READ.pack(handle, offset, size, 0, 0, 0, 0)
                    known = read(index, view, number, offset, size, ours=bool(handle))
                    cases.append((f"read {handle:x} {offset} {size}", known, (READ, number, body)))
            for opcode in (READDIR, READDIRPLUS):
                for offset, size in ((0, 4096), (0, 100), (1, 4096), (2, 4096), (4, 4096), (9, 4096)):
                    body = _READ.pack(0, offset, size, 0, 0, 0, 0)
                    listed = list_(index, view, number, offset, size, plus=opcode == READDIRPLUS)
                    cases.append((f"readdir {opcode} {offset} {size}", listed, (opcode, number, body)))
            record = index.inode(view, number)
            others = IMMUTABLE | WRITTEN | STALE | UNLINKED | IMMUTABLE_ON_OPEN
            for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
                if record is None or record.flags & others != IMMUTABLE_ON_OPEN:  # else it is reported as well
                    body = struct.pack("<2I", flags, 0)
                    cases.append((f"open {flags:o}", open_(index, view, number, flags), (OPEN, number, body)))
            cases.append(("forget", forget(index, view, [number]), (FORGET, number, struct.pack("<Q", 1))))
            other = number % 5 + 1
            batch = struct.pack("<2I", 2, 0) + struct.pack("<4Q", number, 1, other, 1)
            cases.append(("batch forget", forget(index, view, [number, other]), (BATCH_FORGET, 0, batch)))
        for what, expected, request in cases:
            found = ask(*request)
            assert found == expected, f"{what} of {request[1]}"
            answered += found is not None
    return answered


@settings(max_examples=200)
@given(
    mount=st.sampled_from(MOUNTS),
    content=contents(),
    floors=st.sampled_from([(0, 0), (0, 0), (RUN, 0), (RUN, RUN), (0, RUN)]),
    guessing=st.booleans(),
)
def test_it_answers_what_it_may_and_passes_on_what_it_must(
    fast_path: FastPath,
    place: tuple[Environment, Environment, int],
    mount: Options,
    content: list[tuple[bool, Table, bytes, bytes]],
    floors: tuple[int, int],
    guessing: bool,
) -> None:
    session, durable, blob = place
    know((session, durable), content)
    fast_path.set_up(mount, run=RUN, floor=floors[0], strict_floor=floors[1], links_floor=floors[1], seed=SEED)
    fast_path.shared["serving"] = 1
    fast_path.set_clock(NOW_NS)
    validity = Validity(mount, Run(RUN, *floors, floors[1]), Clock(monotonic_ns=lambda: NOW_NS))
    index = Index(mount, validity, session, durable)
    with fast_path.over(session, durable), fast_path.answering(blob):

        def ask(*request: Any) -> Answer | None:
            return fast_path.ask(*request, guessing=guessing)

        check_all(index, ask)


def test_a_daemon_that_does_not_serve_yet_gets_everything_that_needs_the_index(
    fast_path: FastPath, place: tuple[Environment, Environment, int]
) -> None:
    session, durable, blob = place
    root = Inode(ROOT_INODE, *[0] * 22)._replace(flags=PINNED | LISTED, mode=stat.S_IFDIR, validated_run=RUN)
    know((session, durable), [(False, Table.INODES, inode_key(ROOT_INODE), root.pack())])
    fast_path.set_up(MOUNTS[0], run=RUN, seed=SEED)
    with fast_path.over(session, durable), fast_path.answering(blob):
        for serving, is_answered in ((0, False), (1, True)):
            fast_path.shared["serving"] = serving
            assert (fast_path.ask(GETATTR, ROOT_INODE, bytes(16)) is not None) == is_answered


@pytest.mark.parametrize("mount", MOUNTS, ids=lambda mount: f"{mount_flags(mount):x}")
def test_what_needs_no_look_at_the_index(
    fast_path: FastPath, place: tuple[Environment, Environment, int], mount: Options
) -> None:
    session, durable, blob = place
    know((session, durable), [])
    fast_path.set_up(mount, run=RUN, seed=SEED)
    fast_path.shared["serving"] = 0
    flags = mount_flags(mount)
    ours, theirs = FAST_HANDLE | 7, 12
    done, refused = Answer(0, b""), Answer(errno.ENOSYS, b"")
    no_open = bool(flags & SharedFlag.NO_OPEN)
    assert no_open == bool(flags & SharedFlag.PINS_EVERYTHING and not mount.mutable)
    handle = Answer(0, struct.pack("<Q2I", ours, 0, 0))
    with fast_path.over(session, durable), fast_path.answering(blob):
        assert fast_path.ask(OPENDIR, 7, bytes(8)) == (refused if no_open else handle)
        for opcode in (RELEASE, 29):
            assert fast_path.ask(opcode, 7, struct.pack("<3Q", ours, 0, 0)) == done
            assert fast_path.ask(opcode, 7, struct.pack("<3Q", theirs, 0, 0)) is None
        for number, expected in ((ours, done), (theirs, None)):
            flushed = fast_path.ask(FLUSH, 7, struct.pack("<3Q", number, 0, 0))
            assert flushed == (refused if flags & SharedFlag.READ_ONLY else expected)
            synced = fast_path.ask(20, 7, struct.pack("<2Q", number, 0))
            assert synced == (done if flags & SharedFlag.READ_ONLY else expected)
        assert fast_path.ask(FSYNCDIR, 7, struct.pack("<2Q", ours, 0)) is None
        for opcode in (39, 40, 46):
            assert fast_path.ask(opcode, 7, bytes(64)) == refused
        assert fast_path.ask(ACCESS, 7, bytes(8)) == done
        for opcode in (17, 9):
            assert fast_path.ask(opcode, 7, bytes(8) + b"name\0") is None
