"""A mount that this daemon makes. It ends with this daemon, unless a successor takes it over.

Before it is mounted, dead cachefs mounts on the mountpoint are detached, places are checked, and the source is opened,
because the mount may cover it. A source that hangs delays the start no longer than `--source-timeout`.
"""

import logging
import os
import time
from contextlib import suppress
from functools import partial

from cachefs.client import mount_table
from cachefs.errors import CacheFsError
from cachefs.fastpath.connection import listen
from cachefs.fastpath.mount_descriptors import MountDescriptors
from cachefs.fastpath.shared_memory import Shared
from cachefs.options import Options, Revalidate
from cachefs.source import rctime
from cachefs.source.source import Source
from cachefs.source.volumes import way_into_snapshot
from cachefs.store.blob.blob import Blob
from cachefs.store.cache_directory import OpenedIndex
from cachefs.store.filesystem import identify, is_in_snapshot
from cachefs.system import syscalls
from daemon.config.config import MountConfig
from daemon.kernel import fuse_device, mounts
from daemon.kernel.instance import FASTPATH_SOCKET, MountInstance, detach_dead
from daemon.kernel.source_connection import Root
from daemon.mount.mount import ClaimedMountpoint, Mount, abandonable, ask_source, follow_index, memory_name_of
from daemon.service import descriptor_store, memory
from daemon.wiring import Components

log = logging.getLogger(__name__)

SERVING_THREADS = 16
"""How many requests the fast path answers at once, including those that wait for the local disk."""


class FreshMount(Mount):
    is_new = True

    def __init__(self, mount_config: MountConfig, place: ClaimedMountpoint, source_fd: int, root: Root) -> None:
        super().__init__(mount_config, place, source_fd)
        self._root = root
        self.allow_other = mount_config.allow_other

    @classmethod
    async def prepare(cls, mount_config: MountConfig, place: ClaimedMountpoint) -> "FreshMount":
        """Raises CacheFsError, OSError if it cannot be mounted."""
        if short := memory.shortage():
            raise CacheFsError(short)
        source, timeout_s = mount_config.source, mount_config.options.source_timeout_s
        await abandonable(detach_dead, place.path, MountInstance.is_abandoned, place.claim)
        await abandonable(mounts.make_room, source, place.path)
        await abandonable(
            partial(mounts.check_places, source, place.path, mount_config.own_places, timeout_s=timeout_s)
        )
        if warning := await abandonable(mounts.size_warning, mount_config.cache_place, mount_config.cache_size_bytes):
            log.warning("%s", warning)
        source_fd = await ask_source(mount_config, mounts.open_source, source)
        await abandonable(partial(mounts.make_mountpoint, place.path, timeout_s=timeout_s))
        mount = cls(mount_config, place, source_fd, await ask_source(mount_config, Root.of, source_fd))
        mount.filesystem = await ask_source(mount_config, identify, source_fd)
        mount.fstype = mount.filesystem.fstype
        if is_in_snapshot(mount.fstype, mount._root.inode):
            await _check_way(mount_config, place, source_fd)
        at = await abandonable(mount_table.mount_of, source_fd)
        if mount_config.allow_other and at is not None and at.is_private:
            log.warning("%s was mounted without allow_other: other users may not enter this mount either", source)
            mount.allow_other = False
        with suppress(OSError):  # a source may not have it
            mount.statfs = await ask_source(mount_config, syscalls.statvfs, source_fd)
        return mount

    async def rctime_to_record(self) -> bytes:
        """Recorded with any `--revalidate`, because the next mount may have another."""
        return await ask_source(self._config, _rctime_to_record, self.source_fd, self._config.options)

    def open(self, source: Source, opened: OpenedIndex, blob: Blob, options: Options) -> None:
        place = self._place.path
        self.device = fuse_device.mount(
            self._config.source,
            place,
            read_only=options.read_only,
            allow_other=self.allow_other,
            more_flags=[each for each in fuse_device.MORE_FLAGS if getattr(self._config, each)],
        )
        self._instance = MountInstance.on_top(place)
        if self._instance is None:
            raise CacheFsError(f"{place} was unmounted before the mount was ready")
        self._instance.begin(self.source_fd)
        if options.fastpath:
            shared = Shared.create(memory_name_of(self._instance))
            shared.configure(options, seed=blob.seed, root_device=source.root_device, threads=SERVING_THREADS)
            shared.set_source(self.fstype, self._root.inode)
            follow_index(shared, opened)
            listener = listen(self._instance.directory / FASTPATH_SOCKET)
            self.descriptors = MountDescriptors(self.device, shared, self.source_fd, blob.fd, listener)
            descriptor_store.put(self.descriptors)

    def source_root(self, components: Components) -> Root:
        return self._root

    def restore(self, components: Components) -> None:
        with components.opened.index.update() as update:
            components.metadata.drop_unlinked(update)

    def ends_with_daemon(self) -> bool:
        return True


async def _check_way(mount_config: MountConfig, place: ClaimedMountpoint, source_fd: int) -> None:
    """The source lies in a snapshot: can the mount see that it is removed? Raises CacheFsError if it never can."""
    source = mount_config.source
    if source == place.path:
        raise CacheFsError(
            f"{source} is in a snapshot, whose removal a mount that covers it cannot see: mount elsewhere"
        )
    if not await ask_source(mount_config, way_into_snapshot, source_fd):
        log.warning(
            "%s is a bind mount of a snapshot: if the snapshot is removed while it is mounted here, files that are not "
            "cached read as zeros",
            source,
        )


def _rctime_to_record(source_fd: int, options: Options) -> bytes:
    try:
        value = rctime.ask(partial(os.getxattr, f"/proc/self/fd/{source_fd}"))
    except OSError as error:
        log.warning("cannot read the rctime of the source (%s): each cached object is compared with it", error.strerror)
        return b""
    if not value and options.revalidate is Revalidate.RCTIME:
        log.warning("the source has no ceph.dir.rctime: using --revalidate lazy")
    return rctime.recordable(value, time.time(), options.rctime_grace_s)
