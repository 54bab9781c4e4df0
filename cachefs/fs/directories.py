"""Directories: their handles, and the listings that the kernel gets.

A listing comes from the index, where names keep their positions (hazard 8). An entry that is not valid is compared with
the source first (listing_comparison.py). Read-only mounts pin listings: later ones do not need the source. On a mount
where no process opens anything (NO_OPEN), the kernel keeps a listing until the mtime of the directory changes. In a
young directory names may come and go at the same mtime, so the kernel drops such a listing like the pages of a young
file.
"""

import itertools
from collections.abc import Callable

import trio

from cachefs.contract.index import ROOT_INODE
from cachefs.contract.messages import FAST_HANDLE
from cachefs.data.young_files import YoungFiles
from cachefs.fs.handles import RequestAt
from cachefs.fs.listing_comparison import ListingComparisons
from cachefs.fs.names import FileSystem
from cachefs.metadata.inode_paths import links_of
from cachefs.metadata.listings import Listings, is_listed_at
from cachefs.source import shares
from cachefs.source.credentials import Caller
from cachefs.source.identity import Changed
from cachefs.source.shares import UNKNOWN
from cachefs.store.index.environment import View
from cachefs.store.index.records import Dentry, Inode

CHUNK_NAMES = 64
"""How many names are looked at before other tasks may run."""
MAX_ATTEMPTS = 10

Emit = Callable[[bytes, Inode | None, float, int], bool]
"""(name, inode or None for the name alone, timeout in seconds, position) → False if the reply is full."""


