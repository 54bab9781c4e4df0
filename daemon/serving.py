"""Serving a mount that is open: from the first look at its root until everything is written.

wiring.py has made the filesystem's objects. `Serving` restores the state of the last daemon, starts the fast path, the
control socket, the metrics and the background tasks, reports that the mount is ready, and runs pyfuse3's loop. It stops
in one of two ways.

The mount ends: unmount → answer requests under way; those that wait for the source fail with ETIMEDOUT after
LAST_CALLS_S → end the fast path → write what is queued → close files.

The mount is left to a successor: read what the kernel has sent → write what is queued, for HAND_OVER_S → save the
notifications that are not confirmed, and drain the session → send the open source files → exit as a daemon that dies
does. The successor answers the remaining requests: it repeats the calls that can be repeated.
"""

import logging
import os
from collections.abc import Callable
from functools import partial

import trio

from cachefs.client import hand_over
from cachefs.client.mount_table import mountpoints_beneath
from cachefs.contract.index import ROOT_INODE
from cachefs.errors import CacheFsError
from cachefs.fuse.loop import RequestLoop
from cachefs.options import Revalidate
from cachefs.prefetch.engine import PrefetchEngine
from cachefs.prefetch.hints import Hints
from cachefs.prefetch.prefetcher import Prefetcher
from cachefs.prefetch.queue import OwnPrefetchQueue
from cachefs.source.directories import ROOT
from cachefs.store import runs
from cachefs.store.filesystem import numbers_snapshots, numbers_stay
from daemon import tasks
from daemon.config import config
from daemon.config.config import MountConfig
from daemon.config.parameters import parse_address
from daemon.control import server
from daemon.control.commands import Commands
from daemon.fastpath_host import FastPathHost, drop_dead_readers
from daemon.kernel import mounts
from daemon.kernel.source_connection import SourceConnection
from daemon.mount.mount import Mount
from daemon.output import readable_size
from daemon.service import background, service_manager
from daemon.service.watchdog import Probe
from daemon.signals import Configuration, Lifecycle, Reread
from daemon.wiring import Components, make_prefetcher

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 60.0
HAND_OVER_S = 10.0
"""How long calls wait, at most, while a replaced daemon writes what is queued. The rest is lost, as in a crash."""
LAST_CALLS_S = 3.0
"""How long to wait for calls to the source that are under way when a mount ends, or is left to a successor."""
LAST_ANSWERS_S = 2.0
"""How much longer to wait for requests when a mount ends: those whose calls were abandoned must be answered."""
CLOSE_S = 5.0
READER_CHECK_S = 60.0
FOLLOW_S = 1.0
TELL_S = 1.0
"""How often the kernel is told of permissions that no request was told of."""
COLLECT_S = 0.1
UNMOUNT_POLL_S = 0.5
_ANSWER_POLL_S = 0.05


