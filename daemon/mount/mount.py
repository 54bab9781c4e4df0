"""What fresh mounts and mounts that are taken over have in common, and the claim on the mountpoint.

A `Mount` is prepared, opened, served and taken down. Problems are detected while it is prepared, before anything has
changed. `open` mounts it, or adopts it. `take_down` removes everything that belongs to a mount that ends.
"""

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import trio

from cachefs.client import mount_table
from cachefs.data.handle import Handle
from cachefs.errors import CacheFsError
from cachefs.fastpath.mount_descriptors import MountDescriptors, is_unmounted
from cachefs.fastpath.processes import running
from cachefs.fastpath.shared_memory import Shared
from cachefs.options import Options
from cachefs.source.source import Source
from cachefs.store.blob.blob import Blob
from cachefs.store.cache_directory import OpenedIndex
from cachefs.store.filesystem import Filesystem
from cachefs.system.claims import Claim, Taken
from daemon.config.config import MountConfig
from daemon.kernel.instance import MountInstance, claim_mountpoint, remove_remains
from daemon.kernel.source_connection import Root
from daemon.service import descriptor_store
from daemon.wiring import Components

T = TypeVar("T")

CLAIM_PATIENCE_S = 10.0
CLAIM_POLL_S = 0.05


class ClaimedMountpoint:
    """A claimed mountpoint: until requests are answered, only this process mounts here, or takes over a mount."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.claim: Claim | None = None

    async def __aenter__(self) -> Self:
        with trio.move_on_after(CLAIM_PATIENCE_S) as patience:
            while True:
                try:
                    self.claim = claim_mountpoint(self.path)
                    return self
                except Taken as other:
                    taken = other
                await trio.sleep(CLAIM_POLL_S)
        assert patience.cancelled_caught
        raise CacheFsError(f"{self.path} is being mounted by another cachefs (pid {taken.pid}): try again later")

    async def __aexit__(self, *_: object) -> None:
        """If it is still claimed, the mount has ended before it was ready, and its runtime directory may be left."""
        if self.claim is not None:
            with suppress(OSError, CacheFsError):  # the next mount does it
                remove_remains(self.path)
        self.release()

    def release(self) -> None:
        if self.claim is not None:
            self.claim.release()
            self.claim = None


class Mount(ABC):
    is_new: ClassVar[bool]
    """No job uses it yet: it ends if the start fails."""
    replaces_fastpath = False
    """Replace the running fast path by the installed one."""
    root_device: int | None = None
    """st_dev of the source's root. None: ask the source."""
    fstype: str
    """Of the source, as in the mount table. Empty: not known."""
    filesystem: Filesystem | None = None
    """Of the source. None: it was identified before, and stays mounted."""
    statfs: os.statvfs_result | None = None
    """statvfs of the source, when it was opened."""

    def __init__(self, mount_config: MountConfig, place: ClaimedMountpoint, source_fd: int) -> None:
        # dependencies
        self._config = mount_config
        self._place = place
        self.source_fd = source_fd
        # state
        self.device = -1
        """/dev/fuse, once it is open."""
        self.descriptors: MountDescriptors | None = None
        """The descriptors that outlive the daemon. None before it is open, and without a fast path."""
        self._instance: MountInstance | None = None
        """The mount in the kernel. None before it is open."""

    @property
    def instance(self) -> MountInstance:
        assert self._instance is not None, "the mount is not open"
        return self._instance

    @abstractmethod
    async def rctime_to_record(self) -> bytes:
        """The time of the last change of the source, to be recorded for the next mount. Empty: record nothing."""

    @abstractmethod
    def open(self, source: Source, opened: OpenedIndex, blob: Blob, options: Options) -> None:
        """Mount it, or adopt it. Sets `device`, `instance` and `descriptors`."""

    @abstractmethod
    def source_root(self, components: Components) -> Root:
        """The root of the source at the time of the mount."""

    @abstractmethod
    def restore(self, components: Components) -> None:
        """Restore the state of the last daemon. Asks nothing of the source."""

    def adopt_open_files(self, components: Components) -> list[Handle]:
        """Receive the open source files of the last daemon, when all processes of this one run. Returns the handles to
        be reopened."""
        return []

    @abstractmethod
    def ends_with_daemon(self) -> bool:
        """Does it end if this daemon fails?"""

    def is_unmounted(self) -> bool:
        """Has the kernel closed its connection?"""
        return is_unmounted(self.device)

    def is_detached(self) -> bool:
        """Does it live without a mountpoint in this namespace, because something holds it (detached.py)?"""
        is_here = any(mount.device == self.instance.device for mount in mount_table.mounts())
        return not is_here and not self.is_unmounted()

    def unmount(self) -> None:
        self.instance.unmount(self._place.claim)

    def take_down(self) -> None:
        """Unmount it, and remove what belongs to it. It may not have been opened, or only in part."""
        if self._instance is not None:
            self.unmount()
            wake_fastpath(self._instance)
        if self.descriptors is not None:
            descriptor_store.remove()
            self.descriptors.close()
        elif self.device >= 0:
            os.close(self.device)
        if self._instance is not None:
            self._instance.remove()

    def close(self) -> None:
        """Unlock its runtime directory, which another process may have to remove."""
        if self._instance is not None:
            self._instance.close()


def memory_name_of(instance: MountInstance) -> str:
    """The name of the memory that the processes of a mount share."""
    return f"cachefs-{instance.directory.name}"


def wake_fastpath(instance: MountInstance) -> None:
    """Continue a fast path that was stopped, so that it notices the end of its mount."""
    for fastpath in running(memory_name_of(instance)):
        with suppress(OSError):
            os.kill(fastpath.pid, signal.SIGCONT)


def follow_index(shared: Shared, opened: OpenedIndex) -> None:
    """Share with the fast path which records are valid, and from now on, whether it can see all of them."""

    overflow, damage = opened.index.session.overflow, opened.index.durable.damage

    def serve(*_: bool) -> None:
        shared["serving"] = not (overflow or damage.is_found)

    shared["strict_floor"], shared["links_floor"] = opened.state.run, opened.links_floor
    shared["run"], shared["floor"] = opened.state.run, opened.state.floor
    overflow.on_change.add(serve)
    damage.on_found.add(serve)
    serve()


async def abandonable(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that may hang, in a thread. The thread is abandoned when the start is cancelled."""
    return await trio.to_thread.run_sync(partial(function, *arguments), abandon_on_cancel=True)


async def ask_source(mount_config: MountConfig, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that accesses the source. Raises CacheFsError if it takes too long."""
    with trio.move_on_after(mount_config.options.source_timeout_s):
        return await abandonable(function, *arguments)
    raise CacheFsError(f"the source {mount_config.source} does not answer")
