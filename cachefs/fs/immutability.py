"""Immutability: is a file immutable, may an open make it so, and how many handles write to it?

Opening a regular file read-only makes it immutable: its data are pinned from then on, and it cannot be opened for
writing. A file stays mutable while it is open for writing, when it was written in this run, when `--mutable` matches
one of its names (mutable_names.py), and where there is no room to pin it. On a mount that pins everything each pinned
file is immutable. `handles.py` and `mutations.py` act on these answers; nothing is awaited between a question and the
record that is written for its answer.

The fast path knows no writers. So a record has a flag, IMMUTABLE_ON_OPEN, which says that the fast path may answer an
open and report it later. `InodeCache.apply_stat` sets it, and `opening_for_writing` takes it away.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from cachefs.metadata.inode_cache import InodeCache
from cachefs.options import Options
from cachefs.store.index.records import IMMUTABLE, IMMUTABLE_ON_OPEN, STALE, UNLINKED, WRITTEN, Inode


class Immutability:
    def __init__(self, metadata: InodeCache, options: Options) -> None:
        # dependencies
        self._metadata = metadata
        self._options = options
        # state
        self._writers: Counter[int] = Counter()
        """How many writable handles an inode has, those that are being opened included."""

    # --- writers ---------------------------------------------------------------------------------------------------

    def has_writers(self, number: int) -> bool:
        return number in self._writers

    def add_writer(self, number: int) -> None:
        self._writers[number] += 1

    def remove_writer(self, number: int) -> bool:
        """True if it was the last one."""
        self._writers[number] -= 1
        is_last = not self._writers[number]
        if is_last:
            del self._writers[number]
        return is_last

    @contextmanager
    def opening_for_writing(self, number: int) -> Iterator[None]:
        """While the source is asked, which takes time, a reader must not make the file immutable."""
        self.add_writer(number)
        try:
            self._metadata.withdraw_immutable_on_open(number)
            yield
        finally:
            self.remove_writer(number)

    # --- decisions -------------------------------------------------------------------------------------------------

    def is_immutable(self, inode: Inode) -> bool:
        """Immutable already, and read from the cache by a name that it has."""
        return (
            self._is_fixed(inode)
            and self._metadata.is_pinned(inode)
            and not inode.flags & UNLINKED
            and not self.has_writers(inode.number)
        )

    def _is_fixed(self, inode: Inode) -> bool:
        return inode.is_regular and bool(inode.flags & IMMUTABLE or self._options.pins_everything)

    def outlives_its_name(self, inode: Inode) -> bool:
        """Immutable, and without a name: handles that are open go on reading it (hazard 2)."""
        return bool(inode.flags & UNLINKED and inode.flags & IMMUTABLE)

    def may_be_immutable(self, inode: Inode) -> bool:
        """Is it, or would it be if it were opened for reading now?"""
        if not self._options.pins_files or not inode.is_regular or self.has_writers(inode.number):
            return False
        if inode.flags & IMMUTABLE:
            return True
        if inode.flags & UNLINKED or not self._metadata.may_pin(inode.number):
            return False
        return not self.is_mutable(inode)

    def is_immutable_on_open(self, inode: Inode) -> bool:
        """Does a file become immutable because the fast path has opened it for reading?"""
        return inode.flags & (IMMUTABLE_ON_OPEN | STALE) == IMMUTABLE_ON_OPEN and self.may_be_immutable(inode)

    def is_mutable(self, inode: Inode) -> bool:
        """Is it never to be immutable in this run: open for writing, written here, or named by --mutable?"""
        return self.is_written(inode) or self._has_mutable_name(inode.number)

    def _has_mutable_name(self, number: int) -> bool:
        with self._metadata.index.view() as view:
            return self._metadata.mutable_names.any(view, number)

    def is_written(self, inode: Inode) -> bool:
        """Written in this run, or open for writing."""
        return bool(inode.flags & WRITTEN) or self.has_writers(inode.number)

    def is_changing(self, inode: Inode) -> bool:
        """Has this mount changed it, or may be about to, since the record was made? The kernel, which knows, would take
        over an older size, and append there."""
        return not inode.is_directory and (self.has_writers(inode.number) or not inode.expires_ns)

    def refuses_changes(self, inode: Inode) -> bool:
        """EPERM for an open for writing and for changes of its attributes."""
        return bool(inode.flags & IMMUTABLE) and self._metadata.is_pinned(inode)

    def state(self, inode: Inode) -> str:
        """In one word, for users (docs/CONTROL.md)."""
        if inode.flags & WRITTEN:
            return "written"
        if self._metadata.is_pinned(inode):
            return "immutable" if self._is_fixed(inode) else "pinned"
        return "mutable" if self._has_mutable_name(inode.number) else "unpinned"
