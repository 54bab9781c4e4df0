"""One mount from start to end: everything is wired here, in order, and taken down in the opposite order.

check places → open the source → (caller daemonizes) → lock the cache, open blob and index → bind the source →
mount → serve → unmounted, or told to stop → flush → mark the index clean → remove what was put up
"""

import contextlib
import ctypes
import logging
import os
import resource
import shutil
import signal
import tempfile
import time
from collections import Counter
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
from cachefs.fastpath import launcher
from cachefs.fastpath.in_doubt import touched
from cachefs.fastpath.launcher import FastPath, Inheritance, Message
from cachefs.fastpath.shared import Shared, mount_flags
from cachefs.filesystem import FileSystem
from cachefs.metadata_cache import MetadataCache
from cachefs.metrics import Metrics
from cachefs.mutations import Mutations
from cachefs.open_files import OpenFiles
from cachefs.operations import KernelNotifier, Operations
from cachefs.options import Options, Revalidate
from cachefs.slots import SourceSlots
from cachefs.source import Source
from daemon import background, config, control, descriptor_store, fuse_device, mounting
from daemon.config import MountConfig

log = logging.getLogger(__name__)

SOURCE_SLOTS = 64
MAX_REQUESTS = 1000
"""Tasks of pyfuse3. More than slots, so that hits are answered while all slots wait for the source."""
MIN_IDLE_REQUESTS = 16
FOLLOW_S = 1.0
SERVING_THREADS = 16
"""Of the fast path: how many requests it answers at once, those that wait for the local disk included."""
FASTPATH_SOCKET = "fastpath"
READER_CHECK_S = 60.0
FLUSH_TIMEOUT_S = 60.0


