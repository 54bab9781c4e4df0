"""Metadata: which names lead to which inodes, what is known of them, and for how long it is believed.

Decisions about single records, on top of `Index`; no I/O but the index, nothing is awaited. validity.py says what is
believed of them, and for how long.

Numbers (hazard 10): an inode's number is the source's, as long as that number belongs to one identity. A known number
with another identity, an object of another device, and a file that changed after it had been pinned get a number
above 2^62, kept in the `aliases` table. A file that changes behind our back is therefore another inode to the
kernel: nobody ever sees pages of two versions under one number.
"""

import stat
import time
from collections.abc import Callable
from functools import partial

from cachefs.contract.index import FIRST_POSITION, ROOT_INODE, Table
from cachefs.metadata.inode_paths import link_key, link_value, links_of, name_expires_ns
from cachefs.metadata.inode_table import InodeTable, lookups_unpinned
from cachefs.metadata.last_changes import LastChanges
from cachefs.metadata.limit import InodeLimit
from cachefs.options import Options
from cachefs.source.age import is_young
from cachefs.source.identity import identity_of, is_same
from cachefs.store.index.environment import Update, View
from cachefs.store.index.index import Index
from cachefs.store.index.records import (
    FLAGS_PINNED,
    IMMUTABLE,
    IMMUTABLE_ON_OPEN,
    LISTED,
    PINNED,
    STALE,
    UNSETTLED,
    WRITTEN,
    Dentry,
    Inode,
    inode_key,
    inode_of_key,
    pair_key,
)
from cachefs.store.runs import FIRST_ALIAS
from cachefs.system.stat import Stat

FORGOTTEN_POSITIONS = 1 << 32
"""More than a daemon can have given out in one directory after what is known of it was written."""


