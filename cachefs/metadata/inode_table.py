"""The tables of inodes and names: single records and the links between them.

Every name (dentry) that leads to an inode has a link back from the inode to the name, and goes with its record: the
next object with that number must not inherit it (hazard 23). An inode without a name is kept until the kernel forgets
it, as a deleted file that is open. What is recorded of an inode is decided in inode_cache.py.

Numbers (hazard 10): an inode's number is the source's, as long as that number belongs to one identity. Others get an
alias above 2^62.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from cachefs.contract.index import ROOT_INODE, Table
from cachefs.metadata.inode_paths import Paths, directory_of, has_name, link_key, link_value, links_of
from cachefs.metadata.limit import InodeLimit
from cachefs.metadata.mutable_names import MutableNames
from cachefs.metadata.validity import Validity
from cachefs.options import Options
from cachefs.store.index.environment import Update, View
from cachefs.store.index.index import Index
from cachefs.store.index.records import (
    FLAGS_PINNED,
    LISTED,
    PINNED,
    STALE,
    UNLINKED,
    WRITTEN,
    Dentry,
    Inode,
    inode_key,
    inode_of_key,
    pair_key,
)
from cachefs.store.runs import Numbers
from cachefs.system.clock import NANOSECONDS

_UNLINKED_MARK = b"unlinked:"
_UNCOUNTED = 1 << 62
"""Look-ups of an inode that was pinned, and is not any more: nobody knows how many. Those since then are added."""
_BY_NUMBER = (Table.INODES, Table.LINKS, Table.DENTRIES, Table.LISTING)
"""What begins with the number of an inode."""


class InodeTable(Validity):
    def __init__(
        self,
        index: Index,
        options: Options,
        *,
        run: int,
        floor: int,
        takeovers: int = 0,
        strict_floor: int = 0,
        retention: InodeLimit | None = None,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`retention`: None where as much is pinned as there is."""
        super().__init__(options, run, floor, monotonic_ns, strict_floor=strict_floor)
        # dependencies
        self.index = index
        self._retention = retention
        # constants
        self._unpinned_timeout_ns = int(options.unpinned_timeout_s * NANOSECONDS)
        # state
        self.numbers = Numbers(run, takeovers)
        self.paths = Paths(run, monotonic_ns)
        self.mutable_names = MutableNames(options.mutable, self.paths)
        self.on_lost_name: Callable[[int, bytes], None] = lambda parent, name: None
        """Called with a pinned name that a comparison has taken from an inode: the kernel believes it for ever, and
        need not be who looked."""
        self._held: Counter[int] = Counter()
        """Directories whose records stay though the kernel forgets them: number → how many want that."""

    # --- numbers -----------------------------------------------------------------------------------------------------

    def next_sequence(self) -> int:
        """A number that was never given out before, in any run (runs.py)."""
        return self.numbers.next()

    @staticmethod
    def _is_free(update: Update, number: int) -> bool:
        """Nothing is left of an object that had this number: no record, names, children or data.

        Otherwise the next object with this number would inherit it: a directory would show another one's children.
        """
        key = inode_key(number)
        return all(update.first_key(table, key) is None for table in _BY_NUMBER) and not update.extents.has_any(number)

    def _next_alias(self, update: Update) -> int:
        return self.numbers.next_alias(partial(self._is_free, update))

    # --- records -----------------------------------------------------------------------------------------------------

    def inode(self, view: View, number: int) -> Inode | None:
        value = view.get(Table.INODES, inode_key(number))
        return Inode.unpack(number, value) if value else None

    def dentry(self, view: View, parent: int, name: bytes) -> Dentry | None:
        value = view.get(Table.DENTRIES, inode_key(parent) + name)
        return Dentry.unpack(value) if value else None

    def directory_of(self, number: int) -> int | None:
        with self.index.view() as view:
            return directory_of(view, number)

    def children(self, view: View, directory: int) -> list[int]:
        """The inodes that its names are known to lead to."""
        dentries = (Dentry.unpack(value) for _, value in view.scan(Table.DENTRIES, inode_key(directory)))
        return [dentry.inode for dentry in dentries if dentry.inode]

    @property
    def is_beyond_limit(self) -> bool:
        """More is pinned than may be: something is about to go."""
        return self._retention is not None and self._retention.has_to_go

    def may_pin(self, number: int) -> bool:
        """Is there room for another inode, and an index to take it?"""
        return self.index.available and (self._retention is None or self._retention.admits(number))

    def put_inode(self, update: Update, inode: Inode) -> None:
        update.put(Table.INODES, inode_key(inode.number), inode.pack())
        if inode.is_directory:
            self.paths.note(inode)
        if self._retention is not None:
            self._retention.changed(inode)

    def _delete_inode(self, update: Update, number: int) -> None:
        """With its links: the number may be another object's next time (hazard 23)."""
        for link in links_of(update, number):
            self._cut_link(update, number, link)
        update.delete(Table.INODES, inode_key(number))
        if self._retention is not None:
            self._retention.removed(number)

    # --- names -------------------------------------------------------------------------------------------------------

    def _put_name(self, update: Update, parent: int, name: bytes, number: int, *, pinned: bool) -> bool:
        """Let a name lead to an inode. True if it did not before. A mutable name is not pinned (mutable_names.py)."""
        pinned = pinned and not self.mutable_names.matches(update, parent, name)
        old = self.dentry(update, parent, name)
        known = old is not None and old.inode == number
        if old is not None and old.inode not in (0, number):
            row = update.get(Table.LISTING, pair_key(parent, old.position)) if old.position else None
            self.remove_name(update, parent, name)
            if row is not None:  # the name stays listed where it was, whatever it leads to
                update.put(Table.LISTING, pair_key(parent, old.position), row)
        new = Dentry(PINNED if pinned else 0, number, self.run, old.position if old is not None else 0)
        link = link_key(number, (parent, name))
        if new != old:
            update.put(Table.DENTRIES, inode_key(parent) + name, new.pack())
        if not pinned:
            update.put(Table.LINKS, link, link_value(self._monotonic_ns() + self._unpinned_timeout_ns))
        elif new != old or update.get(Table.LINKS, link) is None:
            update.put(Table.LINKS, link, FLAGS_PINNED)
        self.paths.named(number, parent, name)
        return not known

    def remove_name(self, update: Update, parent: int, name: bytes) -> Inode | None:
        """Drop a dentry. The inode without a name is kept until the kernel forgets it. Returns its record."""
        dentry = self.dentry(update, parent, name)
        if dentry is None:
            return None
        update.delete(Table.DENTRIES, inode_key(parent) + name)
        if dentry.position:
            update.delete(Table.LISTING, pair_key(parent, dentry.position))
        if dentry.inode == 0:
            return None
        update.delete(Table.LINKS, link_key(dentry.inode, (parent, name)))
        inode = self.inode(update, dentry.inode)
        if inode is None or inode.is_directory:
            self.paths.forget()
        if inode is not None and not has_name(update, dentry.inode):
            if inode.validated_run < self.floor:  # of an earlier run: this kernel never heard of it
                self._delete_inode(update, inode.number)
                return inode
            inode = inode._replace(flags=inode.flags | UNLINKED)
            self.put_inode(update, inode)
            if inode.flags & PINNED:
                update.put(Table.META, _UNLINKED_MARK + inode_key(inode.number), FLAGS_PINNED)
        return inode

    def move_name(self, update: Update, parent: int, name: bytes, new_parent: int, new_name: bytes) -> None:
        """Rename a dentry over whatever had the new name."""
        dentry = self.dentry(update, parent, name)
        if dentry is None or dentry.inode == 0:
            self.remove_name(update, new_parent, new_name)
            self.remove_name(update, parent, name)
            return
        self._put_name(update, new_parent, new_name, dentry.inode, pinned=bool(dentry.flags & PINNED))
        self.remove_name(update, parent, name)

    def swap_names(self, update: Update, parent: int, name: bytes, new_parent: int, new_name: bytes) -> None:
        """Two names exchange what they lead to."""
        places = ((parent, name), (new_parent, new_name))
        dentries = [self.dentry(update, *place) for place in places]
        for place in places:
            self.remove_name(update, *place)
        for place, dentry in zip(places, reversed(dentries), strict=True):
            inode = self.inode(update, dentry.inode) if dentry is not None and dentry.inode else None
            if dentry is not None and inode is not None:
                self._put_name(update, *place, dentry.inode, pinned=bool(dentry.flags & PINNED))
                self._linked(update, inode)

    def _cut_link(self, update: Update, number: int, link: tuple[int, bytes], *, is_known: bool = True) -> None:
        """The inode is not known by this name any more. A name that still leads to it is compared before it counts:
        in a complete listing a name without an entry would not exist.

        `is_known`: it may still lead to this inode. Else to another one, or to none: it keeps its place in the listing.
        """
        update.delete(Table.LINKS, link_key(number, link))
        dentry = self.dentry(update, *link)
        if dentry is not None and dentry.inode == number:
            doubtful = dentry._replace(validated_run=0) if is_known else Dentry(0, 0, 0, dentry.position)
            if doubtful != dentry:
                update.put(Table.DENTRIES, inode_key(link[0]) + link[1], doubtful.pack())

    def _lost(self, dentry: Dentry | None, parent: int, name: bytes, *, unless: int | None = None) -> None:
        """A name does not lead to what it led to, `unless` that is this inode. The kernel knows of what was dropped."""
        if dentry is not None and dentry.flags & PINNED and dentry.validated_run and dentry.inode not in (0, unless):
            self.on_lost_name(parent, name)

    def _linked(self, update: Update, inode: Inode) -> Inode:
        """The inode has a name (again)."""
        if inode.flags & UNLINKED:
            inode = inode._replace(flags=inode.flags & ~UNLINKED)
            self.put_inode(update, inode)
            update.delete(Table.META, _UNLINKED_MARK + inode_key(inode.number))
        return inode

    def lost_name(self, update: Update, number: int) -> None:
        """This mount removed the last name that it knew of an inode. A directory has no other."""
        inode = self.inode(update, number)
        if inode is not None and inode.flags & UNLINKED:
            nlink = 0 if inode.is_directory else max(0, inode.nlink - 1)
            self.put_inode(update, inode._replace(nlink=nlink))

    def drop_children(self, update: Update, directory: int) -> tuple[list[int], list[bytes]]:
        """Forget the absences of a directory. The inodes that its names lead to, and the names that were absent."""
        children, absent = [], []
        for key, value in list(update.scan(Table.DENTRIES, inode_key(directory))):
            dentry = Dentry.unpack(value)
            if dentry.inode:
                children.append(dentry.inode)
            else:
                self.remove_name(update, directory, key[8:])
                absent.append(key[8:])
        return children, absent

    def drop_absence(self, update: Update, directory: int, name: bytes) -> None:
        """Forget that a name does not exist: the next look-up asks the source, and so does the next listing."""
        dentry = self.dentry(update, directory, name)
        if dentry is not None and dentry.inode == 0:
            update.delete(Table.DENTRIES, inode_key(directory) + name)
        inode = self.inode(update, directory)
        if inode is not None and inode.flags & LISTED:
            self.put_inode(update, inode._replace(flags=inode.flags & ~LISTED))

    def _purge_names(self, update: Update, number: int, *, keep: tuple[int, bytes], gone: bool) -> None:
        """It can have one name only: others were renamed or removed at the source, and would lead fetches astray.

        `gone`: the name that is kept is new, so that the others are the old ones. Else they are doubtful.
        """
        for link in links_of(update, number):
            if link == keep:
                continue
            self._lost(self.dentry(update, *link), *link)
            self._cut_link(update, number, link, is_known=not gone)
            self.paths.forget()

    # --- what the kernel knows ---------------------------------------------------------------------------------------

    def hold(self, view: View, directory: int) -> list[int]:
        """Keep a directory's record, and those of the directories above it, until `release` gets them back."""
        held = [directory]
        while held[-1] != ROOT_INODE and (links := links_of(view, held[-1])):
            held.append(links[0][0])
        self._held.update(held)
        return held

    def release(self, held: Iterable[int]) -> None:
        self._held.subtract(held)
        self._held = +self._held

    def forget(self, update: Update, number: int, count: int) -> bool:
        """The kernel forgot an inode. True if its record is gone now.

        Look-ups of pinned inodes are not counted: their records stay in this run, with or without a name. A FORGET
        that comes when an inode is not pinned any more may be of those look-ups alone, and overtaken by one that was
        counted: then the record stays as well. The kernel also sends a FORGET where a look-up told it of an inode that
        it did not expect under that name, and may know the same inode by another one. So dropped directories stay,
        too: if an object of another type got the number, whoever still goes through the directory would get EIO. (A
        dropped file that gets another name is another version, and another inode.) A directory also stays while
        pinned names lead on from it: the next object with its number would get them.
        """
        inode = self.inode(update, number)
        if inode is None or number == ROOT_INODE or inode.flags & PINNED:
            return False
        if inode.is_directory and inode.flags & STALE:
            return False
        if inode.lookups > _UNCOUNTED:
            self.put_inode(update, inode._replace(lookups=inode.lookups - _UNCOUNTED))
            return False
        inode = inode._replace(lookups=inode.lookups % _UNCOUNTED)
        is_kept = number in self._held or inode.flags & WRITTEN
        if inode.lookups > count or (is_kept and not inode.flags & UNLINKED):
            # A file that was written stays mutable in this run, whether the kernel remembers it or not.
            self.put_inode(update, inode._replace(lookups=max(0, inode.lookups - count)))
            return False
        if inode.is_directory:
            self._forget_names(update, number)
            self.paths.forget()
            if update.first_key(Table.DENTRIES, inode_key(number)) is not None:
                # A new version: callers that noted the old one as listed would list only what is left.
                version, flags = self.next_sequence(), inode.flags & ~LISTED
                self.put_inode(update, inode._replace(lookups=0, version=version, flags=flags))
                return False
        if inode.flags & UNLINKED:
            update.delete(Table.META, _UNLINKED_MARK + inode_key(number))
        self._delete_inode(update, number)
        return True

    def _forget_names(self, update: Update, directory: int) -> None:
        """The names of a directory are kept as long as the kernel knows it: its listing is made of them."""
        for key, value in list(update.scan(Table.DENTRIES, inode_key(directory))):
            dentry = Dentry.unpack(value)
            if not dentry.flags & PINNED:
                update.delete(Table.DENTRIES, key)
                update.delete(Table.LINKS, inode_key(dentry.inode) + key)
                if dentry.position:
                    update.delete(Table.LISTING, pair_key(directory, dentry.position))
        for key, value in list(update.scan(Table.LISTING, inode_key(directory))):
            if not value[0] & PINNED:
                update.delete(Table.LISTING, key)

    def drop_unlinked(self, update: Update) -> None:
        """At the start of a run: what had no name when the last one ended will not be asked for again."""
        for key, _ in list(update.scan(Table.META, _UNLINKED_MARK)):
            self._delete_inode(update, inode_of_key(key[len(_UNLINKED_MARK) :]))
            update.delete(Table.META, key)


def lookups_unpinned(inode: Inode) -> int:
    """How often the kernel has looked up an inode that is not pinned from now on."""
    return _UNCOUNTED if inode.flags & PINNED else inode.lookups
