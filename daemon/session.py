"""One mount from start to end: everything is wired here, in order, and taken down in the opposite order.

check places → open the source → (caller daemonizes) → lock the cache, open blob and index → bind the source →
mount → serve → unmounted, or told to stop → flush → mark the index clean → remove what was put up
"""

import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import pyfuse3
import trio
from rich.filesize import decimal

from cachefs import mount_table, places
from cachefs.blob import Blob
from cachefs.cache_directory import CacheDirectory, OpenedIndex
from cachefs.errors import CacheFsError
from cachefs.fastpath import launcher
from cachefs.fastpath.launcher import Inheritance
from cachefs.hints import Hints
from cachefs.operations import MAX_REQUESTS, Operations
from cachefs.options import Options, Revalidate
from cachefs.prefetcher import Prefetcher
from cachefs.source import Source
from cachefs.wishes import OwnWishes, Wishes
from daemon import (
    background,
    config,
    control,
    descriptor_store,
    fastpath_host,
    fuse_device,
    mounting,
    process,
    service_manager,
    settings,
)
from daemon.commands import Commands
from daemon.config import MountConfig
from daemon.fastpath_host import FastPathHost
from daemon.mount import mount
from daemon.probe import Probe
from daemon.source_connection import Root, SourceConnection
from daemon.wiring import Parts, wire
from policies import prefetch

log = logging.getLogger(__name__)

MIN_IDLE_REQUESTS = 16
READER_CHECK_S = 60.0
FLUSH_TIMEOUT_S = 60.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_PYFUSE3_OPTIONS = {"fsname=cachefs"}
"""It serves a descriptor (`/dev/fd/N`); what is mounted, and how, is no business of libfuse."""


