"""One mount from start to end: everything is wired here, in order, and taken down in the opposite order.

(caller daemonizes) → claim the mountpoint → take over, or check places and open the source → lock the cache, open blob
and index → mount → bind the source → serve, release the mountpoint → unmounted, or told to stop → flush → mark the
index clean → remove what was put up

Signals are heard from the first step on. Until requests are served SIGTERM cancels: everything goes back the same way.
So nothing here waits for the source but in a thread that can be left behind.
"""

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import pyfuse3
import trio
from rich.filesize import decimal

import cachefs
from cachefs import hand_over, places, rctime
from cachefs.age import SETTLE_NS
from cachefs.attributes import NANOSECONDS
from cachefs.blob import Blob
from cachefs.cache_directory import CacheDirectory, OpenedIndex
from cachefs.claims import Claim, Taken
from cachefs.clock import TIME_OF_DAY
from cachefs.errors import CacheFsError, IndexUnavailable
from cachefs.fastpath import launcher
from cachefs.fastpath.launcher import Inheritance
from cachefs.hand_over import Handed
from cachefs.hints import Hints
from cachefs.operations import MAX_REQUESTS, Operations
from cachefs.options import Options, Revalidate
from cachefs.prefetcher import Prefetcher
from cachefs.source import Object, Source
from cachefs.source_directories import ROOT
from cachefs.wishes import OwnWishes, Wishes
from daemon import (
    background,
    config,
    control,
    descriptor_store,
    fastpath_host,
    fuse_device,
    last_requests,
    mounting,
    process,
    service_manager,
    settings,
)
from daemon.commands import Commands
from daemon.config import MountConfig
from daemon.fastpath_host import FastPathHost
from daemon.instance import MountInstance, claim_mountpoint, detach_dead, remove_remains
from daemon.mount import mount
from daemon.predecessor import take_over
from daemon.probe import has_died
from daemon.source_connection import Root, SourceConnection
from daemon.watchdog import Probe
from daemon.wiring import Parts, wire
from policies import prefetch

log = logging.getLogger(__name__)

T = TypeVar("T")

MIN_IDLE_REQUESTS = 16
CLAIM_PATIENCE_S = 10.0
CLAIM_POLL_S = 0.05
CLOCK_CHECK_S = 1.0
READER_CHECK_S = 60.0
FLUSH_TIMEOUT_S = 60.0
HAND_OVER_S = 10.0
"""So long, at most, calls wait while a daemon that is replaced writes what it has. The rest is lost, as in a crash."""
LAST_CALLS_S = 3.0
"""Calls to the source that are under way when a mount ends, or changes hands, are waited for so long."""
LAST_ANSWERS_S = 2.0
"""Requests are waited for so much longer when a mount ends: those whose calls were abandoned are answered."""
UNMOUNT_POLL_S = 0.5
DRAIN_S = 1.0
_ANSWER_POLL_S = 0.05
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_PYFUSE3_OPTIONS = {"fsname=cachefs"}
"""It serves a descriptor (`/dev/fd/N`); what is mounted, and how, is no business of libfuse."""


