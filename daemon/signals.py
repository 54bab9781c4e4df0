"""How a daemon is controlled while it runs: by signals, and by `leave` on the control socket.

A daemon starts, serves and ends. SIGTERM ends the daemon and the mount; before requests are served it cancels the
start, and all steps are undone. SIGUSR1 ends the daemon and leaves the mount to another one; during the start it takes
effect when requests are served. SIGHUP reads the configuration file again.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import click
import trio

from cachefs.errors import CacheFsError
from cachefs.system.threads import in_thread
from daemon.config import config
from daemon.config.config import MountConfig
from daemon.control import server
from daemon.fastpath_host import FastPathHost
from daemon.mount.mount import Mount
from daemon.service import service_manager
from daemon.wiring import Components

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
READ_TIMEOUT_S = 10.0
MAX_READERS = 8
"""Threads that read the configuration file: one that hangs stays."""
Reread = Callable[[MountConfig], tuple[MountConfig, list[str]]]
"""Reads the configuration file again. Returns the new configuration, and the changed options that need a new mount.
Raises click.ClickException if the file is invalid."""


class Lifecycle:
    """How far a daemon has come, and how it will end."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.starting = trio.CancelScope()
        """Cancelled to end before requests are served."""
        self.is_ready = False
        self.told_to_end = False
        self.leaving = False
        self.successor: socket.socket | None = None
        """Receives the open source files when the daemon leaves. None: no successor wants them."""
        self.has_ended = False
        """Has served until the mount was gone, or until told to end."""
        self._stop: Callable[[], None] | None = None
        self._reload: Callable[[], None] = lambda: None
        self._can_leave = True

    @property
    def is_serving(self) -> bool:
        return self._stop is not None

    def ends(self, mount: Mount) -> bool:
        """Does the mount end with the daemon?"""
        return self.told_to_end or self.has_ended or mount.ends_with_daemon()

    def serve(self, stop: Callable[[], None], reload: Callable[[], None], *, can_leave: bool) -> None:
        """Requests are served from now on, until `stop` is called. `can_leave`: the mount outlives its daemon."""
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
        """A successor has received the answer to `leave`. Without that, the daemon stays."""
        if answer.get("descriptors"):
            self.successor = socket.socket(fileno=os.dup(connection))
        self.leave()

    async def obey(self, signals: AsyncIterator[int]) -> None:
        """A task: handle signals, for ever."""
        async for number in signals:
            if number == signal.SIGHUP:
                if self.is_serving:
                    self._reload()
            elif number == signal.SIGUSR1 and self._can_leave:
                log.info("leaving this mount to another daemon")
                self.leave()
            else:
                if self.is_serving:  # else the start fails, and says so
                    log.info("signal %d: unmounting", number)
                service_manager.notify("STOPPING=1")
                self.end()


@dataclass(eq=False)
class Configuration:
    """The current configuration of the mount, and its changes while mounted."""

    now: MountConfig
    reread: Reread
    path: Path
    """The file that it is saved in."""
    components: Components
    host: FastPathHost | None
    default_size: Callable[[], int]
    """The size of the cache in bytes, if the configuration has none."""
    _wanted: trio.Event = field(default_factory=trio.Event)
    _readers: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(MAX_READERS))

    def reload(self) -> None:
        """Read the configuration file again, soon."""
        self._wanted.set()

    async def follow(self) -> None:
        """A task: for ever."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            service_manager.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
            try:
                if (read := await self._read()) is not None:
                    self._apply(*read)
            finally:
                service_manager.notify("READY=1")

    async def _read(self) -> tuple[MountConfig, list[str]] | None:
        """What `reread` returns. None: the configuration stays as it is.

        In a thread: the file may be a FIFO, or lie on a filesystem that hangs, or on this very mount.
        """
        try:
            with trio.fail_after(READ_TIMEOUT_S):
                return await in_thread(partial(self.reread, self.now), abandon_on_cancel=True, limiter=self._readers)
        except click.ClickException as error:
            log.error("the configuration is unchanged: %s", error.format_message())
        except trio.TooSlowError:
            log.error("the configuration is unchanged: %s does not answer", self.now.config_file)
        except Exception:
            log.exception("bug in the configuration, which is unchanged")  # the mount does not end for that
        return None

    def _apply(self, now: MountConfig, waiting: list[str]) -> None:
        before, self.now = self.now, now
        logging.getLogger().setLevel(now.log_level.upper())
        self.components.call_pool.timeout_s = now.options.source_timeout_s
        if now.cache_size_bytes != before.cache_size_bytes:
            size = now.cache_size_bytes
            self.components.data.resize(self.default_size() if size is None else size)
        if self.host is not None:
            self.host.configure(now.options)
        self.save()
        if waiting:
            log.warning(
                "the configuration was reloaded, except: %s (restart the service, or unmount and mount)",
                ", ".join(waiting),
            )
        else:
            log.info("the configuration was reloaded")

    def save(self, *, must: bool = False) -> None:
        """Save it for `cachefs restart`. `must`: raise CacheFsError if that fails."""
        try:
            config.save(self.now, self.path)
        except OSError as error:
            message = f"cannot write {self.path}: {error.strerror}"
            if must:
                raise CacheFsError(message) from error
            self.components.writes.failed("configuration", f"{message}; a restart uses the last one that was written")
