"""Immutability: is a file immutable, may an open make it so, and how many handles write to it?

Opening a regular file read-only makes it immutable: its data are pinned from then on, and it cannot be opened for
writing. A file stays mutable while it is open for writing, if this mount has written it, if `--mutable` matches one of
its names (mutable_names.py), and if it cannot be pinned. On a mount that pins everything each pinned file is immutable.
`handles.py` and `mutations.py` act on these answers. Nothing is awaited between a question and the write of the record
that follows from the answer.

The fast path does not know which files are open for writing. So an inode has a flag, IMMUTABLE_ON_OPEN: the fast path
may answer an OPEN and report it later. `InodeCache.apply_stat` sets the flag where `may_become_immutable_on_open`
allows it, and `opening_for_writing` clears it. When the report arrives the record may have expired: the file becomes
immutable all the same, because its reader may have data of that version. If it is another version by then, the inode
is dropped: the reader gets ESTALE, and the next open another inode (hazard 82).
"""

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from cachefs.contract.messages import OPEN_HAS_VERSION, OPEN_VERSION_BIT, OPEN_VERSION_MASK
from cachefs.errors import failed
from cachefs.metadata.inode_cache import InodeCache
from cachefs.metadata.inode_paths import links_of
from cachefs.options import Options
from cachefs.store.index.records import IMMUTABLE, IMMUTABLE_ON_OPEN, STALE, UNLINKED, WRITTEN, Inode


def may_become_immutable_on_open(options: Options, inode: Inode) -> bool:
    """May the fast path answer an OPEN of this file, which has no mutable name, and so make it immutable?"""
    writable_mount = options.pins_files and not options.read_only
    return writable_mount and inode.is_regular and not inode.flags & (IMMUTABLE | WRITTEN)


