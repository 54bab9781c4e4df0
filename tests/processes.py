"""Commands in the background, the processes of a mount, and what a mount leaves behind."""

import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cachefs.client import locations, mount_table
from cachefs.client.client import Client
from cachefs.errors import CacheFsError
from cachefs.fastpath import processes
from tests.conftest import CLI, REPOSITORY, Mount, wait_for


def start(*arguments: object, stdout: int = subprocess.PIPE, pass_fds: Iterable[int] = ()) -> subprocess.Popen[str]:
    """The command line, in the background."""
    command = [*CLI, *map(str, arguments), *(Mount.given() if arguments[0] == "mount" else [])]
    return subprocess.Popen(
        command, cwd=REPOSITORY, stdout=stdout, stderr=subprocess.PIPE, text=True, pass_fds=tuple(pass_fds)
    )


def has_forked(process: subprocess.Popen[str]) -> bool:
    """Whether the daemon has started, in a session of its own."""
    with suppress(OSError):
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[3] == child:
                return True
    return False


def wait_for_end(pid: int) -> None:
    wait_for(lambda: processes.is_running(pid), lambda is_there: not is_there, timeout_s=60)


def state(pid: int) -> str:
    """As ps shows it; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def stop(pid: int) -> None:
    """Returns when the process has stopped. Right after the signal its threads may still run for a moment."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: state(pid), lambda now: now == "T")


def device_of(place: Path) -> str:
    top = mount_table.top_mount(str(place))
    assert top is not None
    return top.device


def fastpath_pid(m: Mount) -> int:
    return int(m.status()["fastpath"]["pid"])


def kill_fastpath(m: Mount) -> None:
    """Returns when another one is running."""
    pid = fastpath_pid(m)
    os.kill(pid, signal.SIGKILL)
    m.killed_fastpaths += 1
    wait_for(lambda: m.status()["fastpath"]["pid"], lambda now: now not in (0, pid))


def left_behind(place: Path) -> list[str]:
    """Runtime directories, claims and binds of mounts on this mountpoint."""
    found = [str(path) for path in locations.runtime_root().glob(f"*{locations.path_id(str(place))}*")]
    return found + [m.mountpoint for m in mount_table.mounts() if locations.path_id(str(place)) in m.mountpoint]


def daemon_pid(place: Path) -> int:
    """0 where none answers."""
    try:
        return int(Client(place).status()["pid"])
    except CacheFsError:
        return 0


@contextmanager
def connections(directory: Path) -> Iterator[Path]:
    """The kernel's control files of FUSE connections."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "fusectl", "fusectl", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)