class InodeCache(InodeTable):
    def __init__(
        self,
        index: Index,
        options: Options,
        *,
        run: int,
        floor: int,
        takeovers: int = 0,
        forgot: bool = False,
        names_floor: int = 0,
        strict_floor: int = 0,
        retention: InodeLimit | None = None,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        realtime_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`names_floor`: the run since which `--mutable` is what it is: names that were pinned before are doubtful.

        `forgot`: the kernel may know inodes and versions of which no record is left.
        """
        super().__init__(
            index,
            options,
            run=run,
            floor=floor,
            takeovers=takeovers,
            strict_floor=strict_floor,
            retention=retention,
            monotonic_ns=monotonic_ns,
        )
        # dependencies
        self._realtime_ns = realtime_ns
        # constants
        self._names_floor = names_floor
        self._forgot = forgot
        self._settle_ns = options.settle_ns
        # state
        self.changes = LastChanges(monotonic_ns)
        self.on_changed: Callable[[int], object] = lambda number: None
        """Called when it is recorded that a file has other attributes than before, and no answer says so yet. Of
        directories permissions.py tells the kernel."""
        self._restless: set[int] = set()
        """Directories whose permissions have changed in this run: never believed for long (permissions.py)."""

    # --- reading ---------------------------------------------------------------------------------------------------

    # --- what an lstat said ----------------------------------------------------------------------------------------

    def _number(self, update: Update, now: Stat) -> tuple[int, Inode | None]:
        """The inode number of an object and the record it continues; a new number where hazard 10 or 11 want one."""
        key = pair_key(now.device, now.inode)
        alias = update.get(Table.ALIASES, key)
        if alias:
            number = inode_of_key(alias[8:16])
        elif now.device == 0 and ROOT_INODE < now.inode < FIRST_ALIAS:
            number = now.inode
        else:
            number = 0
        if number:
            inode = self.inode(update, number)
            if inode is None and not self._forgot and self._is_free(update, number):
                return number, None
            if (
                inode is not None
                and inode.same_identity(now)
                and (inode.same_version(now) or not self._kernel_has_data(inode) or self._is_overtaken(inode, now))
            ):
                return number, inode
        number = self._next_alias(update)
        update.put(Table.ALIASES, key, FLAGS_PINNED + bytes(4) + inode_key(number))
        return number, None

    def _kernel_has_data(self, inode: Inode) -> bool:
        """The kernel may hold pages of this version, which nothing would ever drop."""
        fixed = inode.flags & IMMUTABLE or (self._options.pins_everything and inode.flags & PINNED)
        is_told = inode.validated_run == self.run or self._forgot
        return bool(inode.is_regular and is_told and (fixed or inode.flags & STALE))

    def _is_overtaken(self, inode: Inode, now: Stat) -> bool:
        """A later call was faster: the record was compared with the source after this call had begun.

        Its answer may be of an older version: it would cut a file off at the size that it had then.
        """
        if inode.validated_run != self.run or not now.began_ns:
            return False
        valid_for_ns = self._settle_ns if self.is_pinned(inode) else self._unpinned_timeout_ns
        return inode.expires_ns - valid_for_ns > now.began_ns

    def apply_stat(
        self, update: Update, parent: int, name: bytes, now: Stat, *, pin: bool, counted: bool = True
    ) -> Inode:
        """Record what an lstat of `name` in `parent` said. What is pinned and believed is never replaced.

        Nor is what was seen later: of an answer that was overtaken only the name counts.

        `pin`: this mount pins whatever it sees. `counted`: the kernel will be told, so it will send a FORGET.
        """
        number, old = self._number(update, now)
        if old is not None:
            old = self._linked(update, old)
        overtaken = old is not None and self._is_overtaken(old, now)
        if old is not None and self.is_pinned(old) and self.remaining_ns(old) > 0:
            inode = old
        elif old is not None and overtaken:
            inode = old
            self.put_inode(update, inode._replace(lookups=inode.lookups + counted))
        else:
            mutable = self._are_mutable(update, number, parent, name, now)
            if old is not None and all(mutable):
                old = old._replace(flags=old.flags & ~(PINNED | IMMUTABLE), lookups=lookups_unpinned(old))
            inode = self._compared(number, old, now, pin and not any(mutable))
            if inode.flags & LISTED and self.mutable_names.may_come(self.paths.beneath(update, parent, name)):
                inode = inode._replace(flags=inode.flags & ~LISTED)
            if self._is_immutable_on_open(inode) and not any(mutable):
                inode = inode._replace(flags=inode.flags | IMMUTABLE_ON_OPEN)
            if old is not None and inode.is_regular and not old.same_version(now):
                update.afterwards(partial(self.on_changed, number))
            self.put_inode(update, inode._replace(lookups=inode.lookups + counted))
        self._lost(self.dentry(update, parent, name), parent, name, unless=number)
        added = self._put_name(update, parent, name, number, pinned=bool(inode.flags & PINNED))
        if (now.nlink == 1 or inode.is_directory) and not overtaken:
            self._purge_names(update, number, keep=(parent, name), gone=added)
        return inode

    def _are_mutable(self, view: View, number: int, parent: int, name: bytes, now: Stat) -> list[bool]:
        """Of each name of an object that was just looked at by one of them: does `--mutable` match it?"""
        if not self.mutable_names:
            return [False]
        names = {(parent, name)}
        if now.nlink > 1 and not stat.S_ISDIR(now.mode):
            names.update(self.paths.names(view, number))
        return [self.mutable_names.matches(view, *each) for each in names]

    def _is_immutable_on_open(self, inode: Inode) -> bool:
        """For the fast path, which does not know who writes. The caller checks the mutable names."""
        options = self._options
        return bool(
            inode.is_regular
            and not inode.flags & (IMMUTABLE | WRITTEN)
            and options.pins_files
            and not options.read_only
        )

    def withdraw_immutable_on_open(self, number: int) -> None:
        """A file is about to be opened for writing."""
        with self.index.update() as update:
            inode = self.inode(update, number)
            if inode is not None and inode.flags & IMMUTABLE_ON_OPEN:
                self.put_inode(update, inode._replace(flags=inode.flags & ~IMMUTABLE_ON_OPEN))

    def _compared(self, number: int, old: Inode | None, now: Stat, pin: bool) -> Inode:
        flags = old.flags & (PINNED | IMMUTABLE | WRITTEN | LISTED) if old is not None else 0
        version = old.version if old is not None else self.next_sequence()
        entries_valid_from = max(old.entries_valid_from, self._names_floor) if old is not None else self.run
        unchanged = old is not None and old.same_version(now)
        if not unchanged:
            # What was cached of an older version no longer counts.
            version = self.next_sequence()
            entries_valid_from = self.run
            flags &= ~(LISTED | IMMUTABLE)
            if not stat.S_ISDIR(now.mode):
                flags &= ~PINNED
        if pin and self.may_pin(number):
            flags |= PINNED
        next_position = (old.next_position if old is not None else 0) or FIRST_POSITION
        if self._forgot and old is not None and old.validated_run != self.run:
            flags &= ~LISTED  # names may be missing
            next_position += FORGOTTEN_POSITIONS
        checked_again = unchanged and old is not None and old.flags & UNSETTLED
        if number in self._restless or (is_young(now, self._realtime_ns(), self._settle_ns) and not checked_again):
            flags |= UNSETTLED
        blank = Inode(number, *(0,) * 6, 4096, *(0,) * 14)
        inode = (
            (old or blank)
            .with_stat(now)
            ._replace(
                flags=flags,
                version=version,
                validated_run=self.run,
                entries_valid_from=entries_valid_from,
                next_position=next_position,
                lookups=0 if old is None else old.lookups if flags & PINNED else lookups_unpinned(old),
            )
        )
        if self.is_pinned(inode):
            expires_ns = self._monotonic_ns() + self._settle_ns if flags & UNSETTLED else 0
        elif self.changes.happened_since(number, now.began_ns):
            expires_ns = 0
        else:
            expires_ns = self._monotonic_ns() + self._unpinned_timeout_ns
        return inode._replace(expires_ns=expires_ns)

    def apply_root(self, update: Update, now: Stat, *, pin: bool) -> Inode:
        """The root is number 1 whatever it is underneath; it is a directory on the path to every file."""
        inode = self._compared(ROOT_INODE, self.inode(update, ROOT_INODE), now, pin)
        if self.mutable_names.may_come(b""):
            inode = inode._replace(flags=inode.flags & ~LISTED)
        self.put_inode(update, inode)
        return inode

    def apply_absence(self, update: Update, parent: int, name: bytes, *, pin: bool) -> None:
        """Record that `name` does not exist."""
        self._lost(self.dentry(update, parent, name), parent, name)
        self.remove_name(update, parent, name)
        if pin and self.index.available:
            update.put(Table.DENTRIES, inode_key(parent) + name, Dentry(PINNED, 0, self.run, 0).pack())

    # --- writing single records ------------------------------------------------------------------------------------

    def apply_own_change(self, update: Update, number: int, now: Stat) -> tuple[Inode | None, list[tuple[int, bytes]]]:
        """This mount itself changed an inode: store what it looks like now.

        Our change moves the change time, and so may a rewrite by another node at the same time (hazard 24). What is
        pinned or cached of the inode stays only if size and mtime are still the recorded ones. Else it is dropped,
        with the attributes that it had: the next look-up finds another version, and makes another inode of it.
        Another object in its place (another node was faster) takes its names, so that the record is dropped, too.
        Returns the record, None if it was dropped, and the names that the kernel must drop.
        A directory keeps its version: its mtime is what our change moves.
        """
        self.changes.note(number)
        inode = self.inode(update, number)
        if inode is None:
            return None, []
        if not is_same(identity_of(inode), now) or inode.device != now.device:
            return None, self.drop(update, number)
        unchanged = inode.size == now.size and inode.mtime_ns == now.mtime_ns
        if not unchanged and not inode.is_directory:
            if inode.flags & IMMUTABLE or self.is_pinned(inode):
                return None, self.drop(update, number)
            inode = inode._replace(version=self.next_sequence())
        inode = inode.with_stat(now)
        self.put_inode(update, inode)
        return inode, []

    def saw(self, number: int, now: Stat) -> bool:
        """An open of a file that is neither pinned nor immutable said this. True if it has changed."""
        with self.index.update() as update:
            inode = self.inode(update, number)
            if inode is None or inode.same_version(now) or self.is_pinned(inode) or self._is_overtaken(inode, now):
                return False
            self.put_inode(update, inode.with_stat(now)._replace(version=self.next_sequence()))
        return True

    def permissions_changed(self, update: Update, inode: Inode, now: Stat) -> None:
        """A directory's permissions are not the recorded ones: it is compared before it is used, and every two seconds.

        Its times stay what they were, because nothing is said of its names yet.
        """
        self._restless.add(inode.number)
        inode = inode._replace(mode=now.mode, uid=now.uid, gid=now.gid)
        self.put_inode(update, inode._replace(flags=inode.flags | UNSETTLED, expires_ns=0))

    def pin_file(self, update: Update, inode: Inode, *, seen_by: tuple[int, bytes] | None = None) -> Inode:
        """A regular file was opened read-only: it is immutable from now on, and pinned with all that leads to it.

        But only with what is believed now. A name that has expired, or was invalidated, may lead elsewhere by now: it
        is pinned when it is looked up again. A directory that has expired is pinned and compared once more at its next
        use. `seen_by`: a name by which the source has just been asked for the file.
        """
        unsettled = inode.flags & UNSETTLED
        expires_ns = self._monotonic_ns() + self._settle_ns if unsettled else 0
        flags = inode.flags & ~IMMUTABLE_ON_OPEN | PINNED | IMMUTABLE
        inode = inode._replace(flags=flags, expires_ns=expires_ns, validated_run=self.run)
        self.put_inode(update, inode)
        number = inode.number
        while number != ROOT_INODE:
            links = self._valid_names(update, number, seen_by)
            for parent, name in links:
                self._put_name(update, parent, name, number, pinned=True)
            best = self.paths.name(update, number)
            if best is None:
                break
            if self.mutable_names.matches(update, *best):
                best = next((link for link in links if not self.mutable_names.matches(update, *link)), best)
            number = best[0]
            directory = self.inode(update, number)
            if directory is None or directory.flags & PINNED:
                break
            flags = directory.flags | (PINNED if self.remaining_ns(directory) else PINNED | STALE)
            self.put_inode(update, directory._replace(flags=flags, validated_run=self.run, expires_ns=0))
        return inode

    def _valid_names(self, update: Update, number: int, seen_by: tuple[int, bytes] | None) -> list[tuple[int, bytes]]:
        """The names that an inode is valid to have. Where there are some, it is not known by expired ones any more:
        a fetch by one of these would find another file."""
        now_ns = self._monotonic_ns()
        valid, expired = [], []
        for link in self.paths.links(update, number):
            dentry = self.dentry(update, *link)
            compared = dentry is not None and dentry.inode == number and dentry.validated_run == self.run
            expires_ns = name_expires_ns(update, number, link)
            if compared and (expires_ns > now_ns or link == seen_by):
                valid.append(link)
            elif expires_ns <= now_ns:
                expired.append(link)
        for link in expired if valid else ():
            self._cut_link(update, number, link)
        return valid

    def drop(self, update: Update, number: int) -> list[tuple[int, bytes]]:
        """Forget what is known and cached of an inode; the next look-up compares it with the source.

        Its names stay, pinned and doubtful: in a complete listing a name without an entry does not exist. That they
        lead to this number is kept for this run only: later it may be another file's. Returns them, for whoever tells
        the kernel.
        """
        inode = self.inode(update, number)
        if inode is None:
            return []
        self.put_inode(
            update,
            inode._replace(
                flags=(inode.flags & ~(PINNED | LISTED)) | STALE,
                version=self.next_sequence(),
                validated_run=self.run,
                expires_ns=0,
                lookups=lookups_unpinned(inode),
            ),
        )
        links = links_of(update, number)
        for parent, name in links:
            dentry = self.dentry(update, parent, name)
            if dentry is not None:
                update.put(Table.DENTRIES, inode_key(parent) + name, dentry._replace(validated_run=0).pack())
            update.put(Table.LINKS, link_key(number, (parent, name)), link_value(0))
        return links

    def follow_names(self, update: Update, number: int) -> tuple[list[tuple[int, bytes]], bool]:
        """Some of an inode's names are other ones now: what mutable names say of it counts (mutable_names.py).

        Returns names that the kernel must drop, and whether the inode was pinned and is not any more.
        """
        inode = self.inode(update, number)
        if inode is None or not inode.flags & (PINNED | IMMUTABLE | IMMUTABLE_ON_OPEN):
            return [], False
        mutable, others = self.mutable_names.names(update, number)
        if not mutable:
            return [], False
        ends = not others
        flags = inode.flags & ~IMMUTABLE_ON_OPEN
        for parent, name in mutable:  # beneath a directory that was renamed they are what they were
            self._put_name(update, parent, name, number, pinned=False)
        if ends:
            flags &= ~(PINNED | IMMUTABLE | LISTED)
            lookups = lookups_unpinned(inode)
            inode = inode._replace(version=self.next_sequence(), expires_ns=0, lookups=lookups)
        self.put_inode(update, inode._replace(flags=flags))
        return mutable, ends
