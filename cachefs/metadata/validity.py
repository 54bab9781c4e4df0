"""How long a record is valid, and whether its version has settled. The fast path has the same rules for the former
(fastpath/c/cache/index.c).

- Pinned, and compared with the source in this run (or in an earlier one from the floor on): for ever.
- Pinned but *unsettled*, that is, changed shortly before the comparison: for two seconds. Then it is compared once more
  (hazard 11). "Shortly" is two seconds, or ten minutes where another clock sets the times of files.
- Everything else: for `unpinned_timeout_s` from the lstat.

One number validates many records: a record counts if its `validated_run` is at or above the floor. So a new run
doubts, or trusts, a whole index in one step. Of what a recursive ctime does not cover (rctime.py) only this run
counts: objects of other filesystems from `strict_floor` on, files with several names from `links_floor` on. With
--revalidate=never the latter is the floor of all. The former is not: another filesystem may be mounted there by now. It
may also be mounted over what was recorded of the source: a new mount drops the records of each mountpoint.

A directory that has not changed vouches for its names (dentries, listing, absences), so that each object costs exactly
one lstat. Where it has changed, `entries_valid_from` makes its names doubtful. After the names were read, another one
may come or go in the same tick of the source's clock, which may last a second. So listings and absences in a directory
that may have changed just now (YOUNG) are not pinned, until a second comparison shows it unchanged.

Age: are data that are about to be read certainly of one version? The flag YOUNG of the record tells both languages.
The kernel sets mtime and ctime before it copies what is written (hazard 25). Data that are read during one write()
contain old and new bytes, and pass every later comparison of times. The clock that sets the times is the source's, or
that of the node that writes, and may be late (hazard 53). So age is observed: a version that may be recent is *young*
until two comparisons show it unchanged. The second one begins `settle_ns` after the first by this machine's monotonic
clock, and reaches the source. Data of a young file are given to the reader and not cached, and the kernel's pages of
them are dropped after `settle_ns` (young_files.py). Not covered: one write() that lasts longer than that, and a clock
that is later than `LATE_NS`.

A version may be recent if its change time is less than `LATE_NS` ago, or in the future. Where this machine's own clock
sets the times, as on a local disk, less than `settle_ns` ago. A time in whole seconds counts from the end of its step,
because the change may have come then. Where ctime proves nothing (store/filesystem.py) the later of ctime and mtime
counts. On CephFS, which never sets a time back, a file stays young as long as its ctime is in the future: until then a
rewrite by a node with the right time leaves no trace (hazard 59).

`settle_ns` is an option of the mount; tests use shorter times.
"""

from collections.abc import Collection, Container
from typing import NamedTuple

from cachefs.contract.shared import LATE_NS, SETTLE_NS, Words
from cachefs.metadata.last_changes import LastChanges, LostNames
from cachefs.options import Options
from cachefs.store.index.records import IMMUTABLE, PINNED, STALE, UNLINKED, UNSETTLED, YOUNG, Dentry, Inode
from cachefs.system.clock import NANOSECONDS, SYSTEM, Clock
from cachefs.system.stat import Stat

FOREVER_NS = 1 << 63
COARSEST_NS = 2 * NANOSECONDS
"""In what steps times move that are in whole seconds: on FAT."""
ANSWERED_NS = NANOSECONDS
"""How long an answer that the kernel has not received yet may be on its way."""


class Run(NamedTuple):
    """The run of this mount, and from which run on records of earlier runs count."""

    number: int
    floor: int
    """At the start; `Validity.floor` may be lowered later."""
    strict_floor: int = 0
    links_floor: int = 0
    names_floor: int = 0
    """The run since which `--mutable` has its present patterns: names that were pinned earlier are doubtful."""
    forgot: bool = False
    """The kernel may know inodes and versions of which no record is left."""
    has_change_times: bool = True
    """Does ctime move with each change at the source? (store/filesystem.py)"""
    has_own_clock: bool = False
    """Does another clock than this machine's set the times of the source? (store/filesystem.py)"""
    sets_no_time_back: bool = False
    """May a rewrite leave a later time as it is? (store/filesystem.py)"""
    trusted: Container[int] = range(1 << 64)
    """As of `Volumes`. The ctimes of others may prove nothing."""
    other_clocks: Collection[int] = ()
    """As of `Volumes`."""


