"""What was written through this mount: files, which stay mutable after a restart until they are pinned, and directories
in which files were overwritten, which hold results (`InodeCache.holds_results`).

The inode of a written file has the flag WRITTEN, but is not pinned, so its record ends with the run. The durable index
keeps a mark of it: META `written:` and the identity of the file at the source. The mark goes when the file is pinned
(`cachefs pin`), or when its last name is removed through this mount. If another object gets the inode number, its birth
time differs, and the mark does not apply to it. Without birth times it does, which costs caching, not correctness.
Directories have the same mark, META `results:`, which stays. A file that `cachefs pin` has pinned has the mark
`pinned::`, so that it stays immutable where a directory holds results.

Where inode numbers do not stay (NO_NUMBER), a hash of the path stands for the number. So a directory that is renamed
leaves the marks of what is beneath it behind.
"""

import struct
from hashlib import blake2b

from cachefs.contract.index import ROOT_INODE, Table
from cachefs.metadata.inode_paths import links_of
from cachefs.store.index.environment import Update, View
from cachefs.store.index.records import PINNED, Inode
from cachefs.system.stat import NO_NUMBER, Stat, may_be_one_birth

_WRITTEN, _RESULTS, _KEPT = b"written:", b"results:", b"pinned::"
_KEY = struct.Struct(">8sQQ")  # one of these, device, source inode or hash of the path
_VALUE = struct.Struct("<IIq")  # flags, reserved, birth time
Link = tuple[int, bytes]
"""A name: directory, and name in it."""


def _key(view: View, kind: bytes, file: Inode | Stat, link: Link | None = None) -> bytes | None:
    """`link`: a name of the file; None: its record has one. None where no name leads to a file without a number."""
    number: int | None = file.source_inode if isinstance(file, Inode) else file.inode
    if number == NO_NUMBER:
        number = _hash_of_path(view, file.number if isinstance(file, Inode) else 0, link)
    return None if number is None else _KEY.pack(kind, file.device, number)


def _hash_of_path(view: View, number: int, link: Link | None) -> int | None:
    names: list[bytes] = []
    passed = set()
    while number != ROOT_INODE:
        link = link or next(iter(links_of(view, number, 1)), None)
        if link is None or link in passed:  # the names form a circle
            return None
        passed.add(link)
        number, name = link
        names.append(name)
        link = None
    return int.from_bytes(blake2b(b"/".join(names), digest_size=8).digest(), "big")


def _set(update: Update, kind: bytes, file: Inode) -> bool:
    """Returns whether the mark is new. It costs nothing if it is there already."""
    key, value = _key(update, kind, file), _VALUE.pack(PINNED, 0, file.btime_ns)
    is_new = key is not None and update.get(Table.META, key) != value
    if key is not None and is_new:
        update.put(Table.META, key, value)
    return is_new


def _has(view: View, kind: bytes, file: Inode | Stat, link: Link | None = None) -> bool:
    key = _key(view, kind, file, link)
    value = None if key is None else view.get(Table.META, key)
    return value is not None and may_be_one_birth(_VALUE.unpack(value)[2], file.btime_ns)


def _clear(update: Update, kind: bytes, file: Inode, link: Link | None = None) -> None:
    key = _key(update, kind, file, link)
    if key is not None and update.get(Table.META, key) is not None:
        update.delete(Table.META, key)


def mark(update: Update, file: Inode) -> bool:
    """Record that a file was written, or that a directory holds results. Returns whether that was new."""
    return _set(update, _RESULTS if file.is_directory else _WRITTEN, file)


def is_marked(view: View, now: Stat, link: Link) -> bool:
    """`link`: the name that has led to the file."""
    return _has(view, _WRITTEN, now, link)


def unmark(update: Update, file: Inode, link: Link | None = None) -> None:
    """`link`: the name that the file has just lost; None: it has one."""
    _clear(update, _WRITTEN, file, link)


def keep(update: Update, file: Inode, *, kept: bool = True) -> None:
    """`cachefs pin` has pinned a file, or `cachefs unpin` has unpinned it."""
    if kept:
        _set(update, _KEPT, file)
    else:
        _clear(update, _KEPT, file)


def is_kept(view: View, file: Inode) -> bool:
    return _has(view, _KEPT, file)


def are_results(view: View) -> bool:
    """Does any directory hold results?"""
    return view.first_key(Table.META, _RESULTS) is not None


def holds_results(view: View, directory: Inode) -> bool:
    return _has(view, _RESULTS, directory)
