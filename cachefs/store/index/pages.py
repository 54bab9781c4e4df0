"""The length of an LMDB file, which LMDB does not check.

LMDB maps data.mdb and reads whatever page a tree refers to. A page beyond the end of the file kills the process
(SIGBUS). So the length of the file is compared with its last page before LMDB opens it.

LMDB does not write pages that a transaction took and gave back, and the last page may be one of them. So the file is
made long enough after each commit (`extend`). Only a crash between the two leaves a whole index that looks short: it
is rebuilt.
"""

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from cachefs.errors import IndexDamaged
from cachefs.system.descriptors import closing

_META = struct.Struct("<16x2I16xI92xQ")
"""Of a meta page: magic, version, page size, last page."""
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
    """After a commit: let the file contain its last page."""
    length = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    with suppress(OSError):  # then the next mount may rebuild the index
        if path.stat().st_size < length:
            os.truncate(path, length)
