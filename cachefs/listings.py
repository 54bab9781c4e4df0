"""The listing of a directory in the index: (directory, position) → name.

Positions are what readdir resumes from (d_off): 64 bits, given out in order, never used twice within a directory, and
kept by a name for as long as it is listed. So a listing that is read while names come and go shows every name that
was there all along exactly once (hazard 8).
"""

from collections.abc import Iterable

from cachefs.attributes import Inode, inode_key, inode_of_key, pair_key
from cachefs.environment import Table, Update, View
from cachefs.metadata_cache import FLAGS_NONE, FLAGS_PINNED, MetadataCache


class Listings:
    def __init__(self, metadata: MetadataCache) -> None:
        self._metadata = metadata

    def rows(self, view: View, directory: int, after: int) -> Iterable[tuple[int, bytes]]:
        """(position, name) of a listing, in order, from behind position `after`."""
        for key, value in view.scan(Table.LISTING, inode_key(directory), pair_key(directory, after + 1)):
            yield inode_of_key(key[8:16]), value[4:]

    def add_rows(self, update: Update, directory: Inode, names: Iterable[bytes], *, pin: bool) -> Inode:
        """Give each name that has a dentry its place in the listing, if it has none. Returns the directory's record."""
        flags = FLAGS_PINNED if pin else FLAGS_NONE
        position = directory.next_position
        for name in names:
            dentry = self._metadata.dentry(update, directory.number, name)
            if dentry is None:
                continue
            if dentry.position:
                # The dentry may have outlived its row: a pinned file's is durable, a read-write mount's row is not.
                key = pair_key(directory.number, dentry.position)
                if update.get(Table.LISTING, key) is None:
                    update.put(Table.LISTING, key, flags + name)
                continue
            update.put(Table.LISTING, pair_key(directory.number, position), flags + name)
            update.put(Table.DENTRIES, inode_key(directory.number) + name, dentry._replace(position=position).pack())
            position += 1
        directory = directory._replace(next_position=position)
        self._metadata.put_inode(update, directory)
        return directory

    def remove_rows(self, update: Update, directory: int, keep: set[bytes]) -> None:
        """Names that are no longer listed: gone, unless they are pinned files, which are served all the same."""
        for position, name in list(self.rows(update, directory, 0)):
            if name in keep:
                continue
            dentry = self._metadata.dentry(update, directory, name)
            record = self._metadata.inode(update, dentry.inode) if dentry is not None else None
            if (
                dentry is not None
                and record is not None
                and self._metadata.is_pinned(record)
                and self._metadata.remaining_ns(record)
            ):
                update.delete(Table.LISTING, pair_key(directory, position))
                update.put(Table.DENTRIES, inode_key(directory) + name, dentry._replace(position=0).pack())
            else:
                self._metadata.remove_name(update, directory, name)
