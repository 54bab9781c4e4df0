"""A mount that this daemon takes over: its last daemon has ended, or leaves for this one.

The fast path holds the descriptors of a mount, and sends them when it is asked; so does the descriptor store of a
service manager. A fast path that does not answer, because it was stopped, never stays beside a new one: both would
serve the same requests from the same memory. Without a descriptor store its descriptors are copied; it is ended when
another one is started (`FastPath.run`).

A restart copies the fast path's descriptors before the daemon leaves (`kept_by_fastpath`). From then on a successor has
all that it needs, whatever is mounted above the mount, and whichever process is killed. A successor that fails leaves a
living mount to the next one.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from cachefs.client import mount_table
from cachefs.client.client import is_served
from cachefs.client.hand_over import Handed
from cachefs.contract.index import ROOT_INODE
from cachefs.data.handle import Handle
from cachefs.errors import CacheFsError
from cachefs.fastpath.mount_descriptors import MountDescriptors, is_unmounted
from cachefs.fastpath.processes import memory_name, running
from cachefs.fastpath.shared_memory import OtherVersion, mount_flags
from cachefs.options import Options
from cachefs.source.source import Source
from cachefs.store.blob.blob import Blob
from cachefs.store.cache_directory import OpenedIndex
from daemon.config import config
from daemon.config.config import MountConfig
from daemon.kernel.instance import FASTPATH_SOCKET, MountInstance
from daemon.kernel.probe import has_died
from daemon.kernel.source_connection import Root
from daemon.mount.mount import ClaimedMountpoint, Mount, abandonable, follow_index, memory_name_of, wake_fastpath
from daemon.service import descriptor_store
from daemon.wiring import Components

log = logging.getLogger(__name__)

Dismiss = Callable[[MountInstance], Handed | None]
"""Makes the daemon of a mount leave, and returns its open source files. None: there is no daemon."""


class TakenOverMount(Mount):
    is_new = False

    def __init__(
        self,
        mount_config: MountConfig,
        place: ClaimedMountpoint,
        instance: MountInstance,
        descriptors: MountDescriptors,
        handed: Handed | None,
    ) -> None:
        """`handed`: from a daemon that left. None: it had died, and the fast path has data that only it knows."""
        super().__init__(mount_config, place, descriptors.source)
        self.root_device = descriptors.shared["root_device"]
        self.fstype = mount_table.fstype_of(descriptors.source)
        self.device = descriptors.device
        self.descriptors = self._adopted = descriptors
        self.replaces_fastpath = handed is not None
        self._handed = handed or Handed()
        self._instance = instance
        instance.take_over()

    @classmethod
    async def prepare(
        cls, mount_config: MountConfig, place: ClaimedMountpoint, dismiss: Dismiss | None
    ) -> "TakenOverMount | None":
        """None: there is no mount to take over. Asks nothing of the source, which may be lost or hang.

        `dismiss`: this is a restart; if the daemon lives, with a new fast path. Raises CacheFsError if there is no
        mount to restart.
        """
        kept = handed = None
        instance = MountInstance.on_top(place.path)
        if dismiss is not None and instance is not None:
            # While the daemon leaves, another filesystem may be mounted above, and the fast path be killed.
            kept = kept_by_fastpath(instance)
            handed = await abandonable(dismiss, instance)
        if instance is not None:
            descriptors = take_over(mount_config, instance, kept)
            if descriptors is not None:
                return cls(mount_config, place, instance, descriptors, handed)
        if dismiss is None:
            return None
        has_ended = instance is None or instance.is_abandoned() or await abandonable(has_died, place.path)
        if instance is None or has_ended or not instance.is_mounted():
            if instance is not None:
                instance.unmount(place.claim)
                wake_fastpath(instance)
            raise CacheFsError(f"{place.path} was unmounted, or its connection aborted: mount it again")
        raise CacheFsError(f"the fast path of {place.path} is dead: run cachefs umount {place.path}, then mount again")

    async def rctime_to_record(self) -> bytes:
        return b""

    def open(self, source: Source, opened: OpenedIndex, blob: Blob, options: Options) -> None:
        if self._adopted.blob >= 0:
            os.close(self._adopted.blob)
        self._adopted.blob = blob.fd
        root = Root.load(opened.index)
        self._adopted.shared.set_source(self.fstype, root.inode if root is not None else 0)
        follow_index(self._adopted.shared, opened)

    def source_root(self, components: Components) -> Root:
        index = components.opened.index
        root = Root.load(index)
        if root is None:  # the predecessor was an older version
            with index.view() as view:
                inode = components.metadata.inode(view, ROOT_INODE)
            root = Root(inode.source_inode if inode is not None else 0, 0, "")
        return root

    def restore(self, components: Components) -> None:
        components.descriptors.restore()
        components.young.restore()
        components.notifier.restore(components.opened.index)

    def adopt_open_files(self, components: Components) -> list[Handle]:
        received = self._handed.receive()
        if received.broke_off:
            done = len(received.opened)
            log.warning("the hand-over of open files broke off after %d files; the others are opened by path", done)
        return components.descriptors.adopt(received.opened)

    def ends_with_daemon(self) -> bool:
        return self.is_unmounted() or not self.instance.is_mounted()  # the next daemon does not find a detached mount


def config_of_service(mount_config: MountConfig) -> MountConfig:
    """The configuration by which a service goes on with its mount.

    The file may have changed options that need a new mount. To refuse them would leave the jobs without a daemon, so
    the mount keeps the options that it has until it is unmounted.
    """
    instance = MountInstance.on_top(mount_config.mountpoint) if descriptor_store.is_filled() else None
    if instance is None or is_served(instance.mountpoint, instance.directory):
        return mount_config
    try:
        running = config.load(instance.directory / config.CONFIG_NAME)
    except CacheFsError:  # of another version: `take_over` decides
        return mount_config
    if _needs_of_mount(running) == _needs_of_mount(mount_config):
        return mount_config
    keys = running.settings.keys() & mount_config.settings.keys()
    changed = sorted(key for key in keys if running.settings[key].value != mount_config.settings[key].value)
    log.error(
        "%s keeps the options that it was mounted with. To apply the change of %s, stop the service and start it again",
        instance.mountpoint,
        ", ".join(changed),
    )
    return replace(running, foreground=mount_config.foreground, log_level=mount_config.log_level)


def _needs_of_mount(mount_config: MountConfig) -> tuple[object, ...]:
    """What stays the same as long as a mount lives."""
    options = mount_config.options
    return (
        mount_config.source, mount_config.cache_place, options.fastpath, mount_flags(options), options.settle_ns,
        *_flags_in_kernel(mount_config),
    )  # fmt: skip


def _flags_in_kernel(mount_config: MountConfig) -> tuple[bool, bool]:
    return mount_config.noexec, mount_config.nosymfollow


def _has_other_flags(mount_config: MountConfig, instance: MountInstance) -> bool:
    with suppress(CacheFsError):  # of another version
        running = config.load(instance.directory / config.CONFIG_NAME)
        return _flags_in_kernel(running) != _flags_in_kernel(mount_config)
    return False


def kept_by_fastpath(instance: MountInstance) -> MountDescriptors | None:
    """Copies of the fast path's descriptors, taken while the mount has a daemon, for a successor that finds neither.

    None: there is no fast path, or ptrace(2) is not permitted.
    """
    for fastpath in running(memory_name_of(instance)):
        with suppress(OSError, OtherVersion):
            return fastpath.inherit()
    return None


def take_over(
    mount_config: MountConfig, instance: MountInstance, kept: MountDescriptors | None = None
) -> MountDescriptors | None:
    """The descriptors of a mount whose mountpoint is claimed. None: it has a daemon, or is dead.

    `kept`: from a fast path that may have died since. Raises CacheFsError if the mount lives, but cannot be taken over.
    """
    place = instance.mountpoint
    if not mount_config.options.fastpath or is_served(place, instance.directory):
        return None
    try:
        descriptors = _find(instance) or kept
    except OtherVersion:
        raise CacheFsError(
            f"the fast path of {place} is another version, whose shared memory has another layout: unmount it, and "
            "mount it again"
        ) from None
    if kept is not None and descriptors is not kept:
        kept.close()
        os.close(kept.source)
        os.close(kept.blob)
    if descriptors is None or is_unmounted(descriptors.device):
        return None
    mounted = instance.mount()
    if mounted is None:
        return None
    if mounted.source != mount_config.source:
        raise CacheFsError(
            f"{place} is in use: {mounted.source} is mounted there by a cachefs whose daemon has died; run "
            f"cachefs umount {place}"
        )
    if not descriptors.shared.was_set_up_for(mount_config.options) or _has_other_flags(mount_config, instance):
        raise CacheFsError(
            f"{place} was mounted with other options, and its daemon has died: run cachefs restart {place} to keep "
            f"these options, or cachefs umount {place}"
        )
    return descriptors


def _find(instance: MountInstance) -> MountDescriptors | None:
    """Raises CacheFsError, OtherVersion."""
    name, place = memory_name_of(instance), instance.mountpoint
    stored = descriptor_store.take()
    if stored is not None and memory_name(f"/proc/self/fd/{stored.shared.fd}") != name:
        stored = None
    if stored is not None and not running(name):
        return stored  # the store has the listening socket, which accepts connections and never answers
    answer = MountDescriptors.ask(instance.directory / FASTPATH_SOCKET)
    if answer is not None or stored is not None:
        return answer or stored
    for fastpath in running(name):  # it does not answer
        try:
            return fastpath.inherit()
        except OSError as error:
            raise CacheFsError(
                f"the fast path of {place} (pid {fastpath.pid}) does not answer, and its descriptors cannot be copied "
                f"({error.strerror}): run kill -CONT {fastpath.pid}, or umount -l {place}"
            ) from None
    return None
