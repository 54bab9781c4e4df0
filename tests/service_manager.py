"""The part of systemd that a mount sees, for tests: readiness, watchdog, descriptor store."""

import contextlib
import fcntl
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cachefs.client.client import Client
from cachefs.errors import CacheFsError
from tests.conftest import CLI, REPOSITORY, Mount, mounted_on, wait_for


class ServiceManager:
    """Plays systemd: keeps the descriptors that the daemon stores, and starts it with them again."""

    def __init__(self, directory: Path, command: list[object], *, watchdog_s: float | None = None) -> None:
        self.command = [str(part) for part in command]
        self.watchdog_s = watchdog_s
        self.said: list[str] = []
        """Every assignment so far."""
        self.path = directory / "notify"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        self.socket.settimeout(0.0)
        self.stored: dict[str, int] = {}
        self.process: subprocess.Popen[bytes] | None = None

    def collect(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data, fds, _, _ = socket.recv_fds(self.socket, 4096, 4)
                said = data.decode().split("\n")
                self.said += said
                name = next((each.removeprefix("FDNAME=") for each in said if each.startswith("FDNAME=")), "")
                if fds:
                    self.stored[name] = fds[0]
                elif "FDSTOREREMOVE=1" in said and name in self.stored:
                    os.close(self.stored.pop(name))

    def start(self) -> None:
        self.collect()
        fds = list(self.stored.values())

        def give() -> None:
            high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds]
            for index, fd in enumerate(high):
                os.dup2(fd, 3 + index)
            os.environ["NOTIFY_SOCKET"] = str(self.path)
            os.environ["LISTEN_PID"] = str(os.getpid())
            os.environ["LISTEN_FDS"] = str(len(fds))
            os.environ["LISTEN_FDNAMES"] = ":".join(self.stored)
            if self.watchdog_s is not None:
                os.environ["WATCHDOG_USEC"] = str(int(self.watchdog_s * 1e6))
                os.environ["WATCHDOG_PID"] = str(os.getpid())

        self.process = subprocess.Popen(
            [*CLI, *self.command], cwd=REPOSITORY, preexec_fn=give, pass_fds=range(3, 3 + len(fds))
        )

    def heard(self, assignment: str, *, since: int = 0) -> bool:
        """Has the daemon said so? `since`: how much of what it said is too old."""
        self.collect()
        return assignment in self.said[since:]

    def kill_and_wait(self, number: int) -> int:
        """Send a signal; the exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def close(self) -> None:
        self.collect()
        self.socket.close()
        for fd in self.stored.values():
            os.close(fd)
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)


def status(place: Path) -> dict[str, Any]:
    """Of the mount there; empty while nothing answers."""
    try:
        return Client(place).status()
    except CacheFsError:
        return {}


@contextlib.contextmanager
def services(directory: Path) -> Iterator[Callable[..., ServiceManager]]:
    """`start(source, *arguments)`: a mount on directory/mnt whose manager is this test; ready."""
    place = directory / "mnt"
    made: list[ServiceManager] = []

    def start(source: Path, *arguments: object, watchdog_s: float | None = None) -> ServiceManager:
        place.mkdir()
        command = [
            "mount",
            source,
            place,
            "--cache-dir",
            directory / "cache",
            "--foreground",
            *Mount.given(),
            *arguments,
        ]
        manager = ServiceManager(directory, command, watchdog_s=watchdog_s)
        made.append(manager)
        manager.start()
        wait_for(lambda: manager.heard("READY=1"), bool)
        return manager

    yield start
    for manager in made:
        manager.close()
    assert not mounted_on(place)
