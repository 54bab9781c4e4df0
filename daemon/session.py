"""One mount from start to end: everything is wired here, in order, and taken down in the opposite order.

check places → open the source → (caller daemonizes) → lock the cache, open blob and index → bind the source →
mount → serve → unmounted, or told to stop → flush → mark the index clean → remove what was put up
"""

import ctypes
import logging
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyfuse3
import trio

from cachefs.blob import Blob
from cachefs.cache_directory import CacheDirectory, OpenedIndex
from cachefs.data_cache import DataCache
from cachefs.directories import Directories
from cachefs.errors import CacheFsError
from cachefs.eviction import Eviction
from cachefs.fastpath import launcher
from cachefs.fastpath.launcher import Inheritance
from cachefs.filesystem import FileSystem
from cachefs.metadata_cache import MetadataCache
from cachefs.metadata_retention import MetadataRetention
from cachefs.metrics import Metrics
from cachefs.mutations import Mutations
from cachefs.notifier import KernelNotifier
from cachefs.open_files import OpenFiles
from cachefs.operations import Operations
from cachefs.options import Options, Revalidate
from cachefs.prefetcher import OwnWishes, Prefetcher
from cachefs.slots import SourceSlots
from cachefs.source import Source
from cachefs.write_behind import WriteBehind
from daemon import background, config, control, descriptor_store, fastpath_host, fuse_device, mounting
from daemon.config import MountConfig
from daemon.fastpath_host import FastPathHost
from policies import prefetch
from policies.prefetch.dependency_graph import DependencyGraph, parse_graph

log = logging.getLogger(__name__)