class Validity:
    def __init__(self, options: Options, run: Run, clock: Clock = SYSTEM, words: Words | None = None) -> None:
        # dependencies
        self._words = words if words is not None else {}
        self._monotonic_ns = clock.monotonic_ns
        self._realtime_ns = clock.realtime_ns
        # constants
        self._settle_ns = options.settle_ns
        self._unpinned_timeout_ns = int(options.unpinned_timeout_s * NANOSECONDS)
        self.has_change_times = run.has_change_times
        self._pins_files = options.pins_files
        self._pins_everything = options.pins_everything
        self._run = run
        self.run = run.number
        # state
        self.floor = run.floor
        """Lowered when the source proves to be unchanged since an earlier run (daemon/tasks.py)."""
        self._lost_names = LostNames(clock.monotonic_ns)
        self._resized = LastChanges(clock.monotonic_ns)
        """Files of which a comparison has shown another size."""
        self._permitted = LastChanges(clock.monotonic_ns)
        """Objects that have got another mode or ACL."""
        self._permitted_elsewhere = LastChanges(clock.monotonic_ns)
        """The same, by another node."""
        self._owned = LastChanges(clock.monotonic_ns)
        """Objects that have got another owner or group."""

    @property
    def recent_ns(self) -> int:
        """How far behind this machine's clock a time of the source may be when it has just been set."""
        is_late = (self._run.has_own_clock or self._run.other_clocks) and self._settle_ns >= SETTLE_NS
        return LATE_NS if is_late else self._settle_ns

    def _has_change_time(self, device: int) -> bool:
        """Does a ctime of this volume move with each change?"""
        return self.has_change_times and device in self._run.trusted

    def doubt_everything(self) -> None:
        """Records were lost: begin another run, which compares everything, and believes no listing to be complete."""
        self.run += 1
        self.floor = self.run
        self._run = self._run._replace(
            number=self.run, floor=self.run, strict_floor=self.run, links_floor=self.run, forgot=True
        )

    def is_pinned(self, inode: Inode) -> bool:
        """Pinned in the sense of this mount: a read-write mount pins directories and files that were opened to read."""
        if not inode.flags & PINNED or not self._pins_files:
            return False
        return self._pins_everything or bool(inode.flags & IMMUTABLE) or inode.is_directory

    def counts(self, inode: Inode) -> bool:
        """Was it compared with the source recently enough?"""
        if inode.validated_run < self.floor or (inode.device and inode.validated_run < self._run.strict_floor):
            return False
        return inode.nlink <= 1 or inode.is_directory or inode.validated_run >= self._run.links_floor

    def kernel_may_know(self, inode: Inode) -> bool:
        """May the kernel have been told what this record says? Not of an earlier mount, unless it still counts."""
        return inode.validated_run >= self.floor or self._run.forgot

    def proves_contents(self, inode: Inode, now: Stat) -> bool:
        """Does `now`, which has the times of the record, prove that the contents are the recorded ones?

        Between two runs a file or symlink may have been replaced by another one with the same size and mtime. That
        shows in its ctime only, if that is neither a copy of mtime nor 0 (archivemount). In a directory a name may have
        come or gone: its mtime can be set back, mergerfs shows that of one branch, and the kernel may have got or lost
        the key of an encrypted one.
        """
        if inode.validated_run == self.run:
            return True
        if now.is_encrypted and not inode.is_regular:
            return False
        is_dated = not inode.is_directory and now.ctime_ns > now.mtime_ns
        return is_dated or self._has_change_time(now.device)

    def is_recent(self, now: Stat) -> bool:
        """May this version have been made just now?"""
        changed_ns = now.ctime_ns if self._has_change_time(now.device) else max(now.ctime_ns, now.mtime_ns)
        if changed_ns % NANOSECONDS == 0 and self._settle_ns >= SETTLE_NS:
            changed_ns += COARSEST_NS  # it does not say when in the second that was
        return changed_ns + self.recent_ns > self._realtime_ns()

    def has_settled(self, before: Inode, now: Stat) -> bool:
        """Does `now`, which shows the version of the record, show that it is not being written any more?

        The second comparison must reach the source, and begin `settle_ns` after the first one.
        """
        if self.hides_changes(now.ctime_ns, now.device) if before.is_regular else self.lies_ahead(now.ctime_ns):
            return False  # a directory that is closed now has an older ctime: it would not show in what is made then
        is_of_this_run = before.validated_run == self.run
        if not before.flags & UNSETTLED or (before.is_regular and is_of_this_run and not before.is_young):
            return True
        began_ns = now.began_ns or self._monotonic_ns()
        if not now.is_fresh or not before.is_regular:
            return now.is_fresh and (not is_of_this_run or began_ns >= before.expires_ns)
        return is_of_this_run and began_ns - before.observed_ns >= self._settle_ns

    def shows_changes(self, before: Inode | None, directory: Inode | None) -> bool:
        """Will the times of a directory show it if names come or go after its names were read? They may be the same if
        that happens in the same tick of the source's clock. `before`: its record when the names were read."""
        if before is None or directory is None or before.version != directory.version:
            return False
        return self.is_pinned(directory) and not before.is_young and not directory.is_young

    def hides_changes(self, ctime_ns: int, device: int) -> bool:
        """May an object be changed while its ctime stays as it is? On CephFS, until that time has come (hazard 59)."""
        return (self._run.sets_no_time_back or device not in self._run.trusted) and self.lies_ahead(ctime_ns)

    def lies_ahead(self, ctime_ns: int) -> bool:
        return ctime_ns > self._realtime_ns()

    def observed_since_ns(self, before: Inode | None) -> int:
        """Since when the version of a young file is known. `before`: an earlier record of it."""
        is_known = before is not None and before.is_young and before.validated_run == self.run
        return before.observed_ns if before is not None and is_known else self._monotonic_ns()

    def settles_ns(self, inode: Inode, *, result: bool) -> int:
        """When a pinned record expires; 0: never. An answer that began before `settle_ns` less is overtaken."""
        if not inode.flags & UNSETTLED:
            return 0
        if result:
            return self._monotonic_ns() + self._unpinned_timeout_ns
        return self._settle_ns + (inode.observed_ns if inode.is_young and inode.is_regular else self._monotonic_ns())

    def changed_now(self, inode: Inode, now: Stat) -> Inode:
        """The record of a file that has changed since its last comparison, which may be a moment ago."""
        inode = inode.with_stat(now)
        if not inode.is_regular or not self.is_recent(now):
            return inode
        return inode._replace(flags=inode.flags | UNSETTLED | YOUNG, next_position=self._monotonic_ns())

    def note_size(self, before: Inode, now: Stat) -> None:
        """A comparison has shown the size of a file."""
        if before.is_regular and before.size != now.size:
            self._resized.note(before.number)

    def note_change(self, before: Inode, now: Stat) -> None:
        """The source has shown other attributes than the record has, if it is not new. The kernel is notified."""
        self.note_size(before, now)
        if before.mode and before.permissions != now.permissions:
            self.note_permissions(before, now)

    def note_permissions(self, before: Inode, now: Stat | None = None) -> None:
        """An object has got another mode or ACL, or has lost its ACL. The kernel is notified. `now`: of the source."""
        self._permitted.note(before.number)
        if now is not None:
            self._permitted_elsewhere.note(before.number)
            self._words["pass_opens_until_ns"] = self._monotonic_ns() + ANSWERED_NS
            self.note_owner(before, now)

    def note_owner(self, before: Inode, now: Stat) -> None:
        if (before.uid, before.gid) != (now.uid, now.gid):
            self._owned.note(before.number)

    def may_have_former_size(self, number: int) -> bool:
        """May the kernel have another size of a file than the record? It ignores an answer if it has received another
        one of the same file since the request, or a notification: an older one may have been the last that it took."""
        return self._resized.happened_since(number, self._known_since_ns())

    def last_permissions_ns(self, number: int, *, elsewhere: bool = False) -> int:
        """When an object got another mode or ACL; 0: no request that knows the former may be under way. `elsewhere`: by
        another node. Until then the fast path answers no OPEN."""
        return self._if_lately((self._permitted_elsewhere if elsewhere else self._permitted).last_ns(number))

    def last_owner_ns(self, number: int) -> int:
        """The same for owner and group."""
        return self._if_lately(self._owned.last_ns(number))

    def _if_lately(self, last_ns: int) -> int:
        return last_ns if last_ns >= self._monotonic_ns() - ANSWERED_NS else 0

    def note_lost_name(self, number: int, parent: int, name: bytes) -> None:
        """The source has shown that a name leads to this inode no longer."""
        self._lost_names.note(number, parent, name)

    def last_loss_ns(self, number: int) -> int:
        """When the inode lost a name that the kernel may still take for its own; 0: no name."""
        last_ns = self._lost_names.last_ns(number)
        return last_ns if last_ns >= self._known_since_ns() else 0

    def lost_names(self) -> list[tuple[int, bytes]] | None:
        """(parent, name) that the kernel may still take for a former object's. None: not all are known any more."""
        return self._lost_names.since(self._known_since_ns())

    def follow_lost_names(self, *moves: tuple[tuple[int, bytes], tuple[int, bytes]]) -> bool:
        """The kernel has moved names, (from, to), for a rename by this mount. Where it took one for a former object's,
        the new one is that now. Returns whether it may."""
        since_ns = self._known_since_ns()
        lost = [(number, to) for name, to in moves for number in self._lost_names.losers(name, since_ns)]
        for number, to in lost:
            self.note_lost_name(number, *to)
        return bool(lost)

    def _known_since_ns(self) -> int:
        """From when on the kernel may have been told what it still believes, if nothing makes it drop that."""
        since_ns = self._monotonic_ns() - self._unpinned_timeout_ns - ANSWERED_NS
        return max(1, since_ns)  # the machine may just have booted

    def remaining_ns(self, inode: Inode) -> int:
        """How long the record is valid from now on: FOREVER_NS, or 0 if it must be compared first."""
        if inode.flags & STALE:
            return 0
        if inode.flags & UNLINKED:
            return FOREVER_NS
        if self.is_pinned(inode):
            if not self.counts(inode):
                return 0
            if not inode.flags & UNSETTLED:
                return FOREVER_NS
            if inode.validated_run != self.run:
                return 0  # `expires_ns` may be of another boot's clock
        return max(0, inode.expires_ns - self._monotonic_ns())

    def entry_holds(self, parent: Inode, dentry: Dentry) -> bool:
        """Is a pinned name (or absence) of a directory valid without a comparison of its own?"""
        return bool(
            dentry.flags & PINNED
            and self.is_pinned(parent)
            and dentry.validated_run >= parent.entries_valid_from
            and self.counts(parent)
            and not parent.flags & STALE
        )

    def knows_absent(self, parent: Inode, dentry: Dentry | None) -> bool:
        """Is a name known not to exist? Only where the dataset counts as complete, and a look-up has shown the absence.
        A listing does not prove it: a directory may have names that it does not list, such as .snap on CephFS."""
        if not self._pins_everything or dentry is None or self.remaining_ns(parent) == 0:
            return False
        return dentry.inode == 0 and self.entry_holds(parent, dentry)
