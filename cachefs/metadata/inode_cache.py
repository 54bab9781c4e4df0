"""The inode cache: what is recorded of inodes and names after a comparison, a change by this mount, or a drop.

Decides about single records of the index, and awaits nothing. validity.py says how long a record is valid.

Numbers (hazard 10): an inode has the number of the source, as long as that number belongs to one identity. Others get
an alias (aliases.py), which is kept in the `aliases` table: an object whose number is known with another identity, an
object of another device, and a file that has changed after it was pinned. So a file with an external modification is
another inode for the kernel, which never has pages of two versions under one number. Where numbers of the source do not
stay (hazard 56), each inode has an alias, and its name leads to it.
"""

import stat
from functools import partial

from cachefs.contract.index import FIRST_POSITION, ROOT_INODE, Table
from cachefs.metadata import inode_values, written_files
from cachefs.metadata.inode_paths import is_name_of, link_key, link_value, links_of, name_expires_ns, number_of
from cachefs.metadata.inode_table import UNLINKED_MARK, InodeTable, lookups_unpinned
from cachefs.store import aliases
from cachefs.store.index.environment import Update, View
from cachefs.store.index.records import (
    IMMUTABLE,
    IMMUTABLE_ON_OPEN,
    LISTED,
    PINNED,
    READ_MUTABLE,
    RESTLESS,
    STALE,
    UNSETTLED,
    WRITTEN,
    YOUNG,
    Dentry,
    Inode,
    inode_of_key,
)
from cachefs.system.stat import NO_CONNECTION, Stat

FORGOTTEN_POSITIONS = 1 << 32
"""More positions than a daemon can give out in one directory between two commits."""
_BLANK = Inode(0, *(0,) * 7, 4096, *(0,) * 14)


