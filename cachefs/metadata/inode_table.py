"""The tables of inodes and names: single records, and the links between them.

Each name (dentry) that leads to an inode has a link back, from the inode to the name. The links are deleted with the
inode's record, so that the next object with its number does not inherit them (hazard 23). An inode without a name, such
as a deleted file that is open, is kept until the kernel forgets it. inode_cache.py decides what is recorded.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from cachefs.contract.index import ROOT_INODE, Table
from cachefs.contract.shared import Words
from cachefs.errors import IndexUnavailable
from cachefs.metadata import written_files
from cachefs.metadata.inode_paths import (
    Paths,
    directory_of,
    has_name,
    is_same_place,
    link_key,
    link_value,
    links_of,
    name_expires_ns,
)
from cachefs.metadata.last_changes import ForgottenInodes, LastChanges
from cachefs.metadata.limit import InodeLimit
from cachefs.metadata.mutable_names import MutableNames
from cachefs.metadata.notifier import Notifier
from cachefs.metadata.validity import ANSWERED_NS, Run, Validity
from cachefs.options import Options
from cachefs.store.index.environment import Update, View
from cachefs.store.index.index import Index
from cachefs.store.index.records import (
    FLAGS_PINNED,
    LISTED,
    PINNED,
    STALE,
    UNLINKED,
    UNSETTLED,
    WRITTEN,
    Dentry,
    Inode,
    inode_key,
    inode_of_key,
    pair_key,
)
from cachefs.store.runs import Numbers
from cachefs.system.clock import NANOSECONDS, SYSTEM, Clock
from cachefs.system.stat import NO_NUMBER, Stat, may_admit_others

MOST_ABSENCES = 1 << 16
ABSENCES_PER_NAME = 4
"""Four absences take less room in the index than one file."""
UNLINKED_MARK = b"unlinked:"
_UNCOUNTED = 1 << 62
"""Stands for the look-ups of an inode while it was pinned, which are not counted. Later look-ups are added."""


class InodeTable(Validity):
    def __init__(
        self,
        index: Index,
        options: Options,
        run: Run,
        numbers: Numbers,
        notifier: Notifier,
        is_immutable_on_open: Callable[[Inode], bool],
        *,
        retention: InodeLimit | None = None,
        clock: Clock = SYSTEM,
        words: Words | None = None,
    ) -> None:
        """`is_immutable_on_open`: may an inode without a mutable name become immutable by an OPEN that the fast path
        answers? (fs/immutability.py) `retention`: None where the number of pinned inodes is not limited."""
        super().__init__(options, run, clock, words)
        # dependencies
        self.index = index
        self.numbers = numbers
        self._notifier = notifier
        self._is_immutable_on_open = is_immutable_on_open
        self._retention = retention
        # constants
        self._read_only = options.read_only
        # state
        self.paths = Paths(run.number, clock.monotonic_ns)
        self.mutable_names = MutableNames(options.mutable_paths, options.mutable_names, self.paths)
        self.changes = LastChanges(clock.monotonic_ns)
        self._may_hold_results = options.pins_files and not options.read_only and not options.immutable
        self._are_results: bool | None = None
        """Is there a directory that holds results? None: not known."""
        self.writers: Counter[int] = Counter()
        """Inode → how many handles write to it (fs/immutability.py)."""
        self.other_permissions: set[int] = set()
        """Directories of which a comparison has just recorded other permissions than before."""
        self.admitting: set[int] = set()
        """Directories that may admit users whom they did not admit, by other permissions or from another place."""
        self.forgotten = ForgottenInodes(clock.monotonic_ns, ANSWERED_NS)
        self._kept: Counter[int] = Counter()
        """Directories whose records stay even if the kernel forgets them: number → how many callers of `keep`."""

    def doubt_everything(self) -> None:
        super().doubt_everything()
        self.paths.begin_run(self.run)

    # --- records -----------------------------------------------------------------------------------------------------

    def inode(self, view: View, number: int) -> Inode | None:
        value = view.get(Table.INODES, inode_key(number))
        return Inode.unpack(number, value) if value else None

    def current(self, number: int) -> Inode | None:
        """The inode as the index has it now, in a view of its own."""
        with self.index.view() as view:
            inode = self.inode(view, number)
            if inode is None and number == ROOT_INODE:
                self.index.durable.check_is_whole("there is no record of the root")
            return inode

    def dentry(self, view: View, parent: int, name: bytes) -> Dentry | None:
        value = view.get(Table.DENTRIES, inode_key(parent) + name)
        return Dentry.unpack(value) if value else None

    def put_dentry(self, update: Update, parent: int, name: bytes, dentry: Dentry) -> None:
        update.put(Table.DENTRIES, inode_key(parent) + name, dentry.pack())

    def valid_entry(self, view: View, directory: Inode, dentry: Dentry | None) -> Inode | None:
        """The pinned inode that a name leads to, if neither the name nor the inode needs a comparison."""
        if dentry is None or not dentry.inode or not self.entry_holds(directory, dentry):
            return None
        inode = self.inode(view, dentry.inode)
        return inode if inode is not None and self.is_pinned(inode) and self.remaining_ns(inode) else None

    def directory_of(self, number: int) -> int | None:
        with self.index.view() as view:
            return directory_of(view, number)

    def note_other_permissions(self, before: Inode, now: Stat) -> None:
        """A comparison of a directory has shown them."""
        if self.kernel_may_know(before):
            self.other_permissions.add(before.number)
        if may_admit_others(before.permissions, now.permissions):
            self.admitting.add(before.number)

    def note_place(self, view: View, directory: int, parent: int) -> None:
        """A comparison has found a directory in `parent`, before that is recorded."""
        if all(above != parent for above, _ in links_of(view, directory)):
            self.admitting.add(directory)

    def doubt(self, update: Update, number: int) -> bool:
        """Have an inode compared at its next use. What is cached of it stays if it is the same. False: not known."""
        inode = self.inode(update, number)
        if inode is None:
            return False
        flags = inode.flags | (UNSETTLED if inode.flags & PINNED else 0)
        self.put_inode(update, inode._replace(flags=flags, expires_ns=0))
        return True

    def children(self, view: View, directory: int) -> list[int]:
        """The inodes that the names of a directory are known to lead to."""
        dentries = (Dentry.unpack(value) for _, value in view.scan(Table.DENTRIES, inode_key(directory)))
        return [dentry.inode for dentry in dentries if dentry.inode]

    @property
    def is_beyond_limit(self) -> bool:
        """Is more pinned than may be? Then something is about to be dropped."""
        return self._retention is not None and self._retention.has_to_go

    def may_pin(self, number: int) -> bool:
        """May another inode be pinned: is the index available, and the limit not reached?"""
        return self.index.available and (self._retention is None or self._retention.admits(number))

    def may_pin_absence(self) -> bool:
        """May another absence be pinned? The limit is for programs that look up a new temporary name each time."""
        if not self.index.available:
            return False
        try:
            dentries, names = (self.index.durable.entries(table) for table in (Table.DENTRIES, Table.LINKS))
        except IndexUnavailable:
            return False
        return dentries - names < MOST_ABSENCES + ABSENCES_PER_NAME * names  # each name of an inode has a link

    def put_inode(self, update: Update, inode: Inode) -> None:
        update.put(Table.INODES, inode_key(inode.number), inode.pack())
        if inode.flags & (WRITTEN | UNLINKED) == WRITTEN:
            written_files.mark(update, inode)
        if inode.is_directory:
            self.paths.note(inode)
        if self._retention is not None:
            self._retention.changed(inode)

    def _delete_inode(self, update: Update, number: int) -> None:
        """Delete a record and its links: another object may get the number (hazard 23)."""
        for link in links_of(update, number):
            self._cut_link(update, number, link)
        update.delete(Table.INODES, inode_key(number))
        if self._retention is not None:
            self._retention.removed(number)

    # --- names -------------------------------------------------------------------------------------------------------

    def _put_name(self, update: Update, parent: int, name: bytes, number: int, *, pinned: bool) -> bool:
        """Let a name lead to an inode. Returns whether it did not before. A mutable name is not pinned."""
        pinned = pinned and not self.mutable_names.matches(update, parent, name, number)
        old = self.dentry(update, parent, name)
        if old is not None and old.inode not in (0, number):
            self.cut_name(update, parent, name)
        new = Dentry(PINNED if pinned else 0, number, self.run, old.position if old is not None else 0)
        link = link_key(number, (parent, name))
        if new != old:
            self.put_dentry(update, parent, name, new)
        if not pinned:
            update.put(Table.LINKS, link, link_value(self._monotonic_ns() + self._unpinned_timeout_ns))
        elif new != old or update.get(Table.LINKS, link) is None:
            update.put(Table.LINKS, link, FLAGS_PINNED)
        self.paths.named(number, parent, name)
        return old is None or old.inode != number

    def name_remaining_s(self, view: View, number: int, link: tuple[int, bytes]) -> float:
        """How long a name is valid for an inode: its record may have been compared by another one since."""
        return max(0.0, (name_expires_ns(view, number, link) - self._monotonic_ns()) / NANOSECONDS)

    def remove_name(self, update: Update, parent: int, name: bytes) -> Inode | None:
        """Drop a dentry. An inode without a name is kept until the kernel forgets it. Returns the inode."""
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
        elif inode.flags & WRITTEN and inode.source_inode == NO_NUMBER:
            written_files.unmark(update, inode, (parent, name))
        if inode is not None and not has_name(update, dentry.inode):
            if not self.kernel_may_know(inode):
                self._delete_inode(update, inode.number)
                return inode
            inode = inode._replace(flags=inode.flags | UNLINKED)
            self.put_inode(update, inode)
            if inode.flags & WRITTEN:
                written_files.unmark(update, inode)
            if inode.flags & PINNED or (inode.is_directory and inode.flags & STALE):  # names in it may be pinned
                update.put(Table.META, UNLINKED_MARK + inode_key(inode.number), FLAGS_PINNED)
        return inode

    def cut_name(self, update: Update, parent: int, name: bytes) -> None:
        """A name leads elsewhere: what it led to loses it. It keeps its position, and the next listing compares it."""
        dentry = self.dentry(update, parent, name)
        if dentry is None:
            return
        row = update.get(Table.LISTING, pair_key(parent, dentry.position)) if dentry.position else None
        self.remove_name(update, parent, name)
        self.put_dentry(update, parent, name, Dentry(0, 0, 0, dentry.position))
        if row is not None:
            update.put(Table.LISTING, pair_key(parent, dentry.position), row)

    def move_name(self, update: Update, parent: int, name: bytes, new_parent: int, new_name: bytes) -> None:
        """Rename a dentry over whatever had the new name."""
        dentry = self.dentry(update, parent, name)
        if dentry is None or dentry.inode == 0:
            self.cut_name(update, new_parent, new_name)
            self.remove_name(update, parent, name)
            return
        self._put_name(update, new_parent, new_name, dentry.inode, pinned=bool(dentry.flags & PINNED))
        self.remove_name(update, parent, name)

    def swap_names(self, update: Update, parent: int, name: bytes, new_parent: int, new_name: bytes) -> None:
        """Two names exchange what they lead to."""
        places = ((parent, name), (new_parent, new_name))
        dentries = [self.dentry(update, *place) for place in places]
        for place in places:
            self.cut_name(update, *place)
        for place, dentry in zip(places, reversed(dentries), strict=True):
            inode = self.inode(update, dentry.inode) if dentry is not None and dentry.inode else None
            if dentry is not None and inode is not None:
                self._put_name(update, *place, dentry.inode, pinned=bool(dentry.flags & PINNED))
                self._linked(update, inode)

    def _cut_link(self, update: Update, number: int, link: tuple[int, bytes], *, is_known: bool = True) -> None:
        """Delete the link from an inode to a name. The dentry stays, doubtful: it has the position in the listing.

        `is_known`: the name may still lead to this inode. Otherwise it keeps only its position in the listing.
        """
        update.delete(Table.LINKS, link_key(number, link))
        dentry = self.dentry(update, *link)
        if dentry is not None and dentry.inode == number:
            doubtful = dentry._replace(validated_run=0) if is_known else Dentry(0, 0, 0, dentry.position)
            if doubtful != dentry:
                self.put_dentry(update, *link, doubtful)

    def _lost(self, dentry: Dentry | None, parent: int, name: bytes, *, unless: int | None = None) -> None:
        """A comparison has shown that a name no longer leads to its inode, `unless` that is this one. The kernel caches
        a pinned name for ever, and may not get an answer now. It was notified of names that were dropped before."""
        if dentry is not None and dentry.inode not in (0, unless):
            self.note_lost_name(dentry.inode, parent, name)
            if dentry.flags & PINNED and dentry.validated_run:
                self._notifier.drop_soon([(parent, name)])

    def _linked(self, update: Update, inode: Inode) -> Inode:
        """The inode has a name (again). Returns it."""
        if inode.flags & UNLINKED:
            inode = inode._replace(flags=inode.flags & ~UNLINKED)
            self.put_inode(update, inode)
            update.delete(Table.META, UNLINKED_MARK + inode_key(inode.number))
        return inode

    def lost_name(self, update: Update, number: int) -> None:
        """This mount has removed the last known name of an inode. A directory cannot have other names."""
        inode = self.inode(update, number)
        if inode is not None and inode.flags & UNLINKED:
            self.put_inode(update, inode._replace(nlink=0 if inode.is_directory else max(0, inode.nlink - 1)))

    def drop_children(self, update: Update, directory: int) -> tuple[list[int], list[bytes]]:
        """Forget the absences in a directory. Returns the inodes that its names lead to, and the absent names.

        A doubtful name that leads to no inode stays: a listing that is under way may not have shown it yet.
        """
        children, absent = [], []
        for key, value in list(update.scan(Table.DENTRIES, inode_key(directory))):
            dentry = Dentry.unpack(value)
            if dentry.inode:
                children.append(dentry.inode)
                continue
            if not dentry.position:
                self.remove_name(update, directory, key[8:])
            absent.append(key[8:])
        return children, absent

    def drop_absence(self, update: Update, directory: int, name: bytes) -> None:
        """Forget that a name does not exist: the next look-up and the next listing ask the source."""
        dentry = self.dentry(update, directory, name)
        if dentry is not None and dentry.inode == 0:
            update.delete(Table.DENTRIES, inode_key(directory) + name)
        inode = self.inode(update, directory)
        if inode is not None and inode.flags & LISTED:
            self.put_inode(update, inode._replace(flags=inode.flags & ~LISTED))

    def _purge_names(
        self, update: Update, number: int, now: Stat, *, keep: Collection[tuple[int, bytes]], gone: bool
    ) -> None:
        """An inode has one name at the source: drop its other names, by which a fetch would find another file.

        `gone`: the name to keep is new, so that the others do not exist any more. Otherwise they are doubtful.
        """
        for link in [each for each in links_of(update, number) if each not in keep]:
            is_kept = is_same_place(update, link, keep, now)
            self._lost(self.dentry(update, *link), *link, unless=number if is_kept else None)
            self._cut_link(update, number, link, is_known=not gone)
            self.paths.forget()

    # --- what the kernel knows ---------------------------------------------------------------------------------------

    def keep(self, view: View, directory: int) -> list[int]:
        """Keep the records of a directory, and of the directories above it, until `release` gets what this returns."""
        kept = [directory]
        while kept[-1] != ROOT_INODE and (parent := directory_of(view, kept[-1])) is not None:
            kept.append(parent)
        self._kept.update(kept)
        return kept

    def release(self, kept: Iterable[int]) -> None:
        self._kept.subtract(kept)
        self._kept = +self._kept

    def forget(self, update: Update, number: int, count: int) -> bool:
        """The kernel forgot `count` look-ups of an inode. Returns whether the record was deleted. It stays:

        - while the inode is pinned: its look-ups are not counted. A FORGET that arrives after the inode was unpinned
          may be for those look-ups only, and a later look-up may have overtaken it (`_UNCOUNTED`), or be answered at
          this moment: `forgotten` names the inode a little later, for a call with a count of 0.
        - while the kernel knows the inode: it is asked (hazard 60). It may have the inode again since the FORGET,
          or by another name: when a look-up answers with another inode than it expects under a name, it forgets that
          one look-up. If a later version got the number, a process that has the file open would read both.
        - of a dropped directory: requests through it would fail with EIO if an object of another type got the number.
        - of a directory that has pinned names: the next object with its number would inherit them.
        - of a file that was written: it stays mutable, even if the kernel does not remember it.
        """
        inode = self.inode(update, number)
        if inode is None or number == ROOT_INODE or inode.flags & (PINNED | STALE if inode.is_directory else PINNED):
            return False
        if count and inode.lookups == _UNCOUNTED:
            self.forgotten.note(number)
        elif count and inode.lookups > _UNCOUNTED:
            self.put_inode(update, inode._replace(lookups=inode.lookups - _UNCOUNTED))
        if inode.lookups > _UNCOUNTED or (inode.lookups == _UNCOUNTED) == (count > 0):
            return False
        inode = inode._replace(lookups=inode.lookups % _UNCOUNTED)
        is_kept = number in self._kept or inode.flags & WRITTEN
        if inode.lookups > count or (is_kept and not inode.flags & UNLINKED):
            self.put_inode(update, inode._replace(lookups=max(0, inode.lookups - count)))
            return False
        if self._notifier.attributes(number):
            self.put_inode(update, inode._replace(lookups=_UNCOUNTED))
            return False
        if inode.is_directory:
            self._forget_names(update, number)
            self.paths.forget()
            if update.first_key(Table.DENTRIES, inode_key(number)) is not None:
                # A new version: callers that know the old one as listed would list only what is left.
                version, flags = self.numbers.next(), inode.flags & ~LISTED
                self.put_inode(update, inode._replace(lookups=0, version=version, flags=flags))
                return False
        if inode.flags & UNLINKED:
            update.delete(Table.META, UNLINKED_MARK + inode_key(number))
        self._delete_inode(update, number)
        return True

    def _forget_names(self, update: Update, directory: int) -> None:
        """Delete the names of a directory that are not pinned. Until the kernel forgets it they make up its listing."""
        for key, value in list(update.scan(Table.DENTRIES, inode_key(directory))):
            dentry = Dentry.unpack(value)
            if dentry.flags & PINNED:
                continue
            child = self.inode(update, dentry.inode) if dentry.inode else None
            if child is not None and child.is_directory:  # it has pinned names, which `invalidate` must find
                self.remove_name(update, directory, key[8:])
                if not has_name(update, child.number):
                    update.put(Table.META, UNLINKED_MARK + inode_key(child.number), FLAGS_PINNED)
            else:
                update.delete(Table.DENTRIES, key)
                update.delete(Table.LINKS, inode_key(dentry.inode) + key)
                if dentry.position:
                    update.delete(Table.LISTING, pair_key(directory, dentry.position))
        for key in [key for key, value in update.scan(Table.LISTING, inode_key(directory)) if not value[0] & PINNED]:
            update.delete(Table.LISTING, key)

    def drop_unlinked(self, update: Update) -> None:
        """At the start of a run: inodes that had no name at the end of the last one cannot be reached any more."""
        for key, _ in list(update.scan(Table.META, UNLINKED_MARK)):
            self._delete_inode(update, inode_of_key(key[len(UNLINKED_MARK) :]))
            update.delete(Table.META, key)


def lookups_unpinned(inode: Inode) -> int:
    """The lookup count of an inode that is no longer pinned."""
    return _UNCOUNTED if inode.flags & PINNED else inode.lookups
