"""Serving a mount that is open: from the first look at its root until nothing of it is left to write.

The filesystem's objects are there (wiring.py). This brings the index to where the kernel is, starts the fast path, the
control socket, the metrics and the background tasks, says that the mount is ready, and runs pyfuse3's loop.
"""

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio
from rich.filesize import decimal

from cachefs.errors import CacheFsError
from cachefs.fuse.loop import RequestLoop
from cachefs.prefetch.engine import PrefetchEngine
from cachefs.prefetch.hints import Hints
from cachefs.prefetch.queue import OwnPrefetchQueue
from cachefs.source.directories import ROOT
from cachefs.store.index.records import ROOT_INODE
from daemon import tasks
from daemon.config import config
from daemon.config.config import MountConfig
from daemon.config.parameters import parse_address
from daemon.control import server
from daemon.control.commands import Commands
from daemon.ending import Ending
from daemon.fastpath_host import FastPathHost
from daemon.kernel import mounts
from daemon.kernel.source_connection import SourceConnection
from daemon.mount.mount import Mount
from daemon.service import service_manager
from daemon.service.watchdog import Probe
from daemon.signals import Configuration, Lifecycle, Reread
from daemon.wiring import Components, make_prefetcher

log = logging.getLogger(__name__)


class Serving:
    def __init__(
        self,
        mount_config: MountConfig,
        reread: Reread,
        lifecycle: Lifecycle,
        mount: Mount,
        components: Components,
        nursery: trio.Nursery,
        *,
        default_size: Callable[[], int],
        log_path: Path | None,
        started: float,
    ) -> None:
        """`default_size`: of the cache. `log_path`: of the fast path; None: our stderr. `started`: time.monotonic()."""
        # dependencies
        self._lifecycle = lifecycle
        self._mount = mount
        self._components = components
        self._nursery = nursery
        # constants
        self._source, self._mountpoint = mount_config.source, mount_config.mountpoint
        self._runtime = mount.instance.directory
        self._started = started
        # state
        self._ending = Ending(lifecycle, mount, components)
        self._host: FastPathHost | None = None
        if mount.descriptors is not None:
            self._host = FastPathHost(
                mount.descriptors,
                self._runtime,
                components,
                nursery,
                log_path=log_path,
                died=partial(tasks.drop_dead_readers, components.opened.index),
                unmounted=self._ending.stop,
            )
        path = self._runtime / config.CONFIG_NAME
        self._configuration = Configuration(mount_config, reread, path, components, self._host, default_size)

    async def run(self, ready: Callable[[], None]) -> bool:
        """Serve until the mount is gone or we are told to stop. True if everything was flushed.

        `ready`: called when requests are being answered. Does not return where the mount is left to a successor.
        """
        components, ending, nursery = self._components, self._ending, self._nursery
        tasks.start(nursery, [components.notifier.run, components.call_pool.watch])  # what follows needs them
        connection = self._connect()
        restored = self._mount.restore(components)
        await self._record_root()
        served = os.dup(self._mount.device) if self._host is None else self._host.descriptor_for_pyfuse3()
        loop = RequestLoop(components.operations, served)
        try:
            await self._start(connection)
            nursery.start_soon(components.descriptors.reopen, restored)
            nursery.start_soon(self._announce, ready)
            nursery.start_soon(ending.end_loop, loop)
            self._lifecycle.serve(ending.stop, self._configuration.reload, can_leave=self._host is not None)
            nursery.start_soon(ending.watch_for_unmount)
            try:
                with ending.serving:
                    await loop.run()
            except* OSError as group:
                # An aborted connection ends the loop like this; so does an unmount while a request is read.
                log.info("the kernel closed the connection: %s", group.exceptions[0])
            await ending.leave_if_told()
        finally:
            await ending.end_mount(loop, self._host)
        return await ending.flush()

    def _connect(self) -> SourceConnection:
        components, source = self._components, self._components.source
        root = self._mount.source_root(components)
        root.save(components.opened.index)

        def changed() -> None:
            if self._host is not None:
                self._host.source_changed(source.root_device)

        connection = SourceConnection(self._source, root, source, components.call_pool, changed)
        if not self._mount.is_new:
            connection.doubt()
        return connection

    async def _record_root(self) -> None:
        metadata, filesystem, source = self._components.metadata, self._components.filesystem, self._components.source
        with metadata.index.view() as view:
            if metadata.inode(view, ROOT_INODE) is not None:
                return
        began_ns = source.clock.realtime_ns()
        now = await self._components.call_pool.run(partial(source.lstat, ROOT))
        with metadata.index.update() as update:
            root = metadata.apply_root(update, now, pin=filesystem.pins(b""))
            filesystem.permissions.recorded(root, now, began_ns)

    async def _start(self, connection: SourceConnection) -> None:
        """What answers requests besides pyfuse3, and works in the background."""
        components, host, is_new = self._components, self._host, self._mount.is_new
        queue = host.prefetch_queue if host is not None else OwnPrefetchQueue(components.files, self._nursery)
        engine = PrefetchEngine(components.data, queue)
        prefetcher = make_prefetcher(components, engine)
        hints = Hints(components.filesystem, components.files, engine)
        tasks.start_all(self._nursery, self._mount, components, host, connection, hints, prefetcher)
        if host is not None:
            await host.start(new=is_new, replace=self._mount.replaces_fastpath)
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
            started=self._started,
        )
        afterwards = {"leave": self._lifecycle.dismissed}
        await self._nursery.start(server.serve, self._runtime / "control", commands.by_name(), afterwards)
        if self._configuration.now.metrics is not None:
            await self._serve_metrics(self._configuration.now.metrics, commands)

    async def _serve_metrics(self, address: str, commands: Commands) -> None:
        """Raises CacheFsError where it cannot be; a mount with jobs on it does not end for that."""
        from daemon.control import exporter  # prometheus_client is of no use to those who do not ask for it

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
        # Only now: what the kernel negotiates would override it.
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
            f"{decimal(totals.blob_bytes)} of {decimal(data.size_bytes)}"
        )
