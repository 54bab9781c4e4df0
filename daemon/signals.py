"""What a daemon is told while it runs: by signals, and by `leave` on the control socket.

A daemon starts, serves and ends. SIGTERM ends the mount with it; until requests are served that cancels the start, and
everything goes back the same way. SIGUSR1 makes it end and leave the mount to another daemon; while it starts, that
waits until it serves. SIGHUP makes it read its configuration file again.
"""

import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import click
import trio

from cachefs.errors import CacheFsError
from daemon.config import config
from daemon.config.config import MountConfig
from daemon.control import server
from daemon.fastpath_host import FastPathHost
from daemon.mount.mount import Mount
from daemon.service import background, service_manager
from daemon.wiring import Components

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
Reread = Callable[[MountConfig], tuple[MountConfig, list[str]]]
"""What the configuration file says now, and which of its options only a new mount takes up. Raises click.ClickException
where it makes no sense."""


class Lifecycle:
    """How far a daemon is, and how it is to end."""

    def __init__(self) -> None:
        self.starting = trio.CancelScope()
        """Cancelled to end before requests are served."""
        self.is_ready = False
        self.told_to_end = False
        self.leaving = False
        self.successor: socket.socket | None = None
        """Gets what is open at the source when we leave. None: there is none yet, or it does not want that."""
        self.has_ended = False
        """Served until the mount was gone, or until told to end."""
        self._stop: Callable[[], None] | None = None
        self._reload: Callable[[], None] = lambda: None
        self._can_leave = True

    @property
    def is_serving(self) -> bool:
        return self._stop is not None

    def ends(self, mount: Mount) -> bool:
        """Does the mount end with us?"""
        return self.told_to_end or self.has_ended or mount.ends_with_daemon()

    def serve(self, stop: Callable[[], None], reload: Callable[[], None], *, can_leave: bool) -> None:
        """Requests are served from now on. `stop`: makes that end. `can_leave`: the mount outlives its daemon."""
        self._stop, self._reload, self._can_leave = stop, reload, can_leave
        if self.leaving:
            stop()

    def end(self) -> None:
        self.told_to_end = True
        if self._stop is None:
            self.starting.cancel()
        else:
            self._stop()

    def leave(self) -> None:
        self.leaving = True
        if self._stop is not None:
            self._stop()

    def dismissed(self, answer: server.Answer, connection: int) -> None:
        """A successor has the answer to `leave`. If it has gone before that, we stay."""
        if answer.get("descriptors"):
            self.successor = socket.socket(fileno=os.dup(connection))
        self.leave()

    async def obey(self, signals: AsyncIterator[int]) -> None:
        """A task, for ever."""
        async for number in signals:
            if number == signal.SIGHUP:
                if self.is_serving:
                    service_manager.reloading()
                    self._reload()
                    service_manager.notify("READY=1")
            elif number == signal.SIGUSR1 and self._can_leave:
                log.info("another daemon is to go on with this mount")
                self.leave()
            else:
                log.info("signal %d: unmounting", number)
                service_manager.notify("STOPPING=1")
                self.end()


class Configuration:
    """How the mount is configured now. What may change while mounted does; for the rest see its documentation."""

    def __init__(
        self,
        mount_config: MountConfig,
        reread: Reread,
        path: Path,
        components: Components,
        host: FastPathHost | None,
        default_size: Callable[[], int],
    ) -> None:
        """`path`: where it is saved. `default_size`: of the cache, in bytes, where the configuration has none."""
        # dependencies
        self._reread = reread
        self._path = path
        self._components = components
        self._host = host
        self._default_size = default_size
        # state
        self.now = mount_config

    def reload(self) -> None:
        """Read the configuration file again."""
        try:
            now, waiting = self._reread(self.now)
        except click.ClickException as error:
            log.error("nothing is changed: %s", error.format_message())
            return
        before, self.now = self.now, now
        background.set_log_level(now.log_level)
        self._components.call_pool.timeout_s = now.options.source_timeout_s
        if now.cache_size_bytes != before.cache_size_bytes:
            size = now.cache_size_bytes
            self._components.data.resize(self._default_size() if size is None else size)
        if self._host is not None:
            self._host.configure(now.options)
        self.save()
        if waiting:
            log.warning("the configuration was read again; only a new mount takes up %s", ", ".join(waiting))
        else:
            log.info("the configuration was read again")

    def save(self, *, must: bool = False) -> None:
        """Write it down for `cachefs restart`. `must`: raise CacheFsError where there is no room."""
        try:
            config.save(self.now, self._path)
        except OSError as error:
            message = f"cannot write {self._path}: {error.strerror}"
            if must:
                raise CacheFsError(message) from error
            self._components.writes.failed("configuration", f"{message}; a restart goes on with the last one")
