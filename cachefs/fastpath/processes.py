"""Processes of fast paths: the installed program, and the running processes in /proc.

A fast path is found by the name of its shared memory. Its descriptors can be copied without its help
(pidfd_getfd(2)), because a stopped process answers no request.
"""

import errno
import os
import select
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from cachefs.fastpath.mount_descriptors import MountDescriptors
from cachefs.system.descriptors import closing
from cachefs.system.syscalls import pidfd_getfd

PROGRAM = Path(__file__).parent / "cachefs-fastpath"
STOP_TIMEOUT_S = 15.0
LOOK_S = 0.5
_DESCRIPTOR_OPTIONS = ("--device", "--shared", "--source", "--blob", "--listener")


def is_built() -> bool:
    return os.access(PROGRAM, os.X_OK)


@dataclass(frozen=True, slots=True)
class Running:
    """A running fast path, found by the name of its shared memory."""

    pid: int
    fds: tuple[int, ...]
    """Numbers in that process: /dev/fuse, shared memory, source, blob, listener."""

    def inherit(self) -> MountDescriptors:
        """Copy its descriptors without asking it: it may be stopped. Raises OSError, OtherVersion."""
        fds: list[int] = []
        with closing(os.pidfd_open(self.pid)) as pidfd, ExitStack() as on_error:
            for fd in self.fds:
                fds.append(pidfd_getfd(pidfd, fd))
                on_error.callback(os.close, fds[-1])
            on_error.pop_all()
        return MountDescriptors.of(fds)

    def kill(self) -> bool:
        """Returns when it has ended. False: it does not end, because it waits in the kernel."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        with closing(pidfd):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while is_running(self.pid) and time.monotonic() < deadline:
                # The descriptor is not readable while a thread of the program waits for the source.
                if select.select([pidfd], [], [], LOOK_S)[0]:
                    return True
            return not is_running(self.pid)


def memory_name(link: str) -> str:
    """The name that a memfd was created with."""
    return os.readlink(link).removeprefix("/memfd:").removesuffix(" (deleted)")


_COMM_LENGTH = 15
"""/proc/PID/comm shows so many bytes of the name of a program."""


def _runs_our_program(process: Path) -> bool:
    """`process`: its directory in /proc. Raises OSError or StopIteration if it has ended.

    Any user can start a set-user-ID program with arguments and open files of their choice. Therefore this checks the
    program itself and all user ids of the process, not only the effective one.
    """
    if process.stat().st_uid != os.geteuid():  # excludes most processes
        return False
    # The links of a process that is in execve(2) cannot be read before it has closed its files, which may hang.
    if (process / "comm").read_text(errors="replace").rstrip("\n") != PROGRAM.name[:_COMM_LENGTH]:
        return False
    program = os.path.basename(os.readlink(process / "exe")).removesuffix(" (deleted)")  # deleted: by an upgrade
    lines = (process / "status").read_text(errors="replace").splitlines()
    ids = next(line for line in lines if line.startswith("Uid:")).split()[1:]
    return program == PROGRAM.name and set(map(int, ids)) == {os.geteuid()}


def running(name: str) -> list[Running]:
    """The fast paths of this user with shared memory of this name. There should be at most one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if not _runs_our_program(process):
                continue
            command = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            fds = tuple(int(command[command.index(option) + 1]) for option in _DESCRIPTOR_OPTIONS)
            if memory_name(f"{process}/fd/{fds[1]}") == name:
                found.append(Running(int(process.name), fds))
        except (OSError, ValueError, StopIteration):  # it has ended, or is another program
            continue
    return found


def is_running(pid: int) -> bool:
    """False for zombies. True if this process has no descriptor left to look: two fast paths must not run."""
    try:  # of its first thread: reading the file of the process sums up the counters of all threads
        return Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def is_installed(pid: int) -> bool:
    """Does this process run the installed program? An upgrade may have replaced the file."""
    try:
        return os.path.samefile(f"/proc/{pid}/exe", PROGRAM)
    except OSError:
        return False
