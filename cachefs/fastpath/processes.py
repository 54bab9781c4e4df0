"""Processes of fast paths: the program that is installed, and what the process table (/proc) says of those that run.

A fast path is found by the name of the memory that it shares, and its descriptors can be taken without its help
(pidfd_getfd(2)): one that was stopped answers no request.
"""

import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cachefs.fastpath.mount_descriptors import MountDescriptors
from cachefs.system.syscalls import pidfd_getfd

PROGRAM = Path(__file__).parent / "cachefs-fastpath"
STOP_TIMEOUT_S = 15.0
LOOK_S = 0.5
_HELD_OPTIONS = ("--device", "--shared", "--source", "--blob", "--listener")


def is_built() -> bool:
    return os.access(PROGRAM, os.X_OK)


@dataclass(frozen=True, slots=True)
class Running:
    """A fast path, found in the process table by the name of the memory that it shares."""

    pid: int
    fds: tuple[int, ...]
    """There: /dev/fuse, shared memory, source, blob, listener."""

    def inherit(self) -> MountDescriptors:
        """Take what it holds, without asking: it may be stopped. Raises OSError, OtherVersion."""
        pidfd = os.pidfd_open(self.pid)
        fds: list[int] = []
        try:
            for fd in self.fds:
                fds.append(pidfd_getfd(pidfd, fd))
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        finally:
            os.close(pidfd)
        return MountDescriptors.of(fds)

    def kill(self) -> bool:
        """Returns when it has ended. False: it does not, as it waits in the kernel."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while is_running(self.pid) and time.monotonic() < deadline:
                if select.select([pidfd], [], [], LOOK_S)[0]:  # not while the source holds a thread of it
                    return True
            return not is_running(self.pid)
        finally:
            os.close(pidfd)


def memory_name(link: str) -> str:
    """What a memfd was called when it was made."""
    return os.readlink(link).removeprefix("/memfd:").removesuffix(" (deleted)")


def _runs_our_program(process: Path) -> bool:
    """`process`: its directory in /proc. Raises OSError, StopIteration where it has ended.

    Any user can start a set-user-ID program with arguments and open files of their choice. Therefore this looks at the
    program itself and at all user ids of the process, not only the effective one.
    """
    if process.stat().st_uid != os.geteuid():  # most are sorted out by this
        return False
    program = os.path.basename(os.readlink(process / "exe")).removesuffix(" (deleted)")  # deleted: by an upgrade
    lines = (process / "status").read_text(errors="replace").splitlines()
    ids = next(line for line in lines if line.startswith("Uid:")).split()[1:]
    return program == PROGRAM.name and set(map(int, ids)) == {os.geteuid()}


def running(name: str) -> list[Running]:
    """The fast paths of this user that share the memory of this name. More than one is a mistake."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if not _runs_our_program(process):
                continue
            command = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            fds = tuple(int(command[command.index(option) + 1]) for option in _HELD_OPTIONS)
            if memory_name(f"{process}/fd/{fds[1]}") == name:
                found.append(Running(int(process.name), fds))
        except (OSError, ValueError, StopIteration):  # it has ended, or is another program
            continue
    return found


def is_running(pid: int) -> bool:
    """Zombies do not run."""
    try:  # of its first thread: the file of the process adds up what all of them have used
        return Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def is_installed(pid: int) -> bool:
    """Is what this process runs the program that is installed now? An upgrade has put another one in its place."""
    try:
        return os.path.samefile(f"/proc/{pid}/exe", PROGRAM)
    except OSError:
        return False
