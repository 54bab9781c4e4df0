"""One mount from start to end: what it needs is opened in order, and closed in the opposite order.

(caller daemonizes) → claim the mountpoint → take over, or check places and open the source → lock the cache, open blob
and index → mount → bind the source → serve, release the mountpoint → unmounted, or told to stop → flush → mark the
index clean → remove what was put up

Signals are heard from the first step on. Until requests are served SIGTERM cancels: everything goes back the same way.
So nothing here waits for the source but in a thread that can be left behind.
"""

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio

import cachefs
from cachefs.client import locations
from cachefs.contract.shared import SETTLE_NS
from cachefs.errors import CacheFsError, IndexUnavailable
from cachefs.options import Options
from cachefs.source.source import Source
from cachefs.store.blob.blob import Blob
from cachefs.store.cache_directory import CacheDirectory, OpenedIndex
from daemon.config.config import MountConfig
from daemon.kernel import mounts
from daemon.mount.fresh import FreshMount
from daemon.mount.mount import ClaimedMountpoint, Mount, ask_source
from daemon.mount.takeover import Dismiss, TakenOverMount
from daemon.service import background, process
from daemon.serving import Serving
from daemon.signals import SIGNALS, Lifecycle, Reread
from daemon.wiring import wire

log = logging.getLogger(__name__)


class Session:
    """A mount."""

    def __init__(self, mount_config: MountConfig, *, reread: Reread, dismiss: Dismiss | None = None) -> None:
        """`dismiss`: take over the mount that there is, with a new fast path, after its daemon has been sent away by
        this. Else the fast path that runs is kept, and if none does it is mounted."""
        self.config = mount_config
        self._reread = reread
        self._dismiss = dismiss
        self._started = time.monotonic()
        self._lifecycle = Lifecycle()

    def serve(self, ready: Callable[[], None], claimed: Callable[[Path], None]) -> None:
        """Mount and serve until unmounted. Raises CacheFsError with the reason where that could not begin.

        `claimed` is called with the cache directory when that is locked, `ready` when requests are being answered.
        """
        mounts.check_fuse()
        locations.make_runtime_root()
        os.umask(0)  # credentials.py applies the caller's
        process.prepare()
        trio.run(self._until_told, ready, claimed)

    async def _until_told(self, ready: Callable[[], None], claimed: Callable[[Path], None]) -> None:
        lifecycle = self._lifecycle
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
            what = "it was told to end" if lifecycle.told_to_end else f"{self.config.mountpoint} was unmounted"
            raise CacheFsError(f"{what} before the mount was ready")

    async def _serve(self, ready: Callable[[], None], claimed: Callable[[Path], None]) -> None:
        async with ClaimedMountpoint(self.config.mountpoint) as place:

            def is_ready() -> None:
                self._lifecycle.is_ready = True
                place.release()
                ready()

            mount: Mount | None = await TakenOverMount.prepare(self.config, place, self._dismiss)
            if mount is None:
                mount = await FreshMount.prepare(self.config, place)
            try:
                directory = CacheDirectory(self.config.cache_place, self.config.source)
                claimed(self.config.cache_place)
                self._say(mount)
                try:
                    await self._opened(mount, directory, is_ready)
                finally:
                    directory.close()
            finally:
                mount.let_go()

    def _say(self, mount: Mount) -> None:
        log.info("cachefs %s: %s on %s", cachefs.__version__, self.config.source, self.config.mountpoint)
        if self.config.options.settle_ns < SETTLE_NS:
            log.warning("--minimum-age is for tests: what is read while it is written may be cached, and stay wrong")
        if not mount.is_new:
            log.info("taking over the mount on %s", self.config.mountpoint)
        if mount.handed.broke_off:
            done = len(mount.handed.opened)
            log.warning("the hand-over of open files broke off: %d have come, the others are opened by path", done)

    async def _opened(self, mount: Mount, directory: CacheDirectory, ready: Callable[[], None]) -> None:
        """Open blob, source and index, and serve."""
        cache_dir, size, snapshot = self.config.cache_place, self.config.cache_size_bytes, self.config.metadata_snapshot
        patterns = self.config.options.mutable.patterns
        with ExitStack() as stack:
            blob = directory.open_blob()
            stack.callback(blob.close)
            if snapshot is not None and mount.is_new:
                root_inode = (await ask_source(self.config, os.fstat, mount.source_fd)).st_ino
                directory.import_snapshot(snapshot, blob, root_inode, patterns)
            durable = directory.open_durable(blob)
            size = directory.default_size_bytes() if size is None else size
            options = replace(self.config.options, cache_size_bytes=size)
            latency_s = options.simulate_latency_s
            make = partial(Source, mount.source_fd, root_device=mount.root_device, simulate_latency_s=latency_s)
            source = await ask_source(self.config, make)
            opened = OpenedIndex(
                durable,
                locations.session_directory(cache_dir),
                options.revalidate,
                await mount.rctime_to_record(options),
                mutable=patterns,
                same_mount=not mount.is_new,
            )
            flushed = False
            try:
                flushed = await self._mounted(mount, directory, source, opened, blob, options, ready)
            finally:
                # It may have ended before anything could be read or written: nothing is left of this run.
                opened.close(flushed=flushed or (mount.is_new and not self._lifecycle.is_serving))

    async def _mounted(
        self,
        mount: Mount,
        directory: CacheDirectory,
        source: Source,
        opened: OpenedIndex,
        blob: Blob,
        options: Options,
        ready: Callable[[], None],
    ) -> bool:
        """True if everything was flushed at the end."""
        try:
            mount.open(source, opened, blob, options)
            shared = None if mount.descriptors is None else mount.descriptors.shared
            async with trio.open_nursery() as nursery:
                serving = Serving(
                    self.config,
                    self._reread,
                    self._lifecycle,
                    mount,
                    wire(source, opened, blob, options, nursery, mount.device, shared, statfs=mount.statfs),
                    nursery,
                    default_size=directory.default_size_bytes,
                    log_path=None if self.config.foreground else self.config.cache_place / background.LOG_NAME,
                    started=self._started,
                )
                flushed = await serving.run(ready)
                nursery.cancel_scope.cancel()
            return flushed
        finally:
            if self._lifecycle.ends(mount):
                mount.take_down()


def reason(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that the user must hear about, out of the groups that nurseries make of everything."""
    error: BaseException = group.subgroup(CacheFsError) or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, IndexUnavailable):
        return CacheFsError(str(error))
    if isinstance(error, OSError) and error.strerror:
        return CacheFsError(f"{error.strerror}: {error.filename}" if error.filename else error.strerror)
    return error