class InodeCache(InodeTable):
    """The decisions. Dependencies and state are in `InodeTable`: it is one class in two modules."""

    # --- what an lstat said ----------------------------------------------------------------------------------------

    def _number(self, update: Update, parent: int, names: tuple[bytes, ...], now: Stat) -> tuple[int, Inode | None]:
        """The number of an object, and the inode that it continues; a new number where hazard 10 or 11 needs one."""
        number = number_of(update, now, (parent, names[0]))
        is_known = any(is_name_of(update, number, (parent, name), now) for name in names)
        if number:
            inode = self.inode(update, number)
            if inode is None and not self._run.forgot and aliases.is_free(update, number):
                return number, None
            if (
                inode is not None
                and inode.same_identity(now, by_name=is_known)
                and (is_known or inode.may_have_moved(now))
                and (inode.same_version(now) or not self._kernel_has_data(inode, now) or self._is_overtaken(inode, now))
            ):
                return number, inode
        return aliases.give(update, now), None

    def _kernel_has_data(self, inode: Inode, now: Stat) -> bool:
        """May the kernel cache pages of this version that nothing would ever drop? Not of a file that has writers."""
        if inode.is_symlink:
            return not inode.same_data(now)
        may = inode.is_regular and inode.number not in self.writers  # by another number writers would have another size
        was_fixed = inode.flags & (STALE | WRITTEN) == STALE  # readers of a file written here see its changes
        fixed = inode.flags & IMMUTABLE or was_fixed or (self._pins_everything and inode.flags & PINNED)
        return bool(may and fixed and (inode.validated_run == self.run or self._run.forgot))

    def _is_overtaken(self, inode: Inode, now: Stat) -> bool:
        """Has a later call been faster, so that the record was compared with the source after this call began?

        Then this answer may be of an older version. It would cut off a file at its former size.
        """
        if inode.validated_run != self.run or not now.began_ns:
            return False
        valid_for_ns = self._settle_ns if self.is_pinned(inode) else self._unpinned_timeout_ns
        return inode.expires_ns - valid_for_ns > now.began_ns

    def apply_stat(
        self,
        update: Update,
        parent: int,
        name: bytes,
        now: Stat,
        *,
        pin: bool,
        counted: bool = True,
        also: bytes = b"",
        is_getattr: bool = False,
    ) -> Inode:
        """Record what an lstat of `name` in `parent` said.

        A pinned and valid record is not replaced. If a later call was faster, only the name is recorded.

        `pin`: this mount pins whatever it sees. `counted`: the kernel will send a FORGET. `also`: another spelling.
        `is_getattr`: for a GETATTR. The kernel drops the ACL for it, and ignores the answer after a notification.
        """
        number, found = self._number(update, parent, (name, also) if also else (name,), now)
        old = self._linked(update, found) if found is not None else None
        overtaken = old is not None and self._is_overtaken(old, now)
        if old is not None and self.is_pinned(old) and self.remaining_ns(old) > 0:
            inode = self.recognized(update, old, now)
        elif old is not None and overtaken:
            inode = old
            self.put_inode(update, inode._replace(lookups=inode.lookups + counted))
        else:
            mutable = self._are_mutable(update, number, parent, name, now)
            if old is not None and all(mutable):
                old = old._replace(flags=mutable_flags(old), lookups=lookups_unpinned(old))
            result = stat.S_ISREG(now.mode) and self.holds_results(update, parent)
            inode = self._compared(number, old, now, pin and not any(mutable), result=result)
            inode_values.settle(update, old, inode)
            if pin and old is not None and inode.is_regular and inode.flags & ~old.flags & PINNED:
                inode = self._without_mutable_pages(update, inode)
            if self._was_written(update, old, now, (parent, name)):
                inode = inode._replace(flags=inode.flags | WRITTEN)
            if inode.flags & LISTED and self.mutable_names.may_come(self.paths.beneath(update, parent, name)):
                inode = inode._replace(flags=inode.flags & ~LISTED)
            if self._is_immutable_on_open(inode) and not any(mutable):
                inode = inode._replace(flags=inode.flags | IMMUTABLE_ON_OPEN)
            self.put_inode(update, inode._replace(lookups=inode.lookups + counted))
        self._lost(self.dentry(update, parent, name), parent, name, unless=number)
        if old is not None and inode.is_directory:
            self.note_place(update, number, parent)
        added = self._put_name(update, parent, name, number, pinned=bool(inode.flags & PINNED))
        # For a name that is new to it the kernel would keep the former ACL (84).
        if old is not None and (added or not is_getattr) and not old.same_version(now):
            update.afterwards(partial(self._notifier.attributes, number))
        if (now.nlink == 1 or inode.is_directory) and not overtaken:
            self._purge_names(update, number, now, keep=((parent, name), (parent, also)), gone=added)
        return inode

    def _are_mutable(self, view: View, number: int, parent: int, name: bytes, now: Stat) -> list[bool]:
        """For each name of an object, the one that was just looked up included: does `--mutable` match it?"""
        if not self.mutable_names:
            return [False]
        names = {(parent, name)}
        if now.nlink > 1 and not stat.S_ISDIR(now.mode):
            names.update(self.paths.names(view, number))
        return [self.mutable_names.matches(view, *each, number) for each in names]

    def _was_written(self, view: View, old: Inode | None, now: Stat, link: tuple[int, bytes]) -> bool:
        """Was a file written in an earlier run, and not pinned since?"""
        is_known = old is not None and (old.validated_run == self.run or old.flags & IMMUTABLE)
        return (
            not is_known and not self._read_only and stat.S_ISREG(now.mode) and written_files.is_marked(view, now, link)
        )

    def recognized(self, update: Update, inode: Inode, now: Stat) -> Inode:
        """`now` is of this inode, whose record stays: its number counts in this connection, too. Returns the record."""
        if inode.connection != now.connection:
            inode = inode._replace(connection=now.connection % NO_CONNECTION)
            self.put_inode(update, inode)
        return inode

    # --- results ---------------------------------------------------------------------------------------------------

    def holds_results(self, view: View, directory: int) -> bool:
        """Has this mount, or an earlier one, overwritten a file of a directory, so that other nodes may do so, too?

        Then records of its immutable files are valid for `unpinned_timeout_s` at a time. Not with `--immutable`.
        """
        if self._are_results is None:
            self._are_results = self._may_hold_results and written_files.are_results(view)
        inode = self.inode(view, directory) if self._are_results else None
        return inode is not None and written_files.holds_results(view, inode)

    def mark_results(self, update: Update, number: int) -> list[int]:
        """A file was overwritten through this mount. Returns the directories that hold results from now on."""
        if not self._may_hold_results:
            return []
        marked = []
        for parent, name in self.paths.links(update, number):
            directory = self.inode(update, parent)
            if directory is None or self.mutable_names.matches(update, parent, name, number):
                continue
            if written_files.mark(update, directory):
                marked.append(parent)
        self._are_results = bool(marked) or self._are_results
        return marked

    def is_result(self, view: View, number: int) -> bool:
        """Does a directory that holds results have a name of this file?"""
        links = () if self._are_results is False else self.paths.links(view, number)
        return any(self.holds_results(view, parent) for parent, _ in links)

    def doubt_result(self, update: Update, number: int) -> bool:
        """Have an immutable file compared at its next use. Returns whether it is one."""
        inode = self.inode(update, number)
        if inode is None or inode.is_directory or not inode.flags & IMMUTABLE:
            return False
        self.put_inode(update, inode._replace(flags=inode.flags | UNSETTLED, expires_ns=0))
        return True

    def withdraw_immutable_on_open(self, number: int) -> None:
        """A file is about to be opened for writing: the fast path must not answer an OPEN of it."""
        with self.index.update() as update:
            inode = self.inode(update, number)
            if inode is not None and inode.flags & IMMUTABLE_ON_OPEN:
                self.put_inode(update, inode._replace(flags=inode.flags & ~IMMUTABLE_ON_OPEN))

    def _compared(self, number: int, old: Inode | None, now: Stat, pin: bool, *, result: bool = False) -> Inode:
        """The inode as it is after a comparison. `old`: as it was before. `result`: of a directory of results."""
        before = old or _BLANK._replace(number=number)
        flags = before.flags & (PINNED | IMMUTABLE | WRITTEN | LISTED | READ_MUTABLE)
        flags |= before.flags & RESTLESS if self.counts(before) else 0
        version = before.version
        entries_valid_from = max(before.entries_valid_from, self._run.names_floor)
        unchanged = old is not None and old.same_version(now) and self.proves_contents(old, now)
        if before.is_directory and before.flags & UNSETTLED and before.validated_run != self.run:
            unchanged = False  # a name may have come in the same tick of the clock, after the last run had looked
        if not unchanged:
            # What was cached of an older version no longer counts.
            version = self.numbers.next()
            entries_valid_from = self.run
            flags &= ~(LISTED | IMMUTABLE)
            if self.kernel_may_know(before):
                self.note_change(before, now)
            flags &= ~0 if stat.S_ISDIR(now.mode) else ~PINNED
        if pin and self.may_pin(number):
            flags |= PINNED
        if old is not None and before.is_directory and before.permissions != now.permissions:
            self.note_other_permissions(before, now)
            flags |= RESTLESS if self.kernel_may_know(before) else 0
        next_position = before.next_position or FIRST_POSITION
        if self._run.forgot and old is not None and old.validated_run != self.run:
            flags &= ~LISTED  # names may be missing
            next_position += FORGOTTEN_POSITIONS
        if result or flags & RESTLESS:
            flags |= UNSETTLED
        if self.is_recent(now) and not (unchanged and self.has_settled(before, now)):
            flags |= UNSETTLED | YOUNG
            if stat.S_ISREG(now.mode):
                next_position = self.observed_since_ns(before if unchanged else None)
        inode = before.with_stat(now)._replace(
            flags=flags,
            version=version,
            validated_run=self.run,
            entries_valid_from=entries_valid_from,
            next_position=next_position,
            lookups=before.lookups if flags & PINNED else lookups_unpinned(before),
        )
        if self.is_pinned(inode):
            expires_ns = self.settles_ns(inode, result=result)
        elif self.changes.happened_since(number, now.began_ns):
            expires_ns = 0
        else:
            expires_ns = self._monotonic_ns() + self._unpinned_timeout_ns
        return inode._replace(expires_ns=expires_ns)

    def apply_root(self, update: Update, now: Stat, *, pin: bool) -> Inode:
        """Record what an lstat of the root said. Its number is 1, whatever it is in the source."""
        before = self.inode(update, ROOT_INODE)
        inode = self._compared(ROOT_INODE, before, now, pin)
        inode_values.settle(update, before, inode)
        if self.mutable_names.may_come(b""):
            inode = inode._replace(flags=inode.flags & ~LISTED)
        self.put_inode(update, inode)
        return inode

    def apply_absence(self, update: Update, parent: int, name: bytes, *, pin: bool) -> None:
        """A look-up or a listing has shown that `name` does not exist: `pin` the absence, if there is room."""
        self._lost(self.dentry(update, parent, name), parent, name)
        self.remove_name(update, parent, name)
        if pin and self.may_pin_absence():
            self.put_dentry(update, parent, name, Dentry(PINNED, 0, self.run, 0))

    # --- writing single records ------------------------------------------------------------------------------------

    def apply_own_change(self, update: Update, number: int, now: Stat) -> tuple[Inode | None, list[tuple[int, bytes]]]:
        """This mount has changed an inode: record its new attributes.

        Our change moves the ctime, and so may a write by another node at the same time (hazard 24). So what is pinned
        or cached of a file (an immutable one was compared before) stays only if size and mtime are still the recorded
        ones. Otherwise the inode is dropped and keeps its old attributes: the next look-up finds another version, and
        makes another inode of it. The inode is also dropped if another object is in its place, because another node was
        faster. A directory keeps its version: our change moves its mtime.
        Returns the inode, or None if it was dropped, and the names that the kernel must drop.
        """
        self.changes.note(number)
        inode = self.inode(update, number)
        if inode is None:
            return None, []
        self.note_owner(inode, now)
        expected = inode.identity._replace(connection=now.connection)  # it was compared before the change
        if not expected.is_of(now, by_name=True):
            return None, self.drop(update, number)
        if not inode.is_directory and not inode.same_data(now):
            if inode.flags & IMMUTABLE or self.is_pinned(inode):
                return None, self.drop(update, number)
            inode = self.changed_now(inode, now)._replace(version=self.numbers.next())
        inode = inode.with_stat(now)  # a write by another node that begins later moves the mtime: it is not young
        self.put_inode(update, inode)
        return inode, []

    def apply_fstat(self, number: int, now: Stat) -> bool:
        """Record what an open of an unpinned file said. Returns whether the file has changed."""
        with self.index.update() as update:
            inode = self.inode(update, number)
            if inode is None or inode.same_version(now) or self.is_pinned(inode) or self._is_overtaken(inode, now):
                return False
            self.note_change(inode, now)
            self.put_inode(update, self.changed_now(inode, now)._replace(version=self.numbers.next()))
        return True

    def permissions_changed(self, update: Update, inode: Inode, now: Stat) -> None:
        """A directory has other permissions or another ACL than recorded: it is compared before its next use, and every
        two seconds. The recorded times stay, because its names have not been compared yet."""
        self.note_permissions(inode, now)
        inode = inode._replace(mode=now.mode, uid=now.uid, gid=now.gid)
        self.put_inode(update, inode._replace(flags=inode.flags | RESTLESS | UNSETTLED, expires_ns=0))

    def pin_file(self, update: Update, inode: Inode, *, seen_by: tuple[int, bytes] | None = None) -> Inode:
        """A regular file was opened read-only: make it immutable, and pin it with the names and directories above it.

        Only valid names are pinned: one that has expired, or was invalidated, may lead elsewhere by now. It is pinned
        when it is looked up again. A directory that has expired is pinned, and compared at its next use. `seen_by`: a
        name by which the source has just been asked for the file.
        """
        result = self.is_result(update, inode.number)
        if inode.is_young:
            inode = inode._replace(next_position=self.observed_since_ns(inode))
        inode = self._without_mutable_pages(update, inode)
        flags = inode.flags & ~IMMUTABLE_ON_OPEN | PINNED | IMMUTABLE | (UNSETTLED if result else 0)
        inode = inode._replace(flags=flags, validated_run=self.run)
        inode = inode._replace(expires_ns=self.settles_ns(inode, result=result))
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

    def _without_mutable_pages(self, update: Update, inode: Inode) -> Inode:
        """A file is about to become immutable: the kernel drops pages of its mutable time. It keeps none by opens that
        come before that, because the file counts as young."""
        if not inode.flags & READ_MUTABLE:
            return inode
        update.afterwards(partial(self._notifier.drop_soon, (), [inode.number]))
        flags = inode.flags & ~READ_MUTABLE | UNSETTLED | YOUNG
        inode = inode._replace(flags=flags, next_position=self._monotonic_ns())
        return inode._replace(expires_ns=self.settles_ns(inode, result=False))

    def note_mutable_pages(self, number: int) -> None:
        """The kernel is about to get data of a mutable file, or has it open for writing."""
        inode = self.current(number)
        if inode is not None and inode.is_regular and self._pins_files and not inode.flags & (READ_MUTABLE | IMMUTABLE):
            with self.index.update() as update:
                self.put_inode(update, inode._replace(flags=inode.flags | READ_MUTABLE))

    def _valid_names(self, update: Update, number: int, seen_by: tuple[int, bytes] | None) -> list[tuple[int, bytes]]:
        """The valid names of an inode. If there are any, the links to expired names are deleted: a fetch by one of
        these might find another file."""
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
        """Forget what is known and cached of an inode. The next look-up compares it with the source.

        Its names stay, pinned and doubtful, so that listings that are complete stay so. They lead to this number in
        this run only: later it may be another file's. Returns the names, which the kernel must drop.
        """
        inode = self.inode(update, number)
        if inode is None:
            return []
        flags = inode.flags & ~(PINNED | LISTED) | STALE
        inode = inode._replace(flags=flags, version=self.numbers.next(), lookups=lookups_unpinned(inode))
        self.put_inode(update, inode._replace(validated_run=self.run, expires_ns=0))
        links = links_of(update, number)
        for parent, name in links:
            dentry = self.dentry(update, parent, name)
            if dentry is not None:
                self.put_dentry(update, parent, name, dentry._replace(validated_run=0))
            update.put(Table.LINKS, link_key(number, (parent, name)), link_value(0))
        return links

    def directories_without_name(self, view: View) -> list[int]:
        """Those in which names may be pinned. Another node has moved or removed them."""
        marked = [inode_of_key(key[len(UNLINKED_MARK) :]) for key, _ in view.scan(Table.META, UNLINKED_MARK)]
        return [number for number in marked if (found := self.inode(view, number)) is not None and found.is_directory]

    def follow_names(self, update: Update, number: int) -> tuple[list[tuple[int, bytes]], bool]:
        """An inode has other names than before: apply the rules for mutable names to it (mutable_names.py).

        Returns the names that the kernel must drop, and whether the inode was unpinned.
        """
        inode = self.inode(update, number)
        if inode is None or not inode.flags & (PINNED | IMMUTABLE | IMMUTABLE_ON_OPEN):
            return [], False
        mutable, others = self.mutable_names.names(update, number)
        if not mutable:
            return [], False
        ends = not others
        flags = inode.flags & ~IMMUTABLE_ON_OPEN
        for parent, name in mutable:  # names beneath a renamed directory still lead to the same inodes
            self._put_name(update, parent, name, number, pinned=False)
        if ends:
            flags = mutable_flags(inode) & ~(IMMUTABLE_ON_OPEN | LISTED)
            lookups = lookups_unpinned(inode)
            inode = inode._replace(version=self.numbers.next(), expires_ns=0, lookups=lookups)
        self.put_inode(update, inode._replace(flags=flags))
        return mutable, ends


def mutable_flags(inode: Inode) -> int:
    """The flags of an inode that becomes, or is, mutable. If it was not before, the kernel may have pages of it."""
    may_have_pages = inode.is_regular and inode.flags & (PINNED | IMMUTABLE | WRITTEN)
    return inode.flags & ~(PINNED | IMMUTABLE) | (READ_MUTABLE if may_have_pages else 0)