class Serving:
    def __init__(
        self,
        mount_config: MountConfig,
        reread: Reread,
        lifecycle: Lifecycle,
        mount: Mount,
        components: Components,
        nursery: trio.Nursery,
        default_size: Callable[[], int],
    ) -> None:
        """`default_size`: of the cache, in bytes."""
        # dependencies
        self._lifecycle = lifecycle
        self._mount = mount
        self._components = components
        self._nursery = nursery
        # constants
        self._source, self._mountpoint = mount_config.source, mount_config.mountpoint
        self._runtime = mount.instance.directory
        # state
        self._requests = trio.CancelScope()
        """The requests under way. Cancelled when the mount ends, or is left to a successor, and waits no longer."""
        self._told = trio.Event()
        self._is_over = False
        self._host: FastPathHost | None = None
        if mount.descriptors is not None:
            self._host = FastPathHost(
                mount.descriptors,
                self._runtime,
                components,
                nursery,
                log_path=None if mount_config.foreground else mount_config.cache_place / background.LOG_NAME,
                unmounted=self._stop,
            )
        path = self._runtime / config.CONFIG_NAME
        self._configuration = Configuration(mount_config, reread, path, components, self._host, default_size)

    async def run(self, ready: Callable[[], None]) -> bool:
        """Serve until the mount is gone or the daemon is told to stop. True if everything was flushed.

        `ready`: called when requests are being answered. Does not return if the mount is left to a successor.
        """
        components, nursery = self._components, self._nursery
        tasks.start(nursery, [components.notifier.run, components.call_pool.watch])  # the next steps need them
        connection = self._connect()
        self._mount.restore(components)
        await self._record_root()
        if self._mount.is_new:
            place = os.readlink(f"/proc/self/fd/{components.source.root_fd}")
            components.invalidation.doubt_mountpoints(map(os.fsencode, mountpoints_beneath(place)))
        served = os.dup(self._mount.device) if self._host is None else self._host.fastpath.descriptor_for_pyfuse3()
        loop = RequestLoop(components.operations, served)
        try:
            await self._start(connection)
            await components.notifier.started.wait()
            nursery.start_soon(components.descriptors.reopen, self._mount.adopt_open_files(components))
            if components.opened.lost_records:
                nursery.start_soon(components.drop_names)
            nursery.start_soon(self._announce, ready)
            nursery.start_soon(self._end_loop, loop)
            self._lifecycle.serve(self._stop, self._configuration.reload, can_leave=self._host is not None)
            nursery.start_soon(self._watch_for_unmount)
            try:
                with self._requests:
                    await loop.run()
            except* OSError as group:
                # An aborted connection ends the loop like this; so does an unmount while a request is read.
                log.info("the kernel closed the connection: %s", group.exceptions[0])
            await self._leave_if_told()
        finally:
            await self._end_mount(loop)
        return await self._flush()

    # --- start -----------------------------------------------------------------------------------------------------

    def _connect(self) -> SourceConnection:
        components, source = self._components, self._components.source
        root = self._mount.source_root(components)
        root.save(components.opened.index)
        if not root.numbers_last:
            source.connection = source.connection._replace(number=self._connection_number())
        elif numbers_snapshots(root.fstype):
            source.connection.volumes.number_snapshots(self._connection_number(), root.inode)
        source.connection.volumes.look_at_users(allow_other=self._configuration.now.allow_other)
        # The type with which it was mounted: a source that was detached has none in the mount table.
        if not numbers_stay(root.fstype):
            source.connection.volumes.forgo_numbers()

        def changed() -> None:
            components.descriptors.save_losses()  # before a successor can get the new source from the fast path
            components.metadata.paths.forget()
            runs.save_connection(components.opened.index, source.connection.counted)
            if self._host is not None:
                self._host.source_changed(source.root_device)

        connection = SourceConnection(self._source, root, source, components.call_pool, changed)
        if not self._mount.is_new:
            connection.doubt()
        return connection

    def _connection_number(self) -> int:
        """Inode numbers of the source count in one connection only: its number, which a successor goes on with."""
        opened = self._components.opened
        if self._mount.is_new:
            runs.save_connection(opened.index, runs.first_connection(opened.state.run))
        return runs.saved_connection(opened.index)

    async def _record_root(self) -> None:
        metadata, filesystem, source = self._components.metadata, self._components.filesystem, self._components.source
        with metadata.index.view() as view:
            if metadata.inode(view, ROOT_INODE) is not None:
                return
        began_ns = source.clock.realtime_ns()
        now = await self._components.call_pool.run(partial(source.lstat, ROOT))
        with metadata.index.update() as update:
            root = metadata.apply_root(update, now, pin=filesystem.pins(b""))
            filesystem.permissions.recorded(update, root, now, began_ns)

    async def _start(self, connection: SourceConnection) -> None:
        """Start the fast path, the background tasks, the control socket and the metrics."""
        components, host, is_new = self._components, self._host, self._mount.is_new
        queue = host.prefetch_queue if host is not None else OwnPrefetchQueue(components.files, self._nursery)
        engine = PrefetchEngine(
            components.data,
            queue,
            components.filesystem,
            components.directories,
            components.files,
            components.attributes,
        )
        prefetcher = make_prefetcher(components, engine)
        hints = Hints(engine)
        self._start_tasks(connection, hints, prefetcher)
        if host is not None:
            await host.start(new=is_new, replace=self._mount.replaces_fastpath or components.opened.lost_records)
        self._configuration.save(must=is_new)
        commands = Commands(
            lambda: self._configuration.now,
            components,
            host,
            prefetcher,
            engine,
            hints,
            connection,
            self._nursery,
            self._lifecycle.started,
            self._mount.is_detached,
        )
        afterwards = {"leave": self._lifecycle.dismissed}
        await self._nursery.start(server.serve, self._runtime / "control", commands.by_name(), afterwards)
        if self._configuration.now.metrics is not None:
            await self._serve_metrics(self._configuration.now.metrics, commands)

    def _start_tasks(self, connection: SourceConnection, hints: Hints, prefetcher: Prefetcher | None) -> None:
        """The fast path may be attached later: what is sent to it before is sent again."""
        components, host = self._components, self._host
        options, index = components.options, components.opened.index
        started: list[tasks.Task] = [
            connection.run,
            self._configuration.follow,
            components.writes.run,
            hints.run,
            components.young.run,
            partial(tasks.every, READER_CHECK_S, partial(drop_dead_readers, index)),
            partial(tasks.drain, index),
            partial(tasks.every, TELL_S, components.filesystem.permissions.tell),
            partial(tasks.let_go_of_volumes, components),
            tasks.watch_clock,
        ]
        if host is not None:
            started += [
                partial(tasks.every, FOLLOW_S, host.refresh),
                partial(tasks.every, COLLECT_S, host.collect_young),
            ]
            if options.logs_accesses:
                started.append(partial(tasks.every, COLLECT_S, host.collect_accesses))
        if components.limit is not None:
            components.data.on_accessed.add(components.limit.accessed)
            started.append(partial(components.invalidation.limit_metadata, components.limit, components.metrics))
        if prefetcher is not None:
            started += [prefetcher.run] if prefetcher.check is None else [prefetcher.run, prefetcher.check.run]
        if options.revalidate in (Revalidate.AUTO, Revalidate.RCTIME):
            started.append(partial(tasks.revalidate_earlier_runs, self._mount, components))
        tasks.start(self._nursery, started)

    async def _serve_metrics(self, address: str, commands: Commands) -> None:
        """Raises CacheFsError if that fails on a new mount; a mount with jobs on it continues without metrics."""
        from daemon.control import exporter  # only mounts with --metrics load prometheus_client

        try:
            listener = await exporter.listen(parse_address(address))
        except CacheFsError as error:
            if self._mount.is_new:
                raise
            log.error("%s", error)
            return
        tasks.start(self._nursery, [partial(exporter.serve, listener, commands.status_now)])

    async def _announce(self, ready: Callable[[], None]) -> None:
        await self._components.operations.initialized.wait()
        # Only now: the negotiation with the kernel would override it.
        mounts.tune_kernel(self._mount.instance.device)
        if not self._mount.instance.is_mounted():
            raise CacheFsError(f"{self._mountpoint} was unmounted before the mount was ready")
        if service_manager.is_there():
            await service_manager.announce(Probe(self._mountpoint), self._status_line, ready)
        else:
            ready()

    def _status_line(self) -> str:
        data, totals = self._components.data, self._components.opened.index.totals
        return (
            f"{self._source} on {self._mountpoint}: {totals.cached_files:,} files cached, "
            f"{readable_size(totals.blob_bytes)} of {readable_size(data.size_bytes)}"
        )

    # --- no more requests are read ---------------------------------------------------------------------------------

    def _stop(self) -> None:
        if self._is_over:
            return
        if self._lifecycle.leaving:
            self._components.notifier.leave_to_successor()
            self._shorten(LAST_CALLS_S)
        else:
            self._hurry()
        self._told.set()

    async def _end_loop(self, loop: RequestLoop) -> None:
        """A task. Requests that pyfuse3 has not read are left to a successor."""
        await self._told.wait()
        if self._lifecycle.leaving:
            await loop.end_when_read()
        else:
            loop.end()

    async def _watch_for_unmount(self) -> None:
        """A task. After an unmount pyfuse3 waits for the requests that are under way."""
        while not self._mount.is_unmounted():  # noqa: ASYNC110
            await trio.sleep(UNMOUNT_POLL_S)
        self._hurry()

    def _hurry(self) -> None:
        """The mount ends: requests that wait for the source fail soon, with ETIMEDOUT."""
        self._components.call_pool.hurry(LAST_CALLS_S)
        if self._mount.descriptors is not None:
            self._mount.descriptors.shared.hurry(LAST_CALLS_S)
        self._shorten(LAST_CALLS_S + LAST_ANSWERS_S)

    def _shorten(self, left_s: float) -> None:
        self._requests.deadline = min(self._requests.deadline, trio.current_time() + left_s)

    # --- drain and exit --------------------------------------------------------------------------------------------

    async def _leave_if_told(self) -> None:
        """No request is read any more. Does not return if the mount is left to a successor."""
        self._lifecycle.has_ended = not self._lifecycle.leaving
        if not self._lifecycle.leaving or self._mount.is_unmounted():
            return
        await self._components.writes.flush_queued(HAND_OVER_S)  # the fast path may fetch all the time
        self._components.notifier.save(self._components.opened.index)
        while self._components.opened.index.drain():
            pass
        self._components.notifier.kill()
        self._hand_over()
        log.info("leaving the mount to the next daemon")
        os._exit(0)  # as a daemon that dies; the successor repeats the calls that the source has not answered

    def _hand_over(self) -> None:
        """Nothing is served any more: open files stay as they are."""
        if self._lifecycle.successor is None:
            return
        try:
            hand_over.send(self._lifecycle.successor, self._components.descriptors.opened_at_source())
        except OSError as error:
            log.warning("the next daemon does not take the open files (%s), and opens them by path", error)

    async def _end_mount(self, loop: RequestLoop) -> None:
        """Serving has ended in some way. Unmount, unless the mount is left to another daemon."""
        self._is_over = True
        loop.close()
        if not self._lifecycle.ends(self._mount):
            return
        self._mount.unmount()
        self._components.notifier.end()
        if self._host is not None:
            with trio.CancelScope(shield=True):
                await self._let_fastpath_answer()
                await self._host.stop()

    async def _let_fastpath_answer(self) -> None:
        """A detached mount lives while jobs use it: the kernel has not ended the requests that they wait for."""
        assert self._mount.descriptors is not None
        self._mount.descriptors.shared.hurry(_ANSWER_POLL_S)  # the kernel repeats a READ that failed
        with trio.move_on_at(min(self._requests.deadline, trio.current_time() + LAST_CALLS_S)):
            while not self._mount.is_unmounted():  # noqa: ASYNC110
                await trio.sleep(_ANSWER_POLL_S)
            return
        # A thread that hangs in the source would keep the connection, and its requests.
        self._mount.instance.abort(self._mount.is_unmounted)

    async def _flush(self) -> bool:
        """True if everything was written."""
        flushed = await self._components.writes.flush(FLUSH_TIMEOUT_S)
        if not flushed:
            log.warning("could not write everything to the index; the next mount compares everything with the source")
        else:
            log.info("unmounted %s; all data are on disk", self._mountpoint)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
            await self._components.files.close()
        self._components.call_pool.close()
        return flushed
