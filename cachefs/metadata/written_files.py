"""Files that were written through this mount: they stay mutable after a restart, until they are pinned.

The inode of a written file has the flag WRITTEN, but is not pinned, so its record ends with the run. The durable index
keeps a mark of it: META `written:` and the identity of the file at the source. The mark goes when the file is pinned
(`cachefs pin`), or when its last name is removed through this mount. If another object gets the inode number, its birth
time differs, and the mark does not apply to it. Without birth times it does, which costs caching, not correctness.
"""

import struct

from cachefs.contract.index import Table
from cachefs.store.index.environment import Update, View
from cachefs.store.index.records import PINNED, Inode
from cachefs.system.stat import Stat

_KEY = struct.Struct(">8sQQ")  # b"written:", device, source inode
_VALUE = struct.Struct("<IIq")  # flags, reserved, birth time


def _key(file: Inode | Stat) -> bytes:
    return _KEY.pack(b"written:", file.device, file.source_inode if isinstance(file, Inode) else file.inode)


def mark(update: Update, file: Inode) -> None:
    """Record that a file was written. It costs nothing if that is recorded already."""
    value = _VALUE.pack(PINNED, 0, file.btime_ns)
    if update.get(Table.META, _key(file)) != value:
        update.put(Table.META, _key(file), value)


def is_marked(view: View, now: Stat) -> bool:
    value = view.get(Table.META, _key(now))
    return value is not None and _VALUE.unpack(value)[2] == now.btime_ns


def unmark(update: Update, file: Inode) -> None:
    if update.get(Table.META, _key(file)) is not None:
        update.delete(Table.META, _key(file))
