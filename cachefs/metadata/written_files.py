"""What was written through this mount: files, which stay mutable after a restart until they are pinned, and directories
in which files were overwritten, which hold results (`InodeCache.holds_results`).

The inode of a written file has the flag WRITTEN, but is not pinned, so its record ends with the run. The durable index
keeps a mark of it: META `written:` and the identity of the file at the source. The mark goes when the file is pinned
(`cachefs pin`), or when its last name is removed through this mount. If another object gets the inode number, its birth
time differs, and the mark does not apply to it. Without birth times it does, which costs caching, not correctness.
Directories have the same mark, META `results:`, which stays. A file that `cachefs pin` has pinned has the mark
`pinned::`, so that it stays immutable where a directory holds results.
"""

import struct

from cachefs.contract.index import Table
from cachefs.store.index.environment import Update, View
from cachefs.store.index.records import PINNED, Inode
from cachefs.system.stat import Stat

_WRITTEN, _RESULTS, _KEPT = b"written:", b"results:", b"pinned::"
_KEY = struct.Struct(">8sQQ")  # one of these, device, source inode
_VALUE = struct.Struct("<IIq")  # flags, reserved, birth time


def _key(kind: bytes, file: Inode | Stat) -> bytes:
    return _KEY.pack(kind, file.device, file.source_inode if isinstance(file, Inode) else file.inode)


def _set(update: Update, kind: bytes, file: Inode) -> bool:
    """Returns whether the mark is new. It costs nothing if it is there already."""
    key, value = _key(kind, file), _VALUE.pack(PINNED, 0, file.btime_ns)
    is_new = update.get(Table.META, key) != value
    if is_new:
        update.put(Table.META, key, value)
    return is_new


def _has(view: View, kind: bytes, file: Inode | Stat) -> bool:
    value = view.get(Table.META, _key(kind, file))
    return value is not None and _VALUE.unpack(value)[2] == file.btime_ns


def _clear(update: Update, kind: bytes, file: Inode) -> None:
    key = _key(kind, file)
    if update.get(Table.META, key) is not None:
        update.delete(Table.META, key)


def mark(update: Update, file: Inode) -> bool:
    """Record that a file was written, or that a directory holds results. Returns whether that was new."""
    return _set(update, _RESULTS if file.is_directory else _WRITTEN, file)


def is_marked(view: View, now: Stat) -> bool:
    return _has(view, _WRITTEN, now)


def unmark(update: Update, file: Inode) -> None:
    _clear(update, _WRITTEN, file)


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
