"""Claims: lock files, each of which only one process at a time can have.

A claim ends with its process, however that ends. Its file is removed when the claim is released; the file of a killed
process is removed when another process takes any claim in the same directory.

A locked file may be removed only because every process that takes the lock checks afterwards that the path still leads
to the locked file.
"""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from cachefs.system import private_files
from cachefs.system.descriptors import closing

_PREFIX = "lock-"
_RETRY_S = 0.05
_TO_LOCK = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class Taken(Exception):
    """Another process has the claim or lock. The caller reports its pid."""

    def __init__(self, pid: str) -> None:
        super().__init__(pid)
        self.pid = pid


class Claim:
    """Lasts from `take` to `release`. A child that was forked meanwhile has it as well; either may release it."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def take(cls, directory: Path, name: str, *, patience_s: float = 0.0) -> "Claim":
        """Waits at most `patience_s`. Raises Taken."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return cls.try_to_take(directory, name)
            except Taken:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_RETRY_S)

    @classmethod
    def try_to_take(cls, directory: Path, name: str) -> "Claim":
        """Raises Taken."""
        _sweep(directory)
        path = directory / f"{_PREFIX}{name}"
        while True:
            fd = private_files.open_file(path, os.O_RDWR | os.O_CREAT)
            if not try_to_lock(fd):
                pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                raise Taken(pid)
            if is_at(fd, path):
                claim = cls(path, fd)
                claim.sign()
                return claim
            os.close(fd)  # its last process has just removed it

    def sign(self) -> None:
        """Write the pid of this process to the file; not if the disk is full."""
        with suppress(OSError):
            _write(self._fd, f"{os.getpid()}\n")

    def release(self) -> None:
        if self._fd < 0:
            return
        if is_at(self._fd, self._path):
            self._path.unlink(missing_ok=True)
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # a child may have it open as well
        os.close(self._fd)
        self._fd = -1


def try_to_lock(fd: int) -> bool:
    """Lock an open file or directory until the descriptor is closed. False: another process has the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(fd: int, line: str) -> None:
    """Overwrite the file without freeing its block first: on a full disk we would not get it again."""
    os.pwrite(fd, line.encode(), 0)
    os.ftruncate(fd, len(line))


def is_at(fd: int, path: Path) -> bool:
    """Does the path still lead to the file of this descriptor?"""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def lock_for_good(path: Path) -> tuple[int, list[int]]:
    """Lock a file that stays when it is unlocked, such as that of a cache directory. Raises Taken.

    If the process with the lock was killed, its file is replaced, even if one of its threads still waits in the kernel
    for a source that hangs: it will never write to the cache again, and the kernel may be waiting for its successor.
    Returns the descriptor, and such processes: their calls to the source may still be carried out.
    """
    with closing(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        fcntl.flock(directory, fcntl.LOCK_EX)  # one process at a time: the file names its present holder
        was_tried_again, dying = False, dict[str, None]()
        while True:
            fd = private_files.open_file(path, os.O_RDWR | os.O_CREAT)
            is_locked_now = try_to_lock(fd)
            # The last process with the lock, and those that were dying then: it may have ended before them.
            lines = os.pread(fd, 4096, 0).decode(errors="replace").splitlines() or [""]
            dying |= dict.fromkeys(filter(_is_killed, lines))
            if is_locked_now:
                with suppress(OSError):  # the disk is full: the line of a dead process may stay
                    _write(fd, "".join(f"{line}\n" for line in (f"{os.getpid()} {_started('self')}", *dying)))
                return fd, [int(line.partition(" ")[0]) for line in dying]
            os.close(fd)
            if lines[0] in dying:
                path.unlink(missing_ok=True)
            elif was_tried_again:
                raise Taken(lines[0].partition(" ")[0] or "unknown")
            else:
                was_tried_again = True  # it may have ended since


def _is_killed(line: str) -> bool:
    """Is the process of this line of a lock file, its pid and start time, dying?"""
    pid, _, started = line.strip().partition(" ")
    return pid.isdigit() and is_dying(int(pid)) and _started(pid) == started


def is_locked(path: Path) -> bool:
    """Does another process have the lock? Raises OSError."""
    with closing(os.open(path, _TO_LOCK)) as fd:
        return not try_to_lock(fd)


_PF_EXITING = 4  # linux/sched.h


def is_dying(pid: int) -> bool:
    """Has its first thread ended, or does it end? The kernel lists it as a zombie until the others have ended. The last
    one closes files, and may wait there for a source that hangs."""
    try:
        status = _status(str(pid))
        return status[0] in ("Z", "X") or bool(int(status[6]) & _PF_EXITING)
    except OSError:  # of another pid namespace, where it cannot be seen
        return False


def _started(pid: str) -> str:
    """The start time in kernel ticks: a pid may be used again, but not with the same start time."""
    try:
        return _status(pid)[19]
    except OSError:
        return ""


def _status(pid: str) -> list[str]:
    """The fields of /proc/PID/stat that come after the name."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _sweep(directory: Path) -> None:
    """Remove the files of claims whose processes were killed."""
    for path in directory.glob(f"{_PREFIX}*"):
        with suppress(OSError), closing(os.open(path, _TO_LOCK)) as fd:
            if try_to_lock(fd) and is_at(fd, path):
                path.unlink(missing_ok=True)