class Immutability:
    def __init__(self, metadata: InodeCache, options: Options) -> None:
        # dependencies
        self._metadata = metadata
        self._options = options
        # state
        self._writers = metadata.writers
        """Including those that are being opened."""

    # --- writers ---------------------------------------------------------------------------------------------------

    def has_writers(self, number: int) -> bool:
        return number in self._writers

    def add_writer(self, number: int) -> None:
        self._writers[number] += 1

    def remove_writer(self, number: int) -> bool:
        """Returns whether it was the last one."""
        self._writers[number] -= 1
        is_last = not self._writers[number]
        if is_last:
            del self._writers[number]
        return is_last

    @contextmanager
    def opening_for_writing(self, number: int) -> Iterator[None]:
        """Around an open for writing or another change at the source: meanwhile no reader may make the file immutable.

        Raises ESTALE for an immutable file that was dropped: the kernel looks its name up again. Without that, as by
        /proc/PID/fd/N, the file may be another version than processes have open by this number.
        """
        inode = self._metadata.current(number)
        if inode is not None and inode.flags & (IMMUTABLE | STALE) == IMMUTABLE | STALE:
            raise failed(errno.ESTALE)
        self.add_writer(number)
        try:
            self._metadata.withdraw_immutable_on_open(number)
            yield
        finally:
            self.remove_writer(number)

    # --- decisions -------------------------------------------------------------------------------------------------

    def is_immutable(self, inode: Inode) -> bool:
        """Is a file immutable, and reached by a name? Then it is read from the cache."""
        return (
            self._is_fixed(inode)
            and self._metadata.is_pinned(inode)
            and not inode.flags & UNLINKED
            and not self.has_writers(inode.number)
        )

    def _is_fixed(self, inode: Inode) -> bool:
        return inode.is_regular and bool(inode.flags & IMMUTABLE or self._options.pins_everything)

    def outlives_its_name(self, inode: Inode) -> bool:
        """Is a file immutable and without a name? Handles that are open go on reading it (hazard 2)."""
        was_fixed = inode.flags & IMMUTABLE or (self._is_fixed(inode) and self._metadata.is_pinned(inode))
        return bool(inode.flags & UNLINKED and was_fixed)

    def may_be_immutable(self, inode: Inode) -> bool:
        """Is a file immutable, or would an open for reading make it so now?"""
        if not self._options.pins_files or not inode.is_regular or self.has_writers(inode.number):
            return False
        if inode.flags & IMMUTABLE:
            return True
        if inode.flags & UNLINKED or not self._metadata.may_pin(inode.number):
            return False
        return not self.is_mutable(inode)

    def is_immutable_on_open(self, inode: Inode) -> bool:
        """Has a file become immutable, because the fast path has answered an OPEN of it?"""
        return inode.flags & (IMMUTABLE_ON_OPEN | STALE) == IMMUTABLE_ON_OPEN and self.may_be_immutable(inode)

    def may_have_readers(self, inode: Inode) -> bool:
        """May processes read a file as immutable, whether or not it was dropped since they opened it (hazard 61)?"""
        return self.is_immutable(inode) or bool(inode.flags & IMMUTABLE and self.may_be_immutable(inode))

    def version(self, number: int) -> Inode | None:
        """The inode of a file that processes may read as immutable; else None."""
        inode = self._metadata.current(number)
        return inode if inode is not None and self.may_have_readers(inode) else None

    def keeps_version(self, inode: Inode) -> bool:
        """Must a handle that was opened for reading go on showing the recorded version? Also of a file that was
        dropped, or has lost its name."""
        return self.outlives_its_name(inode) or (self._is_fixed(inode) and self.may_be_immutable(inode))

    def opened_unseen(self, number: int, flags: int) -> bool:
        """The fast path has answered an OPEN, and reports it: the file becomes immutable, unless a writer came first.

        Returns False if its record is of another version than the fast path had. `flags`: of the report.
        """
        inode = self._metadata.current(number)
        if inode is not None and self.is_immutable_on_open(inode):
            with self._metadata.index.update() as update:
                inode = self._metadata.pin_file(update, inode)
        if inode is None or not inode.flags & IMMUTABLE or not flags & OPEN_HAS_VERSION:
            return True
        if inode.version & OPEN_VERSION_MASK == flags >> OPEN_VERSION_BIT & OPEN_VERSION_MASK:
            return True
        with self._metadata.index.update() as update:  # nothing has this version: no object gets the number again
            self._metadata.put_inode(update, inode._replace(ctime_ns=0))
        return False

    def fetched_unseen(self, fetched: Iterable[tuple[int, int]]) -> None:
        """The fast path has fetched data of these files, (inode, version), because it had answered an OPEN.

        The report of that OPEN may not have arrived yet. The file becomes immutable now, because data of unpinned files
        are not cached. An expired record still counts: the fast path has compared the source with it. If an open for
        writing came first, it has withdrawn IMMUTABLE_ON_OPEN.
        """
        if self._options.read_only:  # nothing is IMMUTABLE_ON_OPEN there
            return
        with self._metadata.index.view() as view:
            found = [(self._metadata.inode(view, number), version) for number, version in fetched]
        immutable_on_open = {
            inode.number: inode
            for inode, version in found
            if inode is not None and inode.version == version and self.is_immutable_on_open(inode)
        }
        if not immutable_on_open:
            return
        with self._metadata.index.update() as update:
            for inode in immutable_on_open.values():
                links = links_of(update, inode.number)
                self._metadata.pin_file(update, inode, seen_by=links[0] if links else None)

    def is_mutable(self, inode: Inode) -> bool:
        """Is a file open for writing, was it written, or does --mutable match one of its names?"""
        return self.is_written(inode) or self._has_mutable_name(inode.number)

    def _has_mutable_name(self, number: int) -> bool:
        with self._metadata.index.view() as view:
            return self._metadata.mutable_names.any(view, number)

    def is_written(self, inode: Inode) -> bool:
        """Was a file written through this mount, and not pinned since, or is it open for writing?"""
        return bool(inode.flags & WRITTEN) or self.has_writers(inode.number)

    def is_changing(self, inode: Inode) -> bool:
        """Has this mount changed a file since the record was made, or may it be about to? Then the record must not go
        to the kernel: it knows the new size, would take over an older one, and append there."""
        return not inode.is_directory and (self.has_writers(inode.number) or not inode.expires_ns)

    def refuses_changes(self, inode: Inode) -> bool:
        """Do an open for writing, and changes of the attributes, fail with EPERM?"""
        return bool(inode.flags & IMMUTABLE) and self._metadata.is_pinned(inode)

    def state(self, inode: Inode) -> str:
        """One word for users (docs/CONTROL.md)."""
        if inode.flags & WRITTEN:
            return "written"
        if self._metadata.is_pinned(inode):
            return "immutable" if self._is_fixed(inode) else "pinned"
        return "mutable" if self._has_mutable_name(inode.number) else "unpinned"