SOURCE_SLOTS = 64
MAX_REQUESTS = 1000
"""Tasks of pyfuse3. More than slots, so that hits are answered while all slots wait for the source."""
MIN_IDLE_REQUESTS = 16
READER_CHECK_S = 60.0
FLUSH_TIMEOUT_S = 60.0
SWITCH_INTERVAL_S = 0.0005
"""How long the trio thread waits for the interpreter that write-behind has; Python's own 5 ms are a slow look-up."""
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
        self._device = -1
        self._responsible = False
        """For the mount's end. Who could not take over leaves everything to the next one who tries."""
        self._held: Inheritance | None = None
        """What the fast path and its daemons hand on. None before there is one, and without a fast path."""
        self._host: FastPathHost | None = None

    def prepare(self) -> None:
        """Everything that can be refused without having changed anything."""
        mounting.check_fuse()
        config.make_runtime_root()
        self._held = fastpath_host.take_over(self.config)
        if self._held is not None:
            self._source_fd = self._held.source
            return
        if self._restart:
            raise CacheFsError(f"the fast path of {self.config.mountpoint} is dead: umount it, and mount it again")
        mounting.check_places(self.config.source, self.config.mountpoint)
        self._source_fd = mounting.open_source(self.config.source)

    def serve(self, ready: Callable[[], None], claimed: Callable[[Path], None]) -> None:
        """Mount and serve until unmounted.

        `claimed` is called with the cache directory when that is locked, `ready` when requests are being answered.
        """
        os.umask(0)  # the kernel applies the caller's
        _tune_malloc()
        _raise_descriptor_limit()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        trio.run(self._serve, ready, claimed)

    async def _serve(self, ready: Callable[[], None], claimed: Callable[[Path], None]) -> None:
        cache_dir = self.config.cache_dir or config.default_cache_dir(self.config.source)
        directory = CacheDirectory(cache_dir, self.config.source)
        claimed(cache_dir)
        self._log_path = cache_dir / background.LOG_NAME
        try:
            blob = directory.open_blob()
            try:
                durable = directory.open_durable(blob)
                size = self.config.cache_size_bytes
                options = replace(
                    self.config.options, cache_size_bytes=directory.default_size_bytes() if size is None else size
                )
                source = Source(self._source_fd, simulate_latency_s=options.simulate_latency_s)
                opened = OpenedIndex(
                    durable,
                    config.session_directory(cache_dir),
                    options.revalidate,
                    _rctime(source, options),
                    same_mount=self._held is not None,
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
        runtime = config.mount_directory(self.config.mountpoint)
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
        index, metrics = opened.index, Metrics()
        limit = None
        if options.metadata_limit is not None:
            limit = MetadataRetention(index, options.metadata_limit, options.metadata_retention)
        metadata = MetadataCache(
            index,
            options,
            run=opened.state.run,
            floor=opened.state.floor,
            takeovers=opened.takeovers,
            retention=limit,
        )
        policy = prefetch.make(options.prefetch, parse_graph(options.graph) if options.graph else ())
        eviction = None
        if options.evicts:
            part_of: Callable[[int], object] = metadata.directory_of
            if isinstance(policy, DependencyGraph):
                part_of = partial(_partition_of, policy, metadata)
            eviction = Eviction(index, options.retention, options.cache_size_bytes, part_of)
        writes = WriteBehind(index, blob, metrics, options.cache_size_bytes, eviction=eviction)
        data = DataCache(index, blob, options, metrics, writes, appends=not options.fastpath, eviction=eviction)
        slots = SourceSlots(SOURCE_SLOTS, options.source_timeout_s)
        filesystem = FileSystem(source, slots, metadata, options, KernelNotifier(nursery, self._device))
        files = OpenFiles(
            filesystem,
            data,
            metrics,
            unseen_handles=self._held is not None,
            first_handle=(opened.takeovers << 40) + 1,
        )
        directories = Directories(filesystem, nursery)
        operations = Operations(filesystem, files, directories, Mutations(filesystem, files, directories))
        self._filesystem, self._opened, self._metrics, self._data = filesystem, opened, metrics, data
        self._source, self._slots = source, slots
        self._prefetcher: Prefetcher | None = None

        with index.update() as update:
            if not took_over:
                metadata.drop_unlinked(update)
            if metadata.inode(update, pyfuse3.ROOT_INODE) is None:
                metadata.apply_root(update, source.lstat(b""), pin=filesystem.pins(b""))
        nursery.start_soon(_forever, slots.watch)
        if took_over:
            await files.restore()
        if self._held is None:
            served = f"/dev/fd/{os.dup(self._device)}"
        else:
            self._host = FastPathHost(
                self._held,
                runtime,
                opened,
                blob,
                data,
                filesystem,
                nursery,
                log_path=self._log_path,
                died=self._drop_dead_readers,
                unmounted=pyfuse3.terminate,
            )
            served = self._host.mountpoint_for_pyfuse3
        pyfuse3.init(operations, served, _PYFUSE3_OPTIONS)
        try:
            if self._host is not None:
                nursery.start_soon(_forever, self._host.follow)
                if options.logs_accesses:
                    nursery.start_soon(_forever, self._host.collect)
                await self._host.start(replace=self._restart)
            self._responsible = True
            config.save(self.config, runtime / config.CONFIG_NAME)
            await nursery.start(control.serve, runtime / "control", self._commands(), {"leave": pyfuse3.terminate})
            for task in (writes.run, self._check_readers):
                nursery.start_soon(_forever, task)
            if limit is not None:
                data.on_accessed.append(limit.accessed)
                nursery.start_soon(_forever, partial(filesystem.limit_metadata, limit, metrics))
            if options.prefetch in prefetch.BEYOND_FILES:
                wishes = self._host.wishes if self._host is not None else OwnWishes(files, nursery)
                self._prefetcher = Prefetcher(
                    policy, filesystem, directories, data, wishes, evicts=options.evicts_ahead
                )
                if options.prefetch in prefetch.LISTENING:
                    data.on_accessed.append(self._prefetcher.read)
                nursery.start_soon(_forever, self._prefetcher.run)
            nursery.start_soon(self._terminate_on_signal)
            nursery.start_soon(self._announce, operations, ready)
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
        slots.close()
        return flushed

    # --- the kernel's side -----------------------------------------------------------------------------------------

    async def _announce(self, operations: Operations, ready: Callable[[], None]) -> None:
        await operations.initialized.wait()
        # Only now: what the kernel negotiates would override it.
        mounting.tune_kernel(self.config.mountpoint)
        ready()

    def _unmount(self) -> None:
        """Take the mount down if it is still there; another one at its place is none of our business."""
        if self._device < 0 or launcher.is_unmounted(self._device):
            return
        top = mounting.top_mount(self.config.mountpoint)
        if top is not None and top.fstype == mounting.FSTYPE and top.source == self.config.source:
            try:
                mounting.unmount(self.config.mountpoint, lazy=True)
            except CacheFsError as error:
                log.warning("%s", error)

    async def _terminate_on_signal(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("signal %d: unmounting", number)
                pyfuse3.terminate()

    async def _check_readers(self) -> None:
        """A reader that was killed inside a transaction would keep old pages for ever (hazard 16)."""
        while True:
            await trio.sleep(READER_CHECK_S)
            self._drop_dead_readers()

    def _drop_dead_readers(self) -> None:
        self._opened.index.durable.lmdb.reader_check()
        self._opened.index.session.lmdb.reader_check()

    # --- commands --------------------------------------------------------------------------------------------------

    def _commands(self) -> control.Commands:
        return {"status": self._status, "invalidate": self._invalidate, "leave": self._leave}

    async def _status(self, _: dict[str, object]) -> dict[str, object]:
        index = self._opened.index
        status: dict[str, object] = {
            "source": self.config.source,
            "mountpoint": self.config.mountpoint,
            "cache": self.config.options.cache.value,
            "read_only": self.config.options.read_only,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self.started, 3),
            "pinned_inodes": index.pinned_inodes(),
            "cached_files": index.totals.cached_files,
            "cached_bytes": index.totals.cached_bytes,
            "blob_bytes": index.totals.blob_bytes,
            "cache_size_bytes": self._data.capacity_bytes,
            "write_behind_bytes": self._data.writes.queued_bytes,
            "uncommitted": len(index.dirty) + len(index.in_flight),
            **self._metrics.as_dict(),
            "source_ops": {name: count for name, count in self._source.counters.snapshot().items() if count},
            "source_bytes": self._source.counters.bytes_read,
            "source_timeouts": self._slots.timeouts,
            "source_stuck_calls": self._slots.stuck,
            "prefetch": self._prefetcher.state if self._prefetcher is not None else None,
            "fastpath": None,
            "run": self._opened.state.run,
        }
        if self._host is not None:
            self._host.add_to(status)
        return status

    async def _leave(self, _: dict[str, object]) -> dict[str, object]:
        """No more requests are taken; those that were are answered, and then the process ends."""
        if self._host is None:
            raise OSError("without a fast path a mount ends with its daemon: umount it, and mount it again")
        if self.config.foreground:
            raise OSError("it runs in the foreground: whoever started it may start it again")
        self._leaving = True
        return {}

    async def _invalidate(self, request: dict[str, object]) -> dict[str, object]:
        path = os.fsencode(str(request["path"])).strip(b"/")
        return {"dropped": await self._filesystem.invalidate(path)}


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


def _partition_of(graph: DependencyGraph, metadata: MetadataCache, number: int) -> str | None:
    try:
        with metadata.index.view() as view:
            return graph.partition_of(metadata.paths.path(view, number))
    except OSError:  # it has no name any more
        return None


def _rctime(source: Source, options: Options) -> bytes:
    if options.revalidate is not Revalidate.RCTIME:
        return b""
    try:
        return source.getxattr(b"", b"ceph.dir.rctime")
    except OSError as error:
        log.warning("the source has no ceph.dir.rctime (%s): revalidating lazily", error.strerror)
        return b""


def _raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _tune_malloc() -> None:
    """Keep freed memory. File contents come and go by the megabyte, and touching new pages costs more than the copy.

    One arena more than the main one: the payload that a fetch thread allocates is freed by the trio thread.
    """
    libc = ctypes.CDLL(None)
    for parameter, value in ((_M_ARENA_MAX, 2), (_M_MMAP_THRESHOLD, 2 << 20), (_M_TRIM_THRESHOLD, 64 << 20)):
        libc.mallopt(parameter, value)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
