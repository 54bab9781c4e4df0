"""The length of an LMDB file, the structure of its pages, and its checksum: LMDB checks none of them.

LMDB maps data.mdb and reads whatever page a tree refers to. A page beyond the end of the file kills the process
(SIGBUS). So the length of the file is compared with its last page before LMDB opens it.

LMDB does not write pages that a transaction took and gave back, and the last page may be one of them. So the file is
made long enough after each commit (`extend`). Only a crash between the two leaves a whole index that looks short: it
is rebuilt.

`check_pages` walks all trees when cachefs is mounted. Each page must have its own number, so that pages that have
exchanged their places are noticed, and its nodes must lie within it, because LMDB follows them beyond the page. Of a
large index only the heads of leaf pages are checked, which costs about one second for ten million files.

`write_checksum` records the checksum of a file that nobody uses any more, and the last transaction in it. It notices
what leaves every page consistent: a flipped bit in the key of a listing's row hides a name (`check_checksum`). It says
nothing about a file with a later transaction: the daemon was killed, or had an earlier version of cachefs.
"""

import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from cachefs.errors import IndexDamaged
from cachefs.system import private_files
from cachefs.system.descriptors import closing

_META = struct.Struct("<16x2I16xI92xQ")
"""The fields of a meta page: magic, version, page size, last page."""
_ROOTS = struct.Struct("<80xQ40xQ8xQ")
"""More fields of a meta page: the roots of the table of free pages and of the table of tables; the transaction."""
_HEAD = struct.Struct("<Q2x3H")
"""The head of a page: its number, flags, and the bounds of its free space."""
_NODE = struct.Struct("<4H")
"""The head of a node. In a leaf: low and high part of the size of the data, flags, the length of the key. In a branch
the first three are parts of a page number."""
_BRANCH, _LEAF, _TYPES = 1, 2, 0x27
_BIG, _TABLE = 1, 2
_ROOT_OF_TABLE = struct.Struct("<40xQ")
_NO_PAGE = (1 << 64) - 1
_CHECKSUM = struct.Struct("<3Q")
"""The last transaction, the length in bytes, and the XXH3-64 of that length."""
_CHECKSUM_NAME = "checksum"
_MAX_THOROUGH_BYTES = 64 << 20
_MAX_SUMMED_BYTES = 1 << 30
"""Half a second to read."""
_CHUNK_BYTES = 1 << 20
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_SIZES = range(512, (1 << 16) + 1)


