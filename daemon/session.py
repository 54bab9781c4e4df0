"""One mount from start to end: what it needs is opened in order, and closed in the opposite order.

(the caller daemonizes) → claim the mountpoint → take over a mount, or check places and open the source → lock the
cache, open blob and index → mount → bind the source → serve, release the mountpoint → unmounted, or told to stop →
flush → mark the index clean → remove the runtime directory

Signals are received from the first step on. Until requests are served SIGTERM cancels: all steps are undone. So nothing
here waits for the source, except in a thread that can be abandoned.
"""

import logging
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import trio

import cachefs
from cachefs.client import locations
from cachefs.contract.shared import SETTLE_NS
from cachefs.errors import CacheFsError, IndexDamaged, IndexUnavailable
from cachefs.source.source import Source
from cachefs.store import durable_index
from cachefs.store.blob.blob import Blob
from cachefs.store.cache_directory import CacheDirectory, OpenedIndex
from cachefs.store.filesystem import has_change_times
from cachefs.system import children
from daemon.config.config import MountConfig
from daemon.kernel import mounts
from daemon.kernel.source_connection import Root
from daemon.mount.fresh import FreshMount
from daemon.mount.mount import ClaimedMountpoint, Mount, ask_source
from daemon.mount.takeover import Dismiss, TakenOverMount, config_of_service
from daemon.service import memory, process
from daemon.serving import Serving
from daemon.signals import SIGNALS, Lifecycle, Reread
from daemon.wiring import Components

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Session:
    config: MountConfig
    reread: Reread
    dismiss: Dismiss | None = None
    """Makes the daemon of the existing mount leave, which is then taken over with a new fast path. None: take over with
    the running fast path, or mount if there is none."""
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    _is_new: bool = field(default=False, init=False)
    """No mount is taken over."""
    _warnings: list[str] = field(default_factory=list, init=False)
    """About this process."""

    def serve(self, ready: Callable[[], None], claimed: Callable[[Path], None]) -> None:
        """Mount and serve until unmounted. Raises CacheFsError with the reason if that fails before it is ready.

        `claimed` is called with the cache directory when that is locked, `ready` when requests are being answered.
        """
        mounts.check_fuse()
        locations.make_runtime_root()
        os.umask(0)  # credentials.py applies the caller's
        self._warnings = process.prepare()
        children.keep_numbers()
        if not self.config.foreground:  # the user sees it; the log gets it when it is open
            for warning in self._warnings:
                log.warning("%s", warning)
        try:
            trio.run(self._until_told, ready, claimed)
        except IndexDamaged as error:
            if self.lifecycle.is_ready or not self._is_new:
                raise CacheFsError(str(error)) from error
            log.warning("%s; starting again, and rebuilding it", error)
            self.lifecycle = Lifecycle()
            trio.run(self._until_told, ready, claimed)

    async def _until_told(self, ready: Callable[[], None], claimed: Callable[[Path], None]) -> None:
        lifecycle = self.lifecycle
        try:
            with trio.open_signal_receiver(*SIGNALS) as signals, lifecycle.starting:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(lifecycle.obey, signals)
                    await self._serve(ready, claimed)
                    nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise reason(group) from group
        if not lifecycle.is_ready and not (lifecycle.told_to_end and self.config.foreground):
            what = "the daemon was told to end" if lifecycle.told_to_end else f"{self.config.mountpoint} was unmounted"
            raise CacheFsError(f"{what} before the mount was ready")

    async def _serve(self, ready: Callable[[], None], claimed: Callable[[Path], None]) -> None:
        async with ClaimedMountpoint(self.config.mountpoint) as place:

            def is_ready() -> None:
                self.lifecycle.is_ready = True
                place.release()
                ready()

            self.config = config_of_service(self.config)
            mount: Mount | None = await TakenOverMount.prepare(self.config, place, self.dismiss)
            if mount is None:
                mount = await FreshMount.prepare(self.config, place)
            self._is_new = mount.is_new
            with ExitStack() as stack:
                stack.callback(mount.close)
                directory = CacheDirectory(
                    self.config.cache_place, self.config.source, mount.filesystem, same_mount=not mount.is_new
                )
                stack.enter_context(closing(directory))
                claimed(self.config.cache_place)
                self._log_start(mount)
                if directory.emptied_because:
                    log.warning("the cache %s starts empty: %s", directory.path, directory.emptied_because)
                blob = stack.enter_context(closing(directory.open_blob()))
                await self._open_and_serve(mount, directory, blob, is_ready)

    def _log_start(self, mount: Mount) -> None:
        given = ", ".join(f"{name}={value}" for name, value in self.config.given())
        places = f"{self.config.source} on {self.config.mountpoint}"
        log.info("cachefs %s: %s; options: %s", cachefs.__version__, places, given or "none")
        for warning in self._warnings:
            log.warning("%s", warning)
        if self.config.options.settle_ns < SETTLE_NS:
            log.warning("--minimum-age is for tests: a file that is read while it is written may be cached wrongly")
        if mount.is_new and not has_change_times(mount.fstype):
            log.warning(
                "files of the source (%s) may have no change times of their own: each mount reads those again whose "
                "ctime is not later than their mtime",
                mount.fstype or "detached",
            )
        if not mount.is_new:
            log.info("taking over the mount on %s", self.config.mountpoint)
            if short := memory.shortage():  # jobs use it: to try is better than to leave it without a daemon
                log.warning("%s", short)

    async def _open_and_serve(
        self, mount: Mount, directory: CacheDirectory, blob: Blob, ready: Callable[[], None]
    ) -> None:
        """Open index and source, mount, and serve until that ends."""
        size, snapshot = self.config.cache_size_bytes, self.config.metadata_snapshot
        patterns = self.config.options.mutable_patterns
        if snapshot is not None and mount.is_new:
            root = await ask_source(self.config, Root.of, mount.source_fd)
            directory.import_snapshot(snapshot, blob, (root.inode, root.birth_ns), patterns)
        durable = directory.open_durable(blob)
        default_size = directory.default_size_bytes
        options = replace(self.config.options, cache_size_bytes=default_size() if size is None else size)
        if mount.is_new:
            durable_index.begin_blob_again(durable, blob, options.cache_size_bytes)
        latency_s = options.simulate_latency_s
        make = partial(
            Source,
            mount.source_fd,
            root_device=mount.root_device,
            fstype=mount.fstype,
            simulate_latency_s=latency_s,
        )
        source = await ask_source(self.config, make)
        opened = OpenedIndex(
            durable,
            locations.session_directory(self.config.cache_place),
            options.revalidate,
            await mount.rctime_to_record(),
            mutable=patterns,
            same_mount=not mount.is_new,
        )
        flushed = written = False
        try:
            try:
                mount.open(source, opened, blob, options)
                shared = None if mount.descriptors is None else mount.descriptors.shared
                async with trio.open_nursery() as nursery:
                    components = Components(
                        source, opened, blob, options, nursery, mount.device, shared, statfs=mount.statfs
                    )
                    components.filesystem.late_changes.follow(directory.predecessors, nursery)
                    serving = Serving(
                        self.config, self.reread, self.lifecycle, mount, components, nursery, default_size
                    )
                    written = await serving.run(ready)
                    nursery.cancel_scope.cancel()
            finally:
                if self.lifecycle.ends(mount):
                    mount.take_down()
            flushed = written
        finally:
            # A new mount that ends before it serves has neither read nor written: this run leaves no traces.
            opened.close(flushed=flushed or (mount.is_new and not self.lifecycle.is_serving))


def reason(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error to report, out of the nested groups that nurseries raise."""
    error: BaseException = group.subgroup(CacheFsError) or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, IndexUnavailable) and not isinstance(error, IndexDamaged):
        return CacheFsError(str(error))
    if isinstance(error, OSError) and error.strerror:
        return CacheFsError(f"{error.strerror}: {error.filename}" if error.filename else error.strerror)
    return error
