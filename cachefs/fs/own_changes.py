"""What a change by this mount does to the file that it concerns, while the file is open.

This mount's own change of a name moves the change time, as a change by another node would. Open files go on with the
new time, and fetches that see it wait until the change is through (`FileSystem.own_change`). A file that loses a name
stays readable by those who have it open: a descriptor of the source is opened before the name goes. What is left of an
inode whose name has gone is looked at by another name, or by a descriptor.
"""

from functools import partial

from cachefs.data.data_cache import DataCache
from cachefs.data.fetcher import Fetcher
from cachefs.data.shared_files import SharedFiles
from cachefs.fs.descriptors import Descriptors
from cachefs.fs.names import FileSystem
from cachefs.metadata import inode_values
from cachefs.source.identity import Changed
from cachefs.system.stat import Stat


class OwnChanges:
    def __init__(
        self,
        filesystem: FileSystem,
        descriptors: Descriptors,
        shared: SharedFiles,
        fetcher: Fetcher,
        data: DataCache,
        *,
        unseen_handles: bool = False,
    ) -> None:
        """`unseen_handles`: any file may be open without our knowing (hazard 2)."""
        # dependencies
        self._fs = filesystem
        self._metadata = filesystem.metadata
        self._source = filesystem.source
        self._descriptors = descriptors
        self._shared = shared
        self._fetcher = fetcher
        self._data = data
        # constants
        self._unseen_handles = unseen_handles

    async def hold_data(self, number: int) -> None:
        """Before a name is unlinked or replaced: an immutable file that may be open gets a descriptor of the source.

        By it what the cache does not have, or loses, is read until the kernel forgets the inode (hazard 2).
        """
        with self._metadata.index.view() as view:
            inode = self._metadata.inode(view, number)
            immutable = inode is not None and self._fs.immutability.is_immutable(inode)
            cached = inode is not None and self._data.holds_all(view, inode)
        if self._unseen_handles and inode is not None and immutable:
            self._shared.hold(inode)
        handles = self._descriptors.handles.values()
        await self._descriptors.reopen([h for h in handles if h.number == number and not h.is_cached and h.fd < 0])
        for file in self._shared.of(number):
            if not file.is_mutable:
                try:
                    file.drop_stale(self._source.generation)
                    await self._fetcher.open_source(file)
                    file.held = True
                except Changed:
                    pass  # and the entry was dropped
                except OSError:
                    if not cached:  # else the cache is enough, as long as it lasts
                        raise

    async def names_changed(self, *numbers: int) -> None:
        """This mount gave these inodes other names, and has stored what they look like now (mutable_names.py)."""
        for number in await self._fs.invalidation.follow_names(numbers):
            for file in self._shared.of(number):
                file.is_mutable = True

    def store(self, number: int, now: Stat, *, written: bool = False) -> None:
        """What an inode looks like after our own change; open files of it go on with that, if they are unchanged.

        `written`: the file stays mutable in this run.
        """
        with self._metadata.index.update() as update:
            before = self._metadata.inode(update, number)
            after, dropped = self._metadata.apply_own_change(update, number, now)
            if before is not None and before.permissions != now.permissions:
                inode_values.drop(update, number)  # a chmod changes the ACL as well
            if after is not None and written:
                self._metadata.put_inode(update, after.written())
        for parent, name in dropped:
            self._fs.notifier.entry_soon(parent, name)
        if after is None:
            return
        file = self._shared.get(number, after.version)
        if file is not None:
            file.inode = after

    async def compare(self, number: int) -> None:
        """A name of an inode has gone by our doing: look at what is left, by another name or by a descriptor."""
        with self._metadata.index.view() as view:
            link = self._metadata.paths.name(view, number)
            directory = self._metadata.paths.directory(view, link[0]) if link is not None else None
        if link is not None and directory is not None:
            try:
                self.store(number, await self._fs.call_pool.run(partial(self._source.lstat, directory, link[1])))
            except OSError:
                # our own change has been made, whatever became of the other name
                self._fs.invalidation.replaced(number)
            return
        async with self._descriptors.descriptor(number, True) as use:
            if use is not None:
                self.store(number, await use(self._source.fstat))
                return
        with self._metadata.index.update() as update:
            self._metadata.lost_name(update, number)
