"""The listing of a directory in the index: (directory, position) → name.

readdir resumes from a position (d_off): 64 bits, given out in order, never used twice within a directory. A name keeps
its position as long as it is listed. So a listing that is read while names come and go shows each name that was there
all the time exactly once (hazard 8).

A directory gets a new record when the kernel has forgotten it, or when a restart follows an invalidation. The new
record does not say which positions were given out before. So new positions begin behind all existing rows (hazard 27).
A row counts only if the dentry of its name has no other position.

A name that the source does not answer for has a row, and may have no dentry. It gets a dentry when it is looked up, and
keeps its position.
"""

from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType

from cachefs.contract.index import Table
from cachefs.metadata.inode_cache import InodeCache
from cachefs.store.index.environment import Update, View
from cachefs.store.index.records import (
    FLAGS_NONE,
    FLAGS_PINNED,
    PINNED,
    Dentry,
    Inode,
    inode_key,
    inode_of_key,
    pair_key,
)


def is_listed_at(dentry: Dentry | None, position: int) -> bool:
    """Does the row at this position count, or is the name listed elsewhere?"""
    return dentry is None or dentry.position in (0, position)


class Listings:
    def __init__(self, metadata: InodeCache) -> None:
        self._metadata = metadata

    def rows(self, view: View, directory: int, after: int) -> Iterable[tuple[int, bytes]]:
        """(position, name) of each row behind position `after`, in order."""
        for key, value in view.scan(Table.LISTING, inode_key(directory), pair_key(directory, after + 1)):
            yield inode_of_key(key[8:16]), value[4:]

    def add_rows(
        self,
        update: Update,
        directory: Inode,
        names: Iterable[bytes],
        *,
        pin: bool,
        bare: Container[bytes] = (),
        placed: Mapping[bytes, int] = MappingProxyType({}),
    ) -> tuple[Inode, list[bytes]]:
        """Give a position to each name that has none and has a dentry, or is `bare`.

        `placed`: positions that `remove_rows` has returned. Returns the directory, and the names without a dentry (if
        `pin`: without a pinned one).
        """
        flags = FLAGS_PINNED if pin else FLAGS_NONE
        last = update.last_key(Table.LISTING, inode_key(directory.number))
        position = max(directory.next_position, inode_of_key(last[8:16]) + 1 if last is not None else 0)
        wanting = []
        for name in names:
            dentry = self._metadata.dentry(update, directory.number, name)
            if dentry is None or (pin and not dentry.flags & PINNED):
                wanting.append(name)
            if dentry is None and name not in bare:
                continue
            place = placed.get(name, position)
            if dentry is not None and dentry.position:
                # The dentry may have outlived its row: a pinned file's is durable, a read-write mount's row is not.
                key = pair_key(directory.number, dentry.position)
                row = update.get(Table.LISTING, key)
                if row is None:
                    update.put(Table.LISTING, key, flags + name)
                if row is None or row[4:] == name:
                    continue
                place = position
            update.put(Table.LISTING, pair_key(directory.number, place), flags + name)
            if dentry is not None:
                self._metadata.put_dentry(update, directory.number, name, dentry._replace(position=place))
            position += place == position
        directory = directory._replace(next_position=position)
        self._metadata.put_inode(update, directory)
        return directory, wanting

    def remove_rows(
        self, update: Update, directory: int, keep: set[bytes], bare: Container[bytes] = ()
    ) -> dict[bytes, int]:
        """Remove the rows of all names but `keep`. The names go as well, except those of valid pinned files, which are
        still served.

        Returns the positions of those `bare` names whose dentries do not have them.
        """
        placed: dict[bytes, int] = {}
        for position, name in list(self.rows(update, directory, 0)):
            if name in keep and name not in bare:
                continue
            dentry = self._metadata.dentry(update, directory, name)
            if name in keep:
                if dentry is None or not dentry.position:
                    placed.setdefault(name, position)
                continue
            if dentry is None or dentry.position != position:  # a row without a name
                update.delete(Table.LISTING, pair_key(directory, position))
            inode = self._metadata.inode(update, dentry.inode) if dentry is not None else None
            served = inode is not None and self._metadata.is_pinned(inode) and self._metadata.remaining_ns(inode)
            if dentry is not None and served:
                update.delete(Table.LISTING, pair_key(directory, position))
                self._metadata.put_dentry(update, directory, name, dentry._replace(position=0))
            else:
                self._metadata.apply_absence(update, directory, name, pin=False)
        return placed
