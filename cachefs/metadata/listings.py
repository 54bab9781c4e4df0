"""The listing of a directory in the index: (directory, position) → name.

Positions are what readdir resumes from (d_off): 64 bits, given out in order, never used twice within a directory, and
kept by a name for as long as it is listed. So a listing that is read while names come and go shows every name that
was there all along exactly once (hazard 8).

A record of a directory that is made anew, because the kernel forgot the directory or a restart followed an
invalidation, knows nothing of the positions that were given out before. So new positions begin behind every row that
there is (hazard 27). A row counts only if its name's dentry has no other position.

A name that the source does not answer for has a row and may have no dentry. It gets one when it is looked up, and
keeps its position.
"""

from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType

from cachefs.contract.index import Table
from cachefs.metadata.inode_cache import InodeCache
from cachefs.store.index.environment import Update, View
from cachefs.store.index.records import FLAGS_NONE, FLAGS_PINNED, PINNED, Inode, inode_key, inode_of_key, pair_key


class Listings:
    def __init__(self, metadata: InodeCache) -> None:
        self._metadata = metadata

    def rows(self, view: View, directory: int, after: int) -> Iterable[tuple[int, bytes]]:
        """(position, name) of a listing, in order, from behind position `after`."""
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
        """Give each name that has a dentry, or is `bare`, its place in the listing, if it has none.

        `placed`: what `remove_rows` found. Returns the directory's record, and the names that
        have no dentry, or one that is not pinned though `pin` is.
        """
        flags = FLAGS_PINNED if pin else FLAGS_NONE
        position = max(directory.next_position, self._behind_all(update, directory.number))
        wanting = []
        for name in names:
            dentry = self._metadata.dentry(update, directory.number, name)
            if dentry is None or (pin and not dentry.flags & PINNED):
                wanting.append(name)
            if dentry is None and name not in bare:
                continue
            if dentry is None or not dentry.position:
                place = placed.get(name, position)
                update.put(Table.LISTING, pair_key(directory.number, place), flags + name)
                if dentry is not None:
                    key = inode_key(directory.number) + name
                    update.put(Table.DENTRIES, key, dentry._replace(position=place).pack())
                position += place == position
                continue
            if dentry.position:
                # The dentry may have outlived its row: a pinned file's is durable, a read-write mount's row is not.
                key = pair_key(directory.number, dentry.position)
                row = update.get(Table.LISTING, key)
                if row is None:
                    update.put(Table.LISTING, key, flags + name)
                if row is None or row[4:] == name:
                    continue
            update.put(Table.LISTING, pair_key(directory.number, position), flags + name)
            update.put(Table.DENTRIES, inode_key(directory.number) + name, dentry._replace(position=position).pack())
            position += 1
        directory = directory._replace(next_position=position)
        self._metadata.put_inode(update, directory)
        return directory, wanting

    def _behind_all(self, view: View, directory: int) -> int:
        """A position behind all that rows have."""
        last = view.last_key(Table.LISTING, inode_key(directory))
        return inode_of_key(last[8:16]) + 1 if last is not None else 0

    def remove_rows(
        self, update: Update, directory: int, keep: set[bytes], bare: Container[bytes] = ()
    ) -> dict[bytes, int]:
        """Names that are no longer listed: gone, unless they are pinned files, which are served all the same.

        Returns the positions of names that are or were `bare` and whose dentries do not know them.
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
            if dentry is None or dentry.position != position:  # the row is left over
                update.delete(Table.LISTING, pair_key(directory, position))
            inode = self._metadata.inode(update, dentry.inode) if dentry is not None else None
            if (
                dentry is not None
                and inode is not None
                and self._metadata.is_pinned(inode)
                and self._metadata.remaining_ns(inode)
            ):
                update.delete(Table.LISTING, pair_key(directory, position))
                update.put(Table.DENTRIES, inode_key(directory) + name, dentry._replace(position=0).pack())
            else:
                self._metadata.remove_name(update, directory, name)
        return placed
