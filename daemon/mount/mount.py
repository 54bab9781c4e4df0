"""What a fresh mount and one that is taken over have in common, and the claim on the mountpoint.

A `Mount` is prepared, opened, served and taken down. What is refused is refused while it is prepared, before anything
has been changed. `open` puts it up, or adopts it. Where it is over at the end, `take_down` leaves nothing of it.
"""

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import trio

from cachefs.client.hand_over import Handed
from cachefs.errors import CacheFsError
from cachefs.fastpath.mount_descriptors import MountDescriptors, is_unmounted
from cachefs.fastpath.processes import running
from cachefs.fastpath.shared_memory import Shared
from cachefs.fs.descriptors import Handle
from cachefs.options import Options
from cachefs.source.source import Source
from cachefs.store.blob.blob import Blob
from cachefs.store.cache_directory import OpenedIndex
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
    """A mountpoint, on which only this process mounts or takes over a mount, until requests are answered."""

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
        raise CacheFsError(f"{self.path} is being mounted by another cachefs (pid {taken.pid})")

    async def __aexit__(self, *_: object) -> None:
        """Still claimed: it ended before it was ready. A mount that is gone, whenever that happened, leaves nothing."""
        if self.claim is not None:
            with suppress(OSError, CacheFsError):  # then the next one does it
                remove_remains(self.path)
        self.release()

    def release(self) -> None:
        if self.claim is not None:
            self.claim.release()
            self.claim = None


class Mount(ABC):
    is_new: ClassVar[bool]
    """It has no users yet, so that it ends when something fails at the start."""
    handed = Handed()
    """What its last daemon had open at the source."""
    replaces_fastpath = False
    """The fast path that runs is to be replaced by the one that is installed."""
    root_device: int | None = None
    """st_dev of the source's root. None: the source is to be asked."""
    statfs: os.statvfs_result | None = None
    """Of the source, when it was opened."""

    def __init__(self, mount_config: MountConfig, place: ClaimedMountpoint, source_fd: int) -> None:
        # dependencies
        self._config = mount_config
        self._place = place
        self.source_fd = source_fd
        # state
        self.device = -1
        """/dev/fuse, once it is open."""
        self.descriptors: MountDescriptors | None = None
        """What outlives the daemon. None before it is open, and without a fast path."""
        self._instance: MountInstance | None = None
        """What is mounted. None: nothing yet."""

    @property
    def instance(self) -> MountInstance:
        assert self._instance is not None, "it is not open"
        return self._instance

    @abstractmethod
    async def rctime_to_record(self, options: Options) -> bytes:
        """When the source was changed last, as the next mount is to know it; empty where that is not recorded."""

    @abstractmethod
    def open(self, source: Source, opened: OpenedIndex, blob: Blob, options: Options) -> None:
        """Put it up, or adopt it: from here on there are `device`, `instance` and `descriptors`."""

    @abstractmethod
    def source_root(self, components: Components) -> Root:
        """What the source's root was when it was mounted."""

    @abstractmethod
    def restore(self, components: Components) -> list[Handle]:
        """Bring the index, and what was under way, to where the last daemon left them. Returns what is to be reopened;
        nothing is asked of the source here."""

    @abstractmethod
    def ends_with_daemon(self) -> bool:
        """Does it end when this daemon fails?"""

    def is_unmounted(self) -> bool:
        """Has the kernel closed its connection?"""
        return is_unmounted(self.device)

    def unmount(self) -> None:
        self.instance.unmount(self._place.claim)

    def take_down(self) -> None:
        """It is over: unmount it, and remove what belongs to it. It may not have been opened, or only in part."""
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

    def let_go(self) -> None:
        """Of its runtime directory, which another process may have to remove."""
        if self._instance is not None:
            self._instance.let_go()


def memory_name_of(instance: MountInstance) -> str:
    """What the memory is called that its processes share."""
    return f"cachefs-{instance.directory.name}"


def wake_fastpath(instance: MountInstance) -> None:
    """One that was stopped hears of the end of its mount when it goes on."""
    for fastpath in running(memory_name_of(instance)):
        with suppress(OSError):
            os.kill(fastpath.pid, signal.SIGCONT)


def follow_index(shared: Shared, opened: OpenedIndex) -> None:
    """Tell the fast path which records count; and, from now on, whether all of them are where it can see them."""

    def serve(overflows: bool) -> None:
        shared["serving"] = not overflows

    shared["strict_floor"] = opened.strict_floor
    shared["run"], shared["floor"] = opened.state.run, opened.state.floor
    overflow = opened.index.session.overflow
    overflow.on_change.add(serve)
    serve(bool(overflow))


async def abandonable(function: Callable[..., T], *arguments: Any) -> T:
    """Call, in a thread, what may hang as long as the source does. It is left behind when the start is cancelled."""
    return await trio.to_thread.run_sync(partial(function, *arguments), abandon_on_cancel=True)


async def ask_source(mount_config: MountConfig, function: Callable[..., T], *arguments: Any) -> T:
    """Raises CacheFsError where it takes too long."""
    with trio.move_on_after(mount_config.options.source_timeout_s):
        return await abandonable(function, *arguments)
    raise CacheFsError(f"the source {mount_config.source} does not answer")
