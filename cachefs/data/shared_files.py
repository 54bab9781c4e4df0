"""Immutable files that are open: all handles of one version share an `OpenFile`, which the last one closes.

The fast path answers opens, so that a file may be open without a handle of ours. If such a file loses its name, it is
*held*: it stays open here until the kernel forgets the inode (hazard 2).
"""

from collections.abc import Iterable, Iterator
from functools import partial

from cachefs.data.fetcher import OpenFile, close_quietly
from cachefs.source.call_pool import CallPool
from cachefs.store.index.records import IMMUTABLE, WRITTEN, Inode


class SharedFiles:
    def __init__(self, call_pool: CallPool) -> None:
        # dependencies
        self._call_pool = call_pool
        # state
        self._files: dict[tuple[int, int], OpenFile] = {}
        self._held: dict[int, OpenFile] = {}

    def __iter__(self) -> Iterator[OpenFile]:
        return iter(list(self._files.values()))

    def get(self, number: int, version: int) -> OpenFile | None:
        return self._files.get((number, version))

    def of(self, number: int) -> list[OpenFile]:
        """All versions of an inode that are open."""
        return [file for (inode, _), file in self._files.items() if inode == number]

    def keeps_version(self, inode: Inode) -> bool:
        """Must everything that is shown by this inode number be of the recorded version? The kernel has pages of an
        immutable file by it, and processes have it open: also after it was dropped, or has lost its name."""
        if not inode.is_regular or inode.flags & WRITTEN:
            return False
        return bool(inode.flags & IMMUTABLE) or any(not file.is_mutable for file in self.of(inode.number))

    def share(self, inode: Inode) -> OpenFile:
        """Add a handle of an immutable file, which `let_go` removes."""
        file = self._files.get((inode.number, inode.version))
        if file is None:
            file = self._files[inode.number, inode.version] = OpenFile(inode)
        elif file.inode.is_young and not inode.is_young:
            file.inode = inode
        file.is_mutable = False
        file.handles += 1
        return file

    def make_mutable(self, number: int) -> None:
        """The inode is no longer immutable, or is about to be written to: its open handles read from the source."""
        for file in self.of(number):
            file.is_mutable = True

    async def let_go(self, file: OpenFile) -> None:
        file.handles -= 1
        if file.handles == 0:
            self._files.pop((file.inode.number, file.inode.version), None)
            fds, file.fd, file.stale = [fd for fd in (file.fd, *file.stale) if fd is not None], None, []
            if fds:
                await self._call_pool.run(partial(close_all, fds), once=True)

    def held(self, number: int) -> OpenFile | None:
        return self._held.get(number)

    def hold(self, inode: Inode) -> None:
        if inode.number not in self._held:
            self._held[inode.number] = self.share(inode)

    async def release(self, number: int) -> None:
        """The kernel has forgotten the inode."""
        if number in self._held:
            await self.let_go(self._held.pop(number))

    async def close(self) -> None:
        for number in list(self._held):
            await self.release(number)


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        close_quietly(fd)