class Session:
    """A mount. `prepare` before going to the background, `serve` after it."""

    def __init__(self, mount_config: MountConfig) -> None:
        self.config = mount_config
        self.started = time.monotonic()
        self._source_fd = -1
        self._fastpath: FastPath | None = None
        self._held: Inheritance | None = None
        self._took_over = False

    def prepare(self) -> None:
        """Everything that can be refused without having changed anything."""
        mounting.check_fuse()
        config.make_runtime_root()
        self._held = self._inherit()
        if self._held is not None:
            self._source_fd = self._held.source
            return
        mounting.check_places(self.config.source, self.config.mountpoint)
        self._source_fd = mounting.open_source(self.config.source)

    def _inherit(self) -> Inheritance | None:
        """Take over a mount whose daemon has died and whose fast path has not."""
        place = self.config.mountpoint
        top = mounting.top_mount(place)
        if not self.config.options.fastpath or top is None or top.fstype != mounting.FSTYPE or control.is_served(place):
            return None
        held = descriptor_store.take()
        if held is None or launcher.is_running(held.shared["pid"]):
            held = Inheritance.ask(config.mount_directory(place) / FASTPATH_SOCKET) or held
        if held is None or launcher.is_unmounted(held.device):
            return None
        if top.source != self.config.source:
            raise CacheFsError(f"{place} is in use: {top.source} is mounted there by a cachefs whose daemon has died")
        if held.shared["flags"] != mount_flags(self.config.options):
            raise CacheFsError(f"{place} was mounted with other options: unmount it first")
        log.info("taking over the mount on %s", place)
        self._took_over = True
        return held

    def serve(self, ready: Callable[[], None], claimed: Callable[[Path], None]) -> None:
        """Mount and serve until unmounted.

        `claimed` is called with the cache directory when that is locked, `ready` when requests are being answered.
        """
        os.umask(0)  # the kernel applies the caller's
        _tune_malloc()
        _raise_descriptor_limit()
        trio.run(self._serve, ready, claimed)

    async def _serve(self, ready: Callable[[], None], claimed: Callable[[Path], None]) -> None:
        cache_dir = self.config.cache_dir or config.default_cache_dir(self.config.source)
        directory = CacheDirectory(cache_dir, self.config.source)
        claimed(cache_dir)
        self._log_path = cache_dir / background.LOG_NAME
        try:
            blob, seed = directory.open_blob()
            try:
                durable = directory.open_durable(blob, seed)
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
                    same_mount=self._took_over,
                )
                self._seed = seed
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
        bind = mounting.SourceBind(self.config.source, runtime, inherited=self._took_over)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                metrics = Metrics()
                metadata = MetadataCache(
                    opened.index,
                    options,
                    run=opened.state.run,
                    floor=opened.state.floor,
                    takeovers=opened.takeovers,
                )
                data = DataCache(opened.index, blob, options, metrics, appends=not options.fastpath)
                slots = SourceSlots(SOURCE_SLOTS, options.source_timeout_s)
                if options.fastpath and self._held is None:
                    self._held = self._mount_device(source, opened, blob, options, runtime)
                if self._held is not None and self._took_over:
                    if self._held.blob >= 0:
                        os.close(self._held.blob)
                    self._held.blob = blob.fd
                device = self._held.device if self._held else None
                filesystem = FileSystem(source, slots, metadata, options, KernelNotifier(nursery, device))
                files = OpenFiles(
                    filesystem,
                    data,
                    metrics,
                    unseen_handles=self._held is not None,
                    first_handle=(opened.takeovers << 40) + 1,
                )
                directories = Directories(filesystem, nursery)
                mutations = Mutations(filesystem, files, directories)
                with opened.index.update() as update:
                    if not self._took_over:
                        metadata.drop_unlinked(update)
                    if metadata.inode(update, pyfuse3.ROOT_INODE) is None:
                        metadata.apply_root(update, source.lstat(b""), pin=filesystem.pins(b""))
                self._filesystem, self._opened, self._metrics, self._data = filesystem, opened, metrics, data
                self._source, self._slots, self._blob = source, slots, blob
                operations = Operations(filesystem, files, directories, mutations)
                nursery.start_soon(_forever, slots.watch)
                if self._took_over:
                    await files.restore()
                try:
                    if self._held is not None:
                        await self._start_fastpath(nursery, self._held, operations, runtime, opened)
                    else:
                        self._mount(operations)
                    await nursery.start(control.serve, runtime / "control", self._commands())
                    nursery.start_soon(_forever, data.run)
                    nursery.start_soon(_forever, self._check_readers)
                    nursery.start_soon(self._terminate_on_signal)
                    nursery.start_soon(self._announce, operations, ready)
                    try:
                        await pyfuse3.main(min_tasks=MIN_IDLE_REQUESTS, max_tasks=MAX_REQUESTS)
                    except* OSError as group:
                        # An aborted connection ends the loop like this; so does an unmount while a request is read.
                        log.info("the kernel closed the connection: %s", group.exceptions[0])
                finally:
                    self._unmount()
                    if self._fastpath is not None:
                        with trio.CancelScope(shield=True):
                            await self._fastpath.stop()
                flushed = await data.flush(FLUSH_TIMEOUT_S)
                if not flushed:
                    log.warning("not everything could be written to the index; the next mount compares with the source")
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                    await files.close()
                slots.close()
                nursery.cancel_scope.cancel()
            return flushed
        finally:
            if self._fastpath is not None:
                self._fastpath.close()
            if self._held is not None:
                descriptor_store.remove()
                self._held.close()
            bind.remove()
            shutil.rmtree(runtime, ignore_errors=True)

    # --- the kernel's side -----------------------------------------------------------------------------------------

    def _mount(self, operations: Operations) -> None:
        options = {"default_permissions", "subtype=cachefs", "fsname=" + _option(self.config.source)}
        if self.config.options.read_only:
            options.add("ro")
        if self.config.allow_other:
            options.add("allow_other")
        with tempfile.TemporaryFile() as messages:
            # fusermount3 and libfuse say what is wrong on descriptor 2, and nowhere else.
            saved = os.dup(2)
            os.dup2(messages.fileno(), 2)
            try:
                pyfuse3.init(operations, self.config.mountpoint, options)
            except RuntimeError as error:
                messages.seek(0)
                said = messages.read().decode(errors="replace").strip().replace("\n", "; ")
                raise CacheFsError(f"cannot mount on {self.config.mountpoint}: {said or error}") from error
            finally:
                os.dup2(saved, 2)
                os.close(saved)

    def _mount_device(
        self, source: Source, opened: OpenedIndex, blob: Blob, options: Options, runtime: Path
    ) -> Inheritance:
        """Mount for the fast path: what it and every successor of ours need."""
        shared = Shared.create()
        shared.configure(options, seed=self._seed, root_device=source.root_device, threads=SERVING_THREADS)
        shared["run"], shared["floor"], shared["serving"] = opened.state.run, opened.state.floor, 1
        listener = launcher.listen(runtime / FASTPATH_SOCKET)
        device = fuse_device.mount(
            self.config.source,
            self.config.mountpoint,
            read_only=options.read_only,
            allow_other=self.config.allow_other,
        )
        held = Inheritance(device, shared, self._source_fd, blob.fd, listener)
        descriptor_store.put(held)
        return held

    async def _start_fastpath(
        self, nursery: trio.Nursery, held: Inheritance, operations: Operations, runtime: Path, opened: OpenedIndex
    ) -> None:
        self._fastpath = FastPath(
            held,
            runtime / FASTPATH_SOCKET,
            session=opened.session_path,
            durable=opened.durable_path,
            log_path=self._log_path,
            received=self._received,
            died=self._drop_dead_readers,
            unmounted=pyfuse3.terminate,
        )
        self._follow(held.shared)
        self._data.settled, self._data.failed = self._settled, self._append_elsewhere
        nursery.start_soon(_forever, partial(self._follow_forever, held.shared))
        pyfuse3.init(operations, self._fastpath.mountpoint_for_pyfuse3(), {"fsname=cachefs"})
        await nursery.start(self._fastpath.run)

    def _received(self, message: Message, a: int, b: int, data: bytes) -> None:
        """The fast path reports."""
        assert self._fastpath is not None
        if message is Message.SLAB:
            self._fastpath.send(Message.SLAB, self._blob.grant())
        elif message is Message.FILLED:
            self._data.filled(launcher.parse_filled(data))
        elif message is Message.CORRUPT:
            self._data.corrupt(a, b, int.from_bytes(data, "little"), "payload checksum")
        elif message is Message.REFUSED and self._held is not None:
            self._data.refused(OSError(a, os.strerror(a)))
            self._follow(self._held.shared)
        elif message is Message.IN_DOUBT:
            numbers, entries = touched(data)
            log.warning("a daemon died in the middle of a change to inodes %s: they are compared again", numbers)
            self._nursery.start_soon(self._filesystem.doubt, numbers, entries)

    def _follow(self, shared: Shared) -> None:
        """Let the fast path know what the index and the disk say."""
        shared["committed_bytes"] = self._opened.index.totals.blob_bytes
        shared["capacity_bytes"] = self._data.admission_bytes

    def _settled(self, report: int) -> None:
        assert self._held is not None
        self._follow(self._held.shared)  # before the number: what is settled must be counted by then
        self._held.shared["settled"] = report

    def _append_elsewhere(self) -> None:
        assert self._fastpath is not None
        self._fastpath.send(Message.SLAB, self._blob.grant())

    async def _follow_forever(self, shared: Shared) -> None:
        while True:
            self._follow(shared)
            await trio.sleep(FOLLOW_S)

    async def _announce(self, operations: Operations, ready: Callable[[], None]) -> None:
        await operations.initialized.wait()
        # Only now: what the kernel negotiates would override it.
        mounting.tune_kernel(self.config.mountpoint)
        ready()

    def _unmount(self) -> None:
        """Take the mount down if it is still there. libfuse leaves alone what is not its own any more."""
        with contextlib.suppress(RuntimeError):  # it was never initialised
            pyfuse3.close(unmount=True)
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
        return {"status": self._status, "invalidate": self._invalidate}

    async def _status(self, _: dict[str, object]) -> dict[str, object]:
        index = self._opened.index
        return {
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
            "write_behind_bytes": self._data.queued_bytes + self._fastpath_pending(),
            "uncommitted": len(index.dirty) + len(index.in_flight),
            **self._metrics.as_dict(),
            "source_ops": self._source_ops(),
            "source_timeouts": self._slots.timeouts,
            "source_stuck_calls": self._slots.stuck,
            **self._fastpath_status(),
            "run": self._opened.state.run,
        }

    def _source_ops(self) -> dict[str, int]:
        operations = Counter(self._source.counters.snapshot())
        if self._held is not None:
            counted = self._held.shared.counters()
            operations.update(open=counted.source_opens, read=counted.source_reads, fstat=counted.source_fstats)
        return {name: count for name, count in operations.items() if count}

    def _fastpath_pending(self) -> int:
        if self._held is None:
            return 0
        return self._held.shared["held_bytes"] + self._held.shared["pending_bytes"]

    def _fastpath_status(self) -> dict[str, object]:
        """What the fast path adds to our own counters."""
        if self._held is None or self._fastpath is None:
            return {"fastpath": None}
        counters = self._held.shared.counters()
        ours = self._metrics
        return {
            "fastpath": {
                "pid": self._fastpath.pid,
                "starts": self._fastpath.starts,
                "answered": counters.answered,
                "passed": self._held.shared.passed(),
            },
            "source_timeouts": self._slots.timeouts + counters.timeouts,
            "source_stuck_calls": self._slots.stuck + self._held.shared["stuck"],
            "skipped_admissions": ours.skipped_admissions + counters.skipped_admissions,
            "hits": ours.hits + counters.hits,
            "misses": ours.misses + counters.misses,
            "hit_bytes": ours.hit_bytes + counters.hit_bytes,
            "miss_bytes": ours.miss_bytes + counters.miss_bytes,
        }

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


def _option(value: str) -> str:
    """fsname in libfuse's option syntax: commas and backslashes escaped; only ASCII gets through pyfuse3."""
    return value.replace("\\", "\\\\").replace(",", "\\,").encode("ascii", "replace").decode()


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