def check_length(path: Path) -> None:
    """Raises IndexDamaged if the file is too short, or lacks a meta page. An empty or absent file is new."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with closing(fd):
        size = os.fstat(fd).st_size
        if not size:
            return
        needed = _needed(fd)
    if needed is None:
        raise IndexDamaged(f"the index in {path.parent} is damaged: {path.name} does not begin as an index does")
    if size < needed:
        raise IndexDamaged(f"the index in {path.parent} is damaged: {path.name} has {size} of {needed} bytes")


def _needed(fd: int) -> int | None:
    """The least length of the file in bytes, by its two meta pages. None: one of them is damaged."""
    needed = offset = 0
    for _ in range(2):
        data = os.pread(fd, _META.size, offset)
        if len(data) < _META.size:
            return None
        magic, version, page_bytes, last_page = _META.unpack(data)
        if (magic, version) != (_MAGIC, _VERSION) or page_bytes not in _PAGE_SIZES:
            return None
        needed = max(needed, (last_page + 1) * page_bytes)
        offset = page_bytes
    return needed


def extend(path: Path, environment: Any) -> None:
    """After a commit: let the file contain its last page. A meta page that was damaged may name one beyond the map."""
    info = environment.info()
    length = (info["last_pgno"] + 1) * environment.stat()["psize"]
    with suppress(OSError):  # then the next mount may rebuild the index
        if path.stat().st_size < length <= info["map_size"]:
            os.truncate(path, length)


def write_checksum(path: Path) -> None:
    """For the next `check_checksum`. The file must not be in use."""
    with suppress(OSError):  # then the next mount does not check it
        with open(path, "rb") as file:
            length = _needed(file.fileno())
            if length is None or length > _MAX_SUMMED_BYTES:
                return
            found = _transactions(file.fileno())[1], length, _checksum(file.fileno(), length)
        private_files.write_file(path.with_name(_CHECKSUM_NAME), _CHECKSUM.pack(*found))


def check_checksum(path: Path) -> None:
    """Raises IndexDamaged if the file has changed without a transaction since `write_checksum`. It must be as long as
    `check_length` wants it."""
    try:
        transaction, length, expected = _CHECKSUM.unpack(path.with_name(_CHECKSUM_NAME).read_bytes())
    except (OSError, struct.error):
        return
    with open(path, "rb") as file:
        try:
            earlier, last = _transactions(file.fileno())
        except struct.error:  # it is empty, which `check_length` takes for a new one
            earlier = last = 0
        if last > transaction and last - earlier <= 1:
            return
        size = os.fstat(file.fileno()).st_size  # the checksum itself may be damaged
        is_whole = last == transaction and length <= size and _checksum(file.fileno(), length) == expected
    if not is_whole:
        raise IndexDamaged(f"the index in {path.parent} is damaged: {path.name} is not as it was left")


def _transactions(fd: int) -> list[int]:
    """The transactions of the two meta pages, in order. They follow one another."""
    page_bytes = _META.unpack(os.pread(fd, _META.size, 0))[2]
    return sorted(_ROOTS.unpack(os.pread(fd, _ROOTS.size, offset))[2] for offset in (0, page_bytes))


def _checksum(fd: int, length: int) -> int:
    state = xxhash.xxh3_64()
    for offset in range(0, length, _CHUNK_BYTES):
        state.update(os.pread(fd, min(_CHUNK_BYTES, length - offset), offset))
    return int(state.intdigest())


def check_pages(path: Path) -> None:
    """Raises IndexDamaged if a page that the trees refer to cannot be one of theirs. The file must not be in use."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            page_bytes = _META.unpack_from(data)[2]
            try:
                wrong = _first_wrong_page(data, page_bytes)
            except (struct.error, IndexError):
                wrong = 0
    if wrong is not None:
        raise IndexDamaged(f"the index in {path.parent} is damaged: page {wrong} of {path.name}")


def _first_wrong_page(data: mmap.mmap, page_bytes: int) -> int | None:
    metas = [_ROOTS.unpack_from(data, 0), _ROOTS.unpack_from(data, page_bytes)]
    free, tables, _ = max(metas, key=lambda meta: meta[2])
    waiting: list[tuple[int, bool]] = [(free, False), (tables, True)]
    seen: set[int] = set()
    is_thorough = len(data) <= _MAX_THOROUGH_BYTES
    while waiting:
        number, has_tables = waiting.pop()
        if number == _NO_PAGE:
            continue
        at = number * page_bytes
        if number in seen or at + page_bytes > len(data):
            return number
        seen.add(number)
        found, flags, lower, upper = _HEAD.unpack_from(data, at)
        kind = flags & _TYPES
        if found != number or kind not in (_BRANCH, _LEAF) or not _HEAD.size <= lower <= upper <= page_bytes:
            return number
        if kind == _LEAF and not (is_thorough or has_tables):
            continue
        for offset in struct.unpack_from(f"<{(lower - _HEAD.size) // 2}H", data, at + _HEAD.size):
            low, high, more, key_bytes = _NODE.unpack_from(data, at + offset)
            value = offset + _NODE.size + key_bytes
            value_bytes = 8 if more & _BIG else low | high << 16
            if not upper <= offset <= page_bytes or value > page_bytes:
                return number
            if kind == _BRANCH:
                waiting.append((low | high << 16 | more << 32, has_tables))
            elif value + value_bytes > page_bytes:
                return number
            elif has_tables and more & _TABLE:
                waiting.append((_ROOT_OF_TABLE.unpack_from(data, at + value)[0], False))
    return None