class Session:
    """A mount."""

    def __init__(self, mount_config: MountConfig, *, dismiss: Callable[[], Handed] | None = None) -> None:
        """`dismiss`: take over the mount that there is, with a new fast path, after its daemon has been sent away by
        this, which returns what that had open. Else the one that runs is kept, and if none does it is mounted."""
        self.config = mount_config
        self._dismiss = dismiss
        self._restart = dismiss is not None
        self._leaving = False
        self._successor: socket.socket | None = None
        """Gets what is open at the source when we leave. None: there is none yet, or it does not want that."""
        self._left = trio.Event()
        """pyfuse3 is to leave what it has not read to a successor."""
        self._handed = Handed()
        """What the predecessor had open at the source."""
        self.started = time.monotonic()
        self._source_fd = -1
        self._source_device: int | None = None
        self._root: Root | None = None
        """What the source's root was when it was mounted. None: a predecessor has written it down."""
        self._device = -1
        self._claim: Claim | None = None
        """Of the mountpoint, until requests are answered."""
        self._instance: MountInstance | None = None
        """What is mounted. None: nothing yet."""
        self._took_over = False
        self._starting: trio.CancelScope | None = None
        """Cancelled to end before requests are served; None from then on."""
        self._is_pyfuse3_open = False
        self._serving = trio.CancelScope()
        """Requests under way. Cancelled when they outlast what a mount that ends, or changes hands, waits for."""
        self._told_to_end = False
        self._is_ready = False
        self._ended = False
        """Served until the mount was gone, or until told to end."""
        self._held: Inheritance | None = None
        """What the fast path and its daemons hand on. None before there is one, and without a fast path."""
        self._host: FastPathHost | None = None
        self._parts: Parts
        self._directory: CacheDirectory
        self._statfs: os.statvfs_result | None = None
        """Of the source, when it was opened. A source that hangs must not keep us from taking over."""
        self._log_path: Path | None
        """Of the fast path. None: our stderr."""

    def serve(self, ready: Callable[[], None], claimed: Callable[[Path], None]) -> None:
        """Mount and serve until unmounted. Raises CacheFsError with the reason where that could not begin.

        `claimed` is called with the cache directory when that is locked, `ready` when requests are being answered.
        """
        mounting.check_fuse()
        places.make_runtime_root()
        os.umask(0)  # caller.py applies the caller's
        process.prepare()
        try:
            trio.run(self._until_told, ready, claimed)
        finally:
            if self._claim is not None:
                self._clear_away()
            self._release_claim()

    async def _until_told(self, ready: Callable[[], None], claimed: Callable[[Path], None]) -> None:
        def is_ready() -> None:
            self._is_ready = True
            self._release_claim()
            ready()

        try:
            with trio.open_signal_receiver(*_SIGNALS) as signals, trio.CancelScope() as self._starting:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._obey, signals)
                    await self._serve(is_ready, claimed)
                    nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise reason(group) from group
        if not self._is_ready and not (self._told_to_end and self.config.foreground):
            what = "it was told to end" if self._told_to_end else f"{self.config.mountpoint} was unmounted"
            raise CacheFsError(f"{what} before the mount was ready")

    def _release_claim(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    # --- what is refused is refused before anything has been changed -----------------------------------------------

    async def _prepare(self) -> None:
        place = self.config.mountpoint
        self._claim = await self._claim_mountpoint()
        if self._dismiss is not None:
            self._handed = await _in_thread(self._dismiss)
        instance = MountInstance.on_top(place)
        if instance is not None:
            self._held = take_over(self.config, instance)
        if instance is not None and self._held is not None:
            self._took_over = True
            self._instance = instance
            self._device = self._held.device
            self._source_fd = self._held.source
            self._source_device = self._held.shared["root_device"]
            instance.take_over()
            return  # the source may have gone, or hang: nothing is asked of it on the way
        if self._restart:
            has_ended = instance is None or instance.is_abandoned() or await _in_thread(has_died, place)
            if instance is None or has_ended or not instance.is_on_top():
                self._instance = instance
                self._take_down()
                raise CacheFsError(f"{place} was unmounted, or its connection aborted: mount it again")
            raise CacheFsError(f"the fast path of {place} is dead: umount it, and mount it again")
        await _in_thread(detach_dead, place, MountInstance.is_abandoned, self._claim)
        await _in_thread(mounting.make_room, self.config.source, place)
        timeout_s = self.config.options.source_timeout_s
        await _in_thread(
            partial(mounting.check_places, self.config.source, place, self.config.own_places, timeout_s=timeout_s)
        )
        self._source_fd = await self._ask_source(mounting.open_source, self.config.source)
        self._root = await self._ask_source(Root.of, self._source_fd)
        with contextlib.suppress(OSError):  # a source may not know
            self._statfs = await self._ask_source(os.fstatvfs, self._source_fd)

    async def _ask_source(self, function: Callable[..., T], *arguments: Any) -> T:
        """Raises CacheFsError where it takes too long."""
        with trio.move_on_after(self.config.options.source_timeout_s):
            return await _in_thread(function, *arguments)
        raise CacheFsError(f"the source {self.config.source} does not answer")

    async def _claim_mountpoint(self) -> Claim:
        with trio.move_on_after(CLAIM_PATIENCE_S) as patience:
            while True:
                try:
                    return claim_mountpoint(self.config.mountpoint)
                except Taken as other:
                    taken = other
                await trio.sleep(CLAIM_POLL_S)
        assert patience.cancelled_caught
        raise CacheFsError(f"{self.config.mountpoint} is being mounted by another cachefs (pid {taken.pid})")

    async def _serve(self, ready: Callable[[], None], claimed: Callable[[Path], None]) -> None:
        await self._prepare()
        cache_dir = self.config.cache_place
        directory = self._directory = CacheDirectory(cache_dir, self.config.source)
        claimed(cache_dir)
        log.info("cachefs %s: %s on %s", cachefs.__version__, self.config.source, self.config.mountpoint)
        if self.config.options.settle_ns < SETTLE_NS:
            log.warning("--minimum-age is for tests: what is read while it is written may be cached, and stay wrong")
        if self._took_over:
            log.info("taking over the mount on %s", self.config.mountpoint)
        if self._handed.broke_off:
            done = len(self._handed.opened)
            log.warning("the hand-over of open files broke off: %d have come, the others are opened by path", done)
        self._log_path = None if self.config.foreground else cache_dir / background.LOG_NAME
        try:
            blob = directory.open_blob()
            try:
                if self.config.metadata_snapshot is not None and not self._took_over:
                    root_inode = (await self._ask_source(os.fstat, self._source_fd)).st_ino
                    patterns = self.config.options.mutable.patterns
                    directory.import_snapshot(self.config.metadata_snapshot, blob, root_inode, patterns)
                durable = directory.open_durable(blob)
                size = self.config.cache_size_bytes
                options = replace(
                    self.config.options, cache_size_bytes=directory.default_size_bytes() if size is None else size
                )
                source = await self._ask_source(
                    partial(
                        Source,
                        self._source_fd,
                        root_device=self._source_device,
                        simulate_latency_s=options.simulate_latency_s,
                    )
                )
                opened = OpenedIndex(
                    durable,
                    places.session_directory(cache_dir),
                    options.revalidate,
                    b"" if self._took_over else await self._ask_source(_rctime_to_record, self._source_fd, options),
                    mutable=options.mutable.patterns,
                    same_mount=self._took_over,
                )
                flushed = False
                try:
                    flushed = await self._mounted(source, opened, blob, options, ready)
                finally:
                    opened.close(flushed=flushed or self._put_up_nothing())
            finally:
                blob.close()
        finally:
            directory.close()

    def _put_up_nothing(self) -> bool:
        """It ended before anything could be read or written: nothing is left of this run."""
        return not self._took_over and self._starting is not None

    async def _mounted(
        self, source: Source, opened: OpenedIndex, blob: Blob, options: Options, ready: Callable[[], None]
    ) -> bool:
        """True if everything was flushed at the end."""
        try:
            self._open_device(source, opened, blob, options)
            assert self._instance is not None
            async with trio.open_nursery() as nursery:
                flushed = await self._run(nursery, source, opened, blob, options, self._instance.directory, ready)
                nursery.cancel_scope.cancel()
            return flushed
        finally:
            if self._is_over():
                self._take_down()

    def _is_over(self) -> bool:
        """The mount, with us. A successor that failed leaves a mount that lives to whoever tries next."""
        return not self._took_over or self._told_to_end or self._ended or launcher.is_unmounted(self._device)

    def _take_down(self) -> None:
        if self._instance is not None:
            self._instance.unmount(self._claim)
        if self._host is not None:
            self._host.close()
        if self._held is not None:
            descriptor_store.remove()
            self._held.close()
        elif self._device >= 0:
            os.close(self._device)
        if self._instance is not None:
            self._instance.remove()

    def _clear_away(self) -> None:
        """It ended before it was ready. A mount that is gone, whenever that happened, leaves nothing."""
        if self._instance is not None:
            self._instance.let_go()
        with contextlib.suppress(OSError, CacheFsError):  # then the next one does it
            remove_remains(self.config.mountpoint)

    def _open_device(self, source: Source, opened: OpenedIndex, blob: Blob, options: Options) -> None:
        """Mount, unless that was done by those whom we take over from."""
        if self._held is not None:
            if self._held.blob >= 0:
                os.close(self._held.blob)
            self._held.blob = blob.fd
            fastpath_host.follow_index(self._held.shared, opened)
            return
        self._device = fuse_device.mount(
            self.config.source,
            self.config.mountpoint,
            read_only=options.read_only,
            allow_other=self.config.allow_other,
        )
        self._instance = MountInstance.on_top(self.config.mountpoint)
        if self._instance is None:
            raise CacheFsError(f"{self.config.mountpoint} was unmounted before the mount was ready")
        self._instance.begin(self._source_fd)
        if options.fastpath:
            self._held = fastpath_host.set_up(
                self._device, self._source_fd, source.root_device, blob, opened, options, self._instance
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
    ) -> bool:
        """Serve until the mount is gone or we are told to stop. True if everything was flushed."""
        shared = self._held.shared.fd if self._held is not None else None
        parts = wire(source, opened, blob, options, nursery, self._device, shared)
        self._parts = parts
        nursery.start_soon(_shielded, parts.notifier.run)
        parts.filesystem.pinned_statfs = self._statfs if options.pins_everything else None
        metadata, files, writes, data = parts.metadata, parts.files, parts.writes, parts.data

        connection = self._connect(parts)
        nursery.start_soon(_shielded, parts.slots.watch)
        with opened.index.view() as view:
            root = metadata.inode(view, pyfuse3.ROOT_INODE)
        began_ns = source.clock.realtime_ns()
        now = await parts.slots.run(partial(source.lstat, ROOT)) if root is None else None
        with opened.index.update() as update:
            if not self._took_over:
                metadata.drop_unlinked(update)
            if now is not None:
                root = metadata.apply_root(update, now, pin=parts.filesystem.pins(b""))
                parts.filesystem.permissions.recorded(root, now, began_ns)
        restored = files.restore(self._handed.opened) if self._took_over else []
        if self._took_over:
            parts.young.restore()
            parts.notifier.restore(opened.index)
        if self._held is None:
            served = os.dup(self._device)
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
                young=parts.young,
                fetched_unseen=parts.files.fetched_unseen,
                died=self._drop_dead_readers,
                unmounted=self._terminate,
            )
            served = self._host.descriptor_for_pyfuse3()
            files.request_at = parts.directories.request_at = self._held.shared.request_at
        pyfuse3.init(parts.operations, f"/dev/fd/{served}", _PYFUSE3_OPTIONS)  # which closes it at the end
        self._is_pyfuse3_open = True
        try:
            if self._host is not None:
                nursery.start_soon(_shielded, self._host.follow)
                nursery.start_soon(_shielded, self._host.watch_young)
                if options.logs_accesses:
                    nursery.start_soon(_shielded, self._host.collect)
                await self._host.start(new=not self._took_over, replace=self._restart)
            self._save_config(must=not self._took_over)
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
            )
            await nursery.start(control.serve, runtime / "control", commands.by_name(), {"leave": self._dismissed})
            if self.config.metrics is not None:
                await self._serve_metrics(nursery, self.config.metrics, commands, must=not self._took_over)
            nursery.start_soon(files.reopen, restored)
            for task in (
                connection.run,
                writes.run,
                hints.run,
                parts.young.run,
                self._check_readers,
                self._drain,
                _watch_clock,
            ):
                nursery.start_soon(_shielded, task)
            if parts.limit is not None:
                data.on_accessed.append(parts.limit.accessed)
                nursery.start_soon(_shielded, partial(parts.filesystem.limit_metadata, parts.limit, parts.metrics))
            if prefetcher is not None:
                nursery.start_soon(_shielded, prefetcher.run)
            if options.revalidate in (Revalidate.AUTO, Revalidate.RCTIME):
                nursery.start_soon(_shielded, partial(self._believe_unmoved, source, opened, options))
            nursery.start_soon(self._announce, parts.operations, ready)
            nursery.start_soon(self._stop_reading, served)
            self._starting = None
            if self._leaving:
                self._terminate()
            nursery.start_soon(self._watch_for_unmount)
            try:
                with self._serving:
                    await pyfuse3.main(min_tasks=MIN_IDLE_REQUESTS, max_tasks=MAX_REQUESTS)
            except* OSError as group:
                # An aborted connection ends the loop like this; so does an unmount while a request is read.
                log.info("the kernel closed the connection: %s", group.exceptions[0])
            self._ended = not self._leaving
            if self._leaving and not launcher.is_unmounted(self._device):
                await writes.settle(HAND_OVER_S)  # the fast path may be fetching all the time
                parts.notifier.save(opened.index)
                while opened.index.drain():
                    pass
                parts.notifier.kill()
                self._hand_over()
                log.info("leaving the mount to the next daemon")
                os._exit(0)  # the way of a daemon that dies; what the source has not answered the successor asks again
        finally:
            self._is_pyfuse3_open = False
            pyfuse3.close(unmount=False)
            if self._is_over():
                assert self._instance is not None
                self._instance.unmount(self._claim)
                parts.notifier.end()
                if self._host is not None:
                    with trio.CancelScope(shield=True):
                        await self._let_fastpath_answer()
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
        nursery.start_soon(_shielded, partial(exporter.serve, listener, commands.status_now))

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
        if self._took_over:
            connection.doubt()
        return connection

    def _leave(self) -> None:
        self._leaving = True

    def _dismissed(self, answer: control.Answer, connection: int) -> None:
        """A successor has the answer to `leave`. If it has gone before that, we stay."""
        self._leave()
        if answer.get("descriptors"):
            self._successor = socket.socket(fileno=os.dup(connection))
        self._terminate()

    def _hand_over(self) -> None:
        """Nothing is served any more: what is open stays as it is."""
        if self._successor is None:
            return
        try:
            hand_over.send(self._successor, self._parts.files.opened_at_source())
        except OSError as error:
            log.warning("the next daemon does not take the open files (%s), and opens them by path", error)

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
        assert self._instance is not None
        mounting.tune_kernel(self._instance.device)
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

    async def _obey(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            if number == signal.SIGHUP:
                if self._starting is None:
                    service_manager.reloading()
                    self._reload()
                    service_manager.notify("READY=1")
            elif number == signal.SIGUSR1 and (self._host is not None or self._starting is not None):
                log.info("another daemon is to go on with this mount")
                self._leave()
                if self._starting is None:
                    self._terminate()
            else:
                log.info("signal %d: unmounting", number)
                service_manager.notify("STOPPING=1")
                self._told_to_end = True
                if self._starting is None:
                    self._terminate()
                else:
                    self._starting.cancel()

    def _terminate(self) -> None:
        if self._is_pyfuse3_open:
            if self._leaving:
                self._parts.notifier.hold_back()
                # A request that is not answered is the successor's: it makes the calls again that can be repeated.
                self._serving.deadline = min(self._serving.deadline, trio.current_time() + LAST_CALLS_S)
                self._left.set()
            else:
                self._hurry()
                pyfuse3.terminate()

    async def _stop_reading(self, descriptor: int) -> None:
        await self._left.wait()
        await last_requests.all_read(descriptor)
        if self._is_pyfuse3_open:
            pyfuse3.terminate()

    def _hurry(self) -> None:
        """The mount ends: requests that wait for the source are answered soon, with ETIMEDOUT."""
        self._parts.slots.hurry(LAST_CALLS_S)
        if self._held is not None:
            self._held.shared.hurry(LAST_CALLS_S)
        until = trio.current_time() + LAST_CALLS_S + LAST_ANSWERS_S
        self._serving.deadline = min(self._serving.deadline, until)

    async def _watch_for_unmount(self) -> None:
        """pyfuse3 notices an unmount, and then waits for the requests that are under way."""
        while not launcher.is_unmounted(self._device):  # noqa: ASYNC110
            await trio.sleep(UNMOUNT_POLL_S)
        self._hurry()

    async def _let_fastpath_answer(self) -> None:
        """A mount that is detached lives as long as jobs use it: the kernel has not ended what they wait for."""
        assert self._held is not None
        self._held.shared.hurry(_ANSWER_POLL_S)  # a READ that failed is tried again by the kernel
        with trio.move_on_at(min(self._serving.deadline, trio.current_time() + LAST_CALLS_S)):
            while not launcher.is_unmounted(self._device):  # noqa: ASYNC110
                await trio.sleep(_ANSWER_POLL_S)
            return
        assert self._instance is not None
        self._instance.abort()  # a thread that hangs in the source would keep it, and nobody would answer

    def _reload(self) -> None:
        """Read the configuration file again. What may change while mounted does; for the rest see its documentation."""
        try:
            now, waiting = settings.reread(mount, self.config)
        except click.ClickException as error:
            log.error("nothing is changed: %s", error.format_message())
            return
        before, self.config = self.config, now
        background.set_log_level(now.log_level)
        self._parts.slots.timeout_s = now.options.source_timeout_s
        if now.cache_size_bytes != before.cache_size_bytes:
            size = now.cache_size_bytes
            self._parts.data.resize(self._directory.default_size_bytes() if size is None else size)
        if self._held is not None:
            self._held.shared.set_timeouts(now.options)
        if self._host is not None:
            self._host.refresh()
        self._save_config()
        if waiting:
            log.warning("the configuration was read again; only a new mount takes up %s", ", ".join(waiting))
        else:
            log.info("the configuration was read again")

    def _save_config(self, *, must: bool = False) -> None:
        """Write down how it is mounted, for `cachefs restart`. `must`: raise CacheFsError where there is no room."""
        assert self._instance is not None
        path = self._instance.directory / config.CONFIG_NAME
        try:
            config.save(self.config, path)
        except OSError as error:
            message = f"cannot write {path}: {error.strerror}"
            if must:
                raise CacheFsError(message) from error
            self._parts.writes.failed("configuration", f"{message}; a restart goes on with the last one")

    async def _drain(self) -> None:
        """A task, for ever: write what the session could not take before."""
        while True:
            await trio.sleep(DRAIN_S)
            while self._parts.opened.index.drain():
                await trio.lowlevel.checkpoint()

    async def _believe_unmoved(self, source: Source, opened: OpenedIndex, options: Options) -> None:
        """A task: what earlier runs recorded is believed once it is certain that nothing has changed (rctime.py)."""
        while opened.may_be_unmoved:
            await trio.sleep(options.rctime_grace_s)
            try:
                now = await self._parts.slots.run(partial(rctime.ask, partial(source.getxattr, Object(ROOT))))
                believed = opened.believe_unmoved(now)
            except OSError as error:
                log.info("the source does not say when it was changed last, asking again: %s", error.strerror)
                continue
            except IndexUnavailable as error:
                log.warning("%s: everything is compared with the source", error)
                return
            if not believed:
                log.info("the source has changed: what is cached is compared with it, each object at its first use")
                return
            self._parts.metadata.floor = opened.state.floor
            if self._held is not None:
                self._held.shared["floor"] = opened.state.floor
            log.info("the source has not changed: what is cached is not compared with it any more")

    async def _check_readers(self) -> None:
        """A reader that was killed inside a transaction would keep old pages for ever (hazard 16)."""
        while True:
            await trio.sleep(READER_CHECK_S)
            self._drop_dead_readers()

    def _drop_dead_readers(self) -> None:
        index = self._parts.opened.index
        index.durable.lmdb.reader_check()
        index.session.lmdb.reader_check()


async def _watch_clock() -> None:
    """Say so where the clock was set forward: files count as young for so much longer."""
    said_ns = 0
    while True:
        ahead_ns = TIME_OF_DAY.ahead_ns()
        if abs(ahead_ns - said_ns) > SETTLE_NS:
            said_ns = ahead_ns
            if ahead_ns > SETTLE_NS:
                log.warning(
                    "the clock was set forward by %.0f s: until `cachefs restart` files count as so much younger, "
                    "and are not cached before they are old enough",
                    ahead_ns / NANOSECONDS,
                )
        await trio.sleep(CLOCK_CHECK_S)


async def _shielded(task: Callable[[], Awaitable[None]]) -> None:
    """Run a task that must not end the mount if it fails: it begins again."""
    while True:
        try:
            return await task()
        except Exception:
            log.exception("bug in %s; going on", task)
            await trio.sleep(1)


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


async def _in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call what may hang as long as the source does. It is left behind when the start is cancelled."""
    return await trio.to_thread.run_sync(partial(function, *arguments), abandon_on_cancel=True)


def _rctime_to_record(source_fd: int, options: Options) -> bytes:
    """Asked for whatever `--revalidate` says, so that the next mount can tell."""
    try:
        value = rctime.ask(partial(os.getxattr, f"/proc/self/fd/{source_fd}"))
    except OSError as error:
        log.warning("the source does not say when it was changed last (%s): everything is compared", error.strerror)
        return b""
    if not value and options.revalidate is Revalidate.RCTIME:
        log.warning("the source has no ceph.dir.rctime: everything is compared, as with --revalidate lazy")
    return rctime.recordable(value, time.time(), options.rctime_grace_s)