class Directories:
    def __init__(
        self, filesystem: FileSystem, comparisons: ListingComparisons, young: YoungFiles, request_at: RequestAt
    ) -> None:
        # dependencies
        self._young = young
        self._request_at = request_at
        self._fs = filesystem
        self._metadata = filesystem.metadata
        self._listings = Listings(filesystem.metadata)
        self._comparisons = comparisons
        # state
        self._handles: dict[int, tuple[int, int, Caller | None]] = {}
        """Handle → (inode, owner, the process that opened it)."""
        self._next_handle = 1

    def opendir(self, number: int) -> int:
        self._next_handle += 1
        self._handles[self._next_handle] = number, shares.owner(), shares.caller()
        return self._next_handle

    def _asked(self, handle: int) -> tuple[int, int, Caller | None]:
        """The inode that a request with this handle is for, its owner, and the process."""
        return self._request_at(handle) if handle & FAST_HANDLE else self._handles.get(handle, (0, UNKNOWN, None))

    def number_of(self, handle: int) -> int:
        return self._asked(handle)[0]

    def owner_of(self, handle: int) -> tuple[int, Caller | None]:
        return self._asked(handle)[1:]

    def releasedir(self, handle: int) -> None:
        del self._handles[handle]

    async def readdir(self, handle: int, after: int, emit: Emit) -> None:
        """Emit entries from behind position `after` on, until `emit` returns False.

        Raises `Changed` if the directory was replaced. For a listing the kernel does not look up the name again. So the
        name is dropped before this returns, and the next listing finds the new directory.
        """
        number, owner, caller = self._asked(handle)
        try:
            await self._readdir(number, owner, caller, after, emit)
        except Changed as error:
            await self._fs.invalidation.forget_names(error.directory or number)
            raise

    async def _readdir(self, number: int, owner: int, caller: Caller | None, after: int, emit: Emit) -> None:
        arrival_s = self._fs.source.clock.monotonic_s()
        begins = after == 0 or self._metadata.index.durable.damage.is_found  # rows may be lost in the middle
        if begins and not self._comparisons.is_valid(await self._fs.revalidated(number)):
            await self._comparisons.make(number, owner)
        await self._fs.let_list(number, caller, arrival_s)
        directory = self._metadata.current(number)
        if after == 0 and directory is not None and directory.is_young and self._fs.options.is_complete:
            self._young.was_read(directory)
        if after < 2 and not self._emit_dots(number, after, emit):
            return
        after = max(after, 2)
        failed_at, attempts = -1, 0
        while True:
            complete, after = self._emit_rows(
                number, after, emit, compared=failed_at + 1, compared_is_bare=attempts >= MAX_ATTEMPTS
            )
            if complete:
                return
            # The entry behind position `after` must be compared with the source first. Several attempts, because a
            # FORGET may drop the record that was just made. If it always does, the name is listed without attributes.
            attempts = attempts + 1 if after == failed_at else 1
            failed_at = after
            await self._comparisons.make(number, owner)
            await self._fs.let_list(number, caller, arrival_s)

    async def entries(self, number: int) -> list[int]:
        """The inodes of a directory in the order of its listing, which is made if it is not valid, or has a name that
        must be compared.

        For background work: making it yields to requests, until a request wants the same listing.
        """
        if self._comparisons.is_valid(await self._fs.revalidated(number)):
            found, doubtful = await self._known_entries(number)
            if doubtful <= self.without_attributes(number).keys():
                return found
        await self._comparisons.make_politely(number)
        await self._comparisons.ask_bare(number)
        return (await self._known_entries(number))[0]

    async def _known_entries(self, number: int) -> tuple[list[int], set[bytes]]:
        """The inodes of the listing as it is recorded, and the listed names that lead to none."""
        found: list[int] = []
        doubtful: set[bytes] = set()
        after = 0
        while True:
            with self._metadata.index.view() as view:
                rows = list(itertools.islice(self._listings.rows(view, number, after), CHUNK_NAMES))
                for position, name in rows:
                    dentry = self._metadata.dentry(view, number, name)
                    if dentry is None or not dentry.inode:
                        doubtful.add(name)
                    elif is_listed_at(dentry, position):
                        found.append(dentry.inode)
            if not rows:
                return found, doubtful
            after = rows[-1][0]
            await trio.lowlevel.checkpoint()

    def without_attributes(self, number: int) -> dict[bytes, OSError]:
        """The names of a directory that the source did not answer for, and why."""
        return self._comparisons.bare(number)

    async def revalidated_entries(self, number: int) -> list[int]:
        """The same. Inodes that are not valid are compared with the source."""
        found = await self.entries(number)
        for start in range(0, len(found), CHUNK_NAMES):
            with self._metadata.index.view() as view:
                records = [self._metadata.inode(view, inode) for inode in found[start : start + CHUNK_NAMES]]
            if any(r is None or (self._metadata.is_pinned(r) and not self._metadata.remaining_ns(r)) for r in records):
                await self._comparisons.make(number)
                return await self.entries(number)
            await trio.lowlevel.checkpoint()
        return found

    def _emit_dots(self, number: int, after: int, emit: Emit) -> bool:
        with self._metadata.index.view() as view:
            links = links_of(view, number) if number != ROOT_INODE else []
        parent = links[0][0] if links else ROOT_INODE
        for position, name, shown in ((1, b".", number), (2, b"..", parent)):
            if position > after and not emit(name, self._fs.inode(shown), 0.0, position):
                return False
        return True

    def _emit_rows(
        self, number: int, after: int, emit: Emit, *, compared: int, compared_is_bare: bool
    ) -> tuple[bool, int]:
        """(True, _) at the end or if the reply is full; (False, p) if the entry at position p + 1 must be compared.

        `compared`: the position of an entry that was just compared. If it exists, it is emitted without a check, and
        if `compared_is_bare`, without a record.
        """
        complete = True
        counted: list[int] = []
        expires_at_once = bool(self._fs.closed_lately(number, b".", self._fs.source.clock.monotonic_s()))
        with self._metadata.index.view() as view:
            directory = self._metadata.inode(view, number)
            bare = self._comparisons.bare(number)
            bare_position = compared if compared_is_bare else 0
            for position, name in self._listings.rows(view, number, after):
                dentry = self._metadata.dentry(view, number, name)
                inode = self._metadata.inode(view, dentry.inode) if dentry is not None and dentry.inode else None
                if (name in bare or position == bare_position) and not self._is_valid(directory, dentry, inode):
                    shown: tuple[Inode | None, float] | None = None, 0.0
                elif directory is None or dentry is None or inode is None:
                    complete, after = False, position - 1
                    break
                else:
                    shown = self._shown(view, name, directory, dentry, inode, is_compared=position == compared)
                if not is_listed_at(dentry, position):
                    after = position
                    continue
                if shown is None:
                    complete, after = False, position - 1
                    break
                if not emit(name, shown[0], 0.0 if expires_at_once else shown[1], position):
                    break
                after = position
                if shown[0] is not None and not self._metadata.is_pinned(shown[0]):
                    counted.append(shown[0].number)
        if counted:
            with self._metadata.index.update() as update:
                for listed in counted:
                    inode = self._metadata.inode(update, listed)
                    if inode is not None:
                        self._metadata.put_inode(update, inode._replace(lookups=inode.lookups + 1))
        return complete, after

    def _shown(
        self, view: View, name: bytes, directory: Inode, dentry: Dentry, inode: Inode, *, is_compared: bool
    ) -> tuple[Inode | None, float] | None:
        """What a listing shows of an entry: (inode, or None for the name alone; timeout). None: compare it first."""
        timeout_s = self._fs.timeout_s(inode)
        if not self._metadata.is_pinned(inode):
            if self._fs.immutability.is_changing(inode):
                return None, 0.0
            return inode, min(timeout_s, self._metadata.name_remaining_s(view, inode.number, (directory.number, name)))
        mutable_name = self._metadata.mutable_names.matches(view, directory.number, name)
        if not is_compared and not (timeout_s and (mutable_name or self._metadata.entry_holds(directory, dentry))):
            return None
        return inode, self._fs.mutable_name_timeout_s(inode) if mutable_name else timeout_s

    def _is_valid(self, directory: Inode | None, dentry: Dentry | None, inode: Inode | None) -> bool:
        """Does an entry need no comparison with the source?"""
        if directory is None or dentry is None or inode is None or not self._metadata.remaining_ns(inode):
            return False
        return not self._metadata.is_pinned(inode) or self._metadata.entry_holds(directory, dentry)
