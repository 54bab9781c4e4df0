"""What is believed, and for how long. The fast path has the same rules (fastpath/c/cache/index.c).

- Pinned and compared with the source in this run (or the floor was left where it is): for ever.
- Pinned but *unsettled*, that is changed less than two seconds before it was looked at: for two seconds, then it is
  compared once more (hazard 11).
- Everything else: for `unpinned_timeout_s` from the lstat.

Validation is one number: a record counts if its `validated_run` is at or above the floor, so that a new run makes a
whole index doubtful, or trusts it, in one step. `strict_floor` is another one, for what rctime.py cannot know of: files
with several names and objects of other devices. A directory that has not changed vouches for its names (dentries,
listing, absences), so each object costs exactly one lstat. Where it has changed, `entries_valid_from` makes its names
doubtful.
"""

import time
from collections.abc import Callable

from cachefs.options import Options
from cachefs.store.index.records import IMMUTABLE, LISTED, PINNED, STALE, UNLINKED, UNSETTLED, Dentry, Inode

FOREVER_NS = 1 << 63


class Validity:
    def __init__(
        self,
        options: Options,
        run: int,
        floor: int,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        *,
        strict_floor: int = 0,
    ) -> None:
        # dependencies
        self._options = options
        self._monotonic_ns = monotonic_ns
        # constants
        self.run = run
        self.floor = floor
        self.strict_floor = strict_floor

    def is_pinned(self, inode: Inode) -> bool:
        """Pinned in the sense of this mount: a read-write mount pins files that were read and directories only."""
        return bool(
            inode.flags & PINNED
            and (self._options.pins_everything or inode.flags & IMMUTABLE or inode.is_directory)
            and self._options.pins_files
        )

    def counts(self, inode: Inode) -> bool:
        """Was it compared with the source recently enough?"""
        if inode.validated_run < self.floor:
            return False
        if inode.validated_run >= self.strict_floor:
            return True
        return not inode.device and (inode.nlink <= 1 or inode.is_directory)

    def remaining_ns(self, inode: Inode) -> int:
        """How long the record is believed from now on; FOREVER_NS, or 0 if it must be compared first."""
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
                return 0  # its clock may have been another boot's
        return max(0, inode.expires_ns - self._monotonic_ns())

    def entry_holds(self, parent: Inode, dentry: Dentry) -> bool:
        """True if a pinned name (or absence) of a directory needs no comparison of its own."""
        return bool(
            dentry.flags & PINNED
            and self.is_pinned(parent)
            and dentry.validated_run >= parent.entries_valid_from
            and self.counts(parent)
            and not parent.flags & STALE
        )

    def knows_absent(self, parent: Inode, dentry: Dentry | None) -> bool:
        """Only where the dataset is taken as complete: seen absent before, or not in a complete listing."""
        if not self._options.pins_everything or self.remaining_ns(parent) == 0:
            return False
        if dentry is not None:
            return dentry.inode == 0 and self.entry_holds(parent, dentry)
        return bool(parent.flags & LISTED)