class Session:
    """A mount. `prepare` before going to the background, `serve` after it."""

    def __init__(self, mount_config: MountConfig, *, restart: bool = False) -> None:
        """`restart`: take over the mount that there is, with a new fast path. Else the one that runs is kept."""
        self.config = mount_config
        self._restart = restart
        self._leaving = False
        self.started = time.monotonic()
        self._source_fd = -1
        self._source_device: int | None = None
        self._root: Root | None = None
        """What the source's root was when it was mounted. None: a predecessor has written it down."""
        self._device = -1
        self._responsible = False
        """For the mount's end. Who could not take over leaves everything to the next one who tries."""
        self._held: Inheritance | None = None
        """What the fast path and its daemons hand on. None before there is one, and without a fast path."""
        self._host: FastPathHost | None = None
        self._parts: Parts
        self._statfs: os.statvfs_result | None = None
        """Of the source, when it was opened. A source that hangs must not keep us from taking over."""
        self._log_path: Path | None
        """Of the fast path. None: our stderr."""

    @property
    def took_over(self) -> bool:
        """After `prepare`: is this a mount that there was?"""
        return self._source_device is not None

    def prepare(self) -> None:
        """Everything that can be refused without having changed anything."""
        mounting.check_fuse()
        places.make_runtime_root()
        self._held = fastpath_host.take_over(self.config)
        if self._held is not None:
            self._source_fd = self._held.source
            self._source_device = self._held.shared["root_device"]
            return  # the source may have gone, or hang: nothing is asked of it on the way
        if self._restart:
            raise CacheFsError(f"the fast path of {self.config.mountpoint} is dead: umount it, and mount it again")
        mounting.check_places(self.config.source, self.config.mountpoint)
        self._source_fd = mounting.open_source(self.config.source)
        self._root = Root.of(self._source_fd)
        with contextlib.suppress(OSError):  # a source may not know
            self._statfs = os.fstatvfs(self._source_fd)

    def serve(self, ready: Callable[[], None], claimed: Callable[[Path], None]) -> None:
        """Mount and serve until unmounted.

        `claimed` is called with the cache directory when that is locked, `ready` when requests are being answered.
        """
        os.umask(0)  # the kernel applies the caller's
        process.prepare()
        trio.run(self._serve, ready, claimed)

    async def _serve(self, ready: Callable[[], None], claimed: Callable[[Path], None]) -> None:
        cache_dir = self.config.cache_dir or places.default_cache_dir(self.config.source)
        directory = CacheDirectory(cache_dir, self.config.source)
        claimed(cache_dir)
        self._log_path = None if self.config.foreground else cache_dir / background.LOG_NAME
        try:
            blob = directory.open_blob()
            try:
                took_over = self._held is not None
                if self.config.metadata_snapshot is not None and not took_over:
                    root_inode = os.fstat(self._source_fd).st_ino
                    directory.import_snapshot(self.config.metadata_snapshot, blob, root_inode)
                durable = directory.open_durable(blob)
                size = self.config.cache_size_bytes
                options = replace(
                    self.config.options, cache_size_bytes=directory.default_size_bytes() if size is None else size
                )
                source = Source(
                    self._source_fd, root_device=self._source_device, simulate_latency_s=options.simulate_latency_s
                )
                opened = OpenedIndex(
                    durable,
                    places.session_directory(cache_dir),
                    options.revalidate,
                    b"" if took_over else _rctime(source, options),
                    same_mount=took_over,
                )
                flushed = False
                try:
                    flushed = await self._mounted(source, opened, blob, options, ready)
                except BaseExceptionGroup as group:
                    raise _reason(group) from group
                finally:
                    opened.close(flushed=flushed)
            finally:
                blob.close()
        finally:
            directory.close()

    async def _mounted(
        self, source: Source, opened: OpenedIndex, blob: Blob, options: Options, ready: Callable[[], None]
    ) -> bool:
        """True if everything was flushed at the end."""
        runtime = places.mount_directory(self.config.mountpoint)
        runtime.mkdir(mode=0o700, exist_ok=True)
        took_over = self._held is not None
        self._responsible = not took_over
        bind = mounting.SourceBind(self.config.source, runtime, inherited=took_over)
        try:
            self._open_device(source, opened, blob, options, runtime)
            async with trio.open_nursery() as nursery:
                flushed = await self._run(nursery, source, opened, blob, options, runtime, ready, took_over)
                nursery.cancel_scope.cancel()
            return flushed
        finally:
            if self._responsible:
                self._unmount()
                if self._host is not None:
                    self._host.close()
                if self._held is not None:
                    descriptor_store.remove()
                    self._held.close()
                elif self._device >= 0:
                    os.close(self._device)
                bind.remove()
                shutil.rmtree(runtime, ignore_errors=True)

    def _open_device(self, source: Source, opened: OpenedIndex, blob: Blob, options: Options, runtime: Path) -> None:
        """Mount, unless that was done by those whom we take over from."""
        if self._held is not None:
            self._device = self._held.device
            if self._held.blob >= 0:
                os.close(self._held.blob)
            self._held.blob = blob.fd
            return
        self._device = fuse_device.mount(
            self.config.source,
            self.config.mountpoint,
            read_only=options.read_only,
            allow_other=self.config.allow_other,
        )
        if options.fastpath:
            self._held = fastpath_host.set_up(
                self._device, self._source_fd, source.root_device, blob, opened, options, runtime
            )

    async def _run(
        self,
        nursery: trio.Nursery,
        source: Source,
        opened: OpenedIndex,
        blob: Blob,
        options: Options,
        runtime: Path,
        ready: Callable[[], None],
        took_over: bool,
    ) -> bool:
        """Serve until the mount is gone or we are told to stop. True if everything was flushed."""
        parts = wire(source, opened, blob, options, nursery, self._device, unseen_handles=self._held is not None)
        self._parts = parts
        parts.filesystem.pinned_statfs = self._statfs if options.pins_everything else None
        metadata, files, writes, data = parts.metadata, parts.files, parts.writes, parts.data

        connection = self._connect(parts)
        nursery.start_soon(_forever, parts.slots.watch)
        with opened.index.view() as view:
            root = metadata.inode(view, pyfuse3.ROOT_INODE)
        now = await parts.slots.run(partial(source.lstat, b"")) if root is None else None
        with opened.index.update() as update:
            if not took_over:
                metadata.drop_unlinked(update)
            if now is not None:
                metadata.apply_root(update, now, pin=parts.filesystem.pins(b""))
        restored = files.restore() if took_over else []
        if self._held is None:
            served = f"/dev/fd/{os.dup(self._device)}"
        else:
            self._host = FastPathHost(
                self._held,
                runtime,
                opened,
                blob,
                data,
                parts.filesystem,
                nursery,
                log_path=self._log_path,
                fetched_unseen=parts.files.fetched_unseen,
                died=self._drop_dead_readers,
                unmounted=pyfuse3.terminate,
            )
            served = self._host.mountpoint_for_pyfuse3
            files.reader_of = parts.directories.reader_of = self._held.shared.reader_of
        pyfuse3.init(parts.operations, served, _PYFUSE3_OPTIONS)
        try:
            if self._host is not None:
                nursery.start_soon(_forever, self._host.follow)
                if options.logs_accesses:
                    nursery.start_soon(_forever, self._host.collect)
                await self._host.start(replace=self._restart)
            self._responsible = True
            config.save(self.config, runtime / config.CONFIG_NAME)
            wishes = self._host.wishes if self._host is not None else OwnWishes(files, nursery)
            prefetcher = self._make_prefetcher(wishes)
            hints = Hints(parts.filesystem, files, data, wishes)
            commands = Commands(
                lambda: self.config,
                parts,
                self._host,
                prefetcher,
                wishes,
                hints,
                connection,
                nursery,
                started=self.started,
                leave=self._leave,
            )
            await nursery.start(control.serve, runtime / "control", commands.by_name(), {"leave": pyfuse3.terminate})
            if self.config.metrics is not None:
                await self._serve_metrics(nursery, self.config.metrics, commands, must=not took_over)
            nursery.start_soon(files.reopen, restored)
            for task in (connection.run, writes.run, hints.run, self._check_readers):
                nursery.start_soon(_forever, task)
            if parts.limit is not None:
                data.on_accessed.append(parts.limit.accessed)
                nursery.start_soon(_forever, partial(parts.filesystem.limit_metadata, parts.limit, parts.metrics))
            if prefetcher is not None:
                nursery.start_soon(_forever, prefetcher.run)
            nursery.start_soon(self._obey_signals)
            nursery.start_soon(self._announce, parts.operations, ready)
            try:
                await pyfuse3.main(min_tasks=MIN_IDLE_REQUESTS, max_tasks=MAX_REQUESTS)
            except* OSError as group:
                # An aborted connection ends the loop like this; so does an unmount while a request is read.
                log.info("the kernel closed the connection: %s", group.exceptions[0])
            if self._leaving:
                await writes.flush(FLUSH_TIMEOUT_S)
                log.info("leaving the mount to the next daemon")
                os._exit(0)  # the way of a daemon that dies, at a moment when nothing is under way
        finally:
            pyfuse3.close(unmount=False)
            if self._responsible:
                self._unmount()
                if self._host is not None:
                    with trio.CancelScope(shield=True):
                        await self._host.stop()
        flushed = await writes.flush(FLUSH_TIMEOUT_S)
        if not flushed:
            log.warning("not everything could be written to the index; the next mount compares with the source")
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
            await files.close()
        parts.slots.close()
        return flushed

    async def _serve_metrics(self, nursery: trio.Nursery, address: str, commands: Commands, *, must: bool) -> None:
        """`must`: raise CacheFsError where it cannot be; a mount with jobs on it does not end for that."""
        from daemon import exporter  # prometheus_client is of no use to those who do not ask for it

        try:
            listener = await exporter.listen(exporter.parse_address(address))
        except CacheFsError as error:
            if must:
                raise
            log.error("%s", error)
            return
        nursery.start_soon(_forever, partial(exporter.serve, listener, commands.status_now))

    def _connect(self, parts: Parts) -> SourceConnection:
        index, source = parts.opened.index, parts.source
        root = self._root or Root.load(index)
        if root is None:  # a predecessor of an older version
            with index.view() as view:
                record = parts.metadata.inode(view, pyfuse3.ROOT_INODE)
            root = Root(record.source_inode if record is not None else 0, 0, "")
        root.save(index)

        def changed() -> None:
            if self._host is not None:
                self._host.source_changed(source.root_device)

        connection = SourceConnection(self.config.source, root, source, parts.slots, changed)
        if self.took_over:
            connection.doubt()
        return connection

    def _leave(self) -> None:
        self._leaving = True

    def _make_prefetcher(self, wishes: Wishes) -> Prefetcher | None:
        parts = self._parts
        options = parts.options
        if options.prefetch not in prefetch.BEYOND_FILES:
            return None
        prefetcher = Prefetcher(
            parts.prefetch, parts.filesystem, parts.directories, parts.data, wishes, evicts=options.evicts_ahead
        )
        if options.prefetch in prefetch.LISTENING:
            parts.data.on_accessed.append(prefetcher.read)
        return prefetcher

    # --- the kernel's side -----------------------------------------------------------------------------------------

    async def _announce(self, operations: Operations, ready: Callable[[], None]) -> None:
        await operations.initialized.wait()
        # Only now: what the kernel negotiates would override it.
        mounting.tune_kernel(self.config.mountpoint)
        if service_manager.is_there():
            await service_manager.announce(Probe(self.config.mountpoint), self._status_line, ready)
        else:
            ready()

    def _status_line(self) -> str:
        data, totals = self._parts.data, self._parts.opened.index.totals
        return (
            f"{self.config.source} on {self.config.mountpoint}: {totals.cached_files:,} files cached, "
            f"{decimal(totals.blob_bytes)} of {decimal(data.size_bytes)}"
        )

    def _unmount(self) -> None:
        """Take the mount down if it is still there; another one at its place is none of our business."""
        if self._device < 0 or launcher.is_unmounted(self._device):
            return
        top = mount_table.top_mount(self.config.mountpoint)
        if top is not None and top.fstype == mount_table.FSTYPE and top.source == self.config.source:
            try:
                mounting.unmount(self.config.mountpoint, lazy=True)
            except CacheFsError as error:
                log.warning("%s", error)

    async def _obey_signals(self) -> None:
        with trio.open_signal_receiver(*_SIGNALS) as signals:
            async for number in signals:
                if number == signal.SIGHUP:
                    service_manager.reloading()
                    self._reload()
                    service_manager.notify("READY=1")
                elif number == signal.SIGUSR1 and self._host is not None:
                    log.info("another daemon is to go on with this mount")
                    self._leaving = True
                    pyfuse3.terminate()
                else:
                    log.info("signal %d: unmounting", number)
                    service_manager.notify("STOPPING=1")
                    pyfuse3.terminate()

    def _reload(self) -> None:
        """Read the configuration file again. What may change while mounted does; for the rest see its documentation."""
        try:
            now = settings.reread(mount, self.config)
        except click.ClickException as error:
            log.error("nothing is changed: %s", error.format_message())
            return
        self.config = now
        background.set_log_level(now.log_level)
        self._parts.slots.timeout_s = now.options.source_timeout_s
        if now.cache_size_bytes is not None:
            self._parts.data.resize(now.cache_size_bytes)
        if self._held is not None:
            self._held.shared.set_timeouts(now.options)
        if self._host is not None:
            self._host.refresh()
        config.save(now, places.mount_directory(now.mountpoint) / config.CONFIG_NAME)
        log.info("the configuration was read again")

    async def _check_readers(self) -> None:
        """A reader that was killed inside a transaction would keep old pages for ever (hazard 16)."""
        while True:
            await trio.sleep(READER_CHECK_S)
            self._drop_dead_readers()

    def _drop_dead_readers(self) -> None:
        index = self._parts.opened.index
        index.durable.lmdb.reader_check()
        index.session.lmdb.reader_check()


async def _forever(task: Callable[[], Awaitable[None]]) -> None:
    """Run a task that must not end the mount if it fails."""
    while True:
        try:
            await task()
        except Exception:
            log.exception("bug in %s; going on", task)
            await trio.sleep(1)


def _reason(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that the user must hear about, out of a nursery's group; the group itself if there is none."""
    error: BaseException | None = group.subgroup(CacheFsError)
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error or group


def _rctime(source: Source, options: Options) -> bytes:
    if options.revalidate is not Revalidate.RCTIME:
        return b""
    try:
        return source.getxattr(b"", b"ceph.dir.rctime")
    except OSError as error:
        log.warning("the source has no ceph.dir.rctime (%s): revalidating lazily", error.strerror)
        return b""
