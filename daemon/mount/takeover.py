"""A mount that this daemon takes over: its last daemon has ended, or is sent away for this one.

What a mount is made of is held by its fast path, which hands it over when it is asked, and by the descriptor store of
a service manager. A fast path that does not answer, because it was stopped, is never left beside a new one: it would
serve the same requests from the same memory. If there is no descriptor store, what it holds is taken from it; it is
ended when another is started (`FastPath.run`).

A restart takes what the fast path holds before it sends the daemon away (`kept_by_fastpath`). From then on a successor
has all that it needs, whatever is mounted above the mount and whichever process is killed. A successor that fails
leaves a mount that lives to the next one.
"""

import os
from collections.abc import Callable
from contextlib import suppress

from cachefs.client.client import is_served
from cachefs.client.hand_over import Handed
from cachefs.errors import CacheFsError
from cachefs.fastpath.mount_descriptors import MountDescriptors, is_unmounted
from cachefs.fastpath.processes import Running, memory_name, running
from cachefs.fastpath.shared_memory import OtherVersion
from cachefs.fs.descriptors import Handle
from cachefs.options import Options
from cachefs.source.source import Source
from cachefs.store.blob.blob import Blob
from cachefs.store.cache_directory import OpenedIndex
from cachefs.store.index.records import ROOT_INODE
from daemon.config.config import MountConfig
from daemon.kernel.instance import FASTPATH_SOCKET, MountInstance
from daemon.kernel.probe import has_died
from daemon.kernel.source_connection import Root
from daemon.mount.mount import ClaimedMountpoint, Mount, abandonable, follow_index, memory_name_of, wake_fastpath
from daemon.service import descriptor_store
from daemon.wiring import Components

Dismiss = Callable[[MountInstance], Handed]
"""Sends the daemon of a mount away, and returns what it had open at the source."""


class TakenOverMount(Mount):
    is_new = False

    def __init__(
        self,
        mount_config: MountConfig,
        place: ClaimedMountpoint,
        instance: MountInstance,
        held: MountDescriptors,
        handed: Handed | None,
    ) -> None:
        """`handed`: by a daemon that was sent away. None: there was none."""
        super().__init__(mount_config, place, held.source)
        self.root_device = held.shared["root_device"]
        self.device = held.device
        self.descriptors = self._held = held
        self.replaces_fastpath = handed is not None
        self.handed = handed or Handed()
        self._instance = instance
        instance.take_over()

    @classmethod
    async def prepare(
        cls, mount_config: MountConfig, place: ClaimedMountpoint, dismiss: Dismiss | None
    ) -> "TakenOverMount | None":
        """None: there is nothing to take over. The source may have gone, or hang: nothing is asked of it.

        `dismiss`: this is a restart, with a new fast path. Raises CacheFsError where there is nothing to restart.
        """
        kept = handed = None
        instance = MountInstance.on_top(place.path)
        if dismiss is not None and instance is not None:
            # While the daemon leaves, another filesystem may be mounted above, and the fast path be killed.
            kept = kept_by_fastpath(instance)
            handed = await abandonable(dismiss, instance)
        if instance is not None:
            held = take_over(mount_config, instance, kept)
            if held is not None:
                return cls(mount_config, place, instance, held, handed)
        if dismiss is not None:
            has_ended = instance is None or instance.is_abandoned() or await abandonable(has_died, place.path)
            if instance is None or has_ended or not instance.is_mounted():
                if instance is not None:
                    instance.unmount(place.claim)
                    wake_fastpath(instance)
                raise CacheFsError(f"{place.path} was unmounted, or its connection aborted: mount it again")
            raise CacheFsError(f"the fast path of {place.path} is dead: umount it, and mount it again")
        return None

    async def rctime_to_record(self, options: Options) -> bytes:
        return b""

    def open(self, source: Source, opened: OpenedIndex, blob: Blob, options: Options) -> None:
        if self._held.blob >= 0:
            os.close(self._held.blob)
        self._held.blob = blob.fd
        follow_index(self._held.shared, opened)

    def source_root(self, components: Components) -> Root:
        index = components.opened.index
        root = Root.load(index)
        if root is None:  # a predecessor of an older version
            with index.view() as view:
                inode = components.metadata.inode(view, ROOT_INODE)
            root = Root(inode.source_inode if inode is not None else 0, 0, "")
        return root

    def restore(self, components: Components) -> list[Handle]:
        restored = components.descriptors.restore(self.handed.opened)
        components.young.restore()
        components.notifier.restore(components.opened.index)
        return restored

    def ends_with_daemon(self) -> bool:
        return self.is_unmounted() or not self.instance.is_mounted()  # detached: the next daemon does not find it


def kept_by_fastpath(instance: MountInstance) -> MountDescriptors | None:
    """What the fast path holds, taken from it while the mount has a daemon: for a successor that finds neither.

    None: there is no fast path, or it may not be asked so (ptrace(2)).
    """
    for fastpath in running(memory_name_of(instance)):
        with suppress(OSError, OtherVersion):
            return fastpath.inherit()
    return None


def take_over(
    mount_config: MountConfig, instance: MountInstance, kept: MountDescriptors | None = None
) -> MountDescriptors | None:
    """What the mount is made of. The mountpoint is claimed. None: it has a daemon, or has died altogether.

    `kept`: of a fast path that may have died since. Raises CacheFsError where it is alive, and not to be had.
    """
    place = instance.mountpoint
    if not mount_config.options.fastpath or is_served(place, instance.directory):
        return None
    try:
        held = _find(instance) or kept
        if kept is not None and held is not kept:
            _let_go(kept)
    except OtherVersion:
        raise CacheFsError(
            f"the fast path of {place} is of another version, which shares memory of another layout: "
            "umount it, and mount it again"
        ) from None
    if held is None or is_unmounted(held.device):
        return None
    mounted = instance.mount()
    if mounted is None:
        return None
    if mounted.source != mount_config.source:
        raise CacheFsError(f"{place} is in use: {mounted.source} is mounted there by a cachefs whose daemon has died")
    if not held.shared.was_set_up_for(mount_config.options):
        raise CacheFsError(f"{place} was mounted with other options: unmount it first")
    return held


def _let_go(kept: MountDescriptors) -> None:
    kept.close()
    os.close(kept.source)
    os.close(kept.blob)


def _find(instance: MountInstance) -> MountDescriptors | None:
    """Raises CacheFsError, OtherVersion."""
    name = memory_name_of(instance)
    held = descriptor_store.take()
    if held is not None and memory_name(f"/proc/self/fd/{held.shared.fd}") != name:
        held = None
    if held is not None and not running(name):
        return held  # the store has the listening socket, which takes connections and never answers
    answer = MountDescriptors.ask(instance.directory / FASTPATH_SOCKET)
    return answer or held or _taken_from(running(name), instance.mountpoint)


def _taken_from(silent: list[Running], place: str) -> MountDescriptors | None:
    for fastpath in silent:
        try:
            return fastpath.inherit()
        except OSError as error:
            raise CacheFsError(
                f"the fast path of {place} (pid {fastpath.pid}) does not answer, and what it holds cannot be had "
                f"({error.strerror}): kill -CONT {fastpath.pid}, or umount -l {place}"
            ) from None
    return None
