"""Claims: files with a lock on them, of which one process at a time holds each.

A claim ends with its process, however that ends. Its file is removed when it is released; what a killed process left
is removed when the next one takes any claim in the same directory.

Removing a locked file is safe only if everyone who takes the lock then asks whether the path still leads to the file
that is locked.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cachefs.system import private_files

_PREFIX = "lock-"
_LOOK_AGAIN_S = 0.05


class Taken(Exception):
    """Another process holds the claim."""

    def __init__(self, pid: str) -> None:
        super().__init__(pid)
        self.pid = pid


class Claim:
    """Held from `take` to `release`. A child that was forked in between holds it as well; either may release it."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def take(cls, directory: Path, name: str, *, patience_s: float = 0.0) -> "Claim":
        """Wait at most so long. Raises Taken."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return cls.try_to_take(directory, name)
            except Taken:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_LOOK_AGAIN_S)

    @classmethod
    def try_to_take(cls, directory: Path, name: str) -> "Claim":
        """Raises Taken."""
        _sweep(directory)
        path = directory / f"{_PREFIX}{name}"
        while True:
            fd = private_files.open_file(path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                raise Taken(pid) from None
            if is_at(fd, path):
                claim = cls(path, fd)
                claim.sign()
                return claim
            os.close(fd)  # its last holder has just removed it

    def sign(self) -> None:
        """Say which process holds it: this one. Where the disk has no room for that, nothing does."""
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


def _write(fd: int, line: str) -> None:
    """In place of what is there, without giving its block back before: a full disk would not let us have it again."""
    os.pwrite(fd, line.encode(), 0)
    os.ftruncate(fd, len(line))


def is_at(fd: int, path: Path) -> bool:
    """Is what this descriptor was opened for still what the path leads to?"""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def lock_for_good(path: Path) -> int:
    """Lock a file that stays when it is unlocked, such as that of a cache directory. Raises Taken.

    A holder that was killed counts as gone even if one of its threads still waits in the kernel, for a source that
    hangs: it will never write again, and the kernel may be waiting for its successor. Its file is then replaced.
    """
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # one at a time: what the file says is what its holder wrote
        while True:
            fd = private_files.open_file(path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid, _, started = os.pread(fd, 64, 0).decode(errors="replace").strip().partition(" ")
                os.close(fd)
                if not pid.isdigit() or not is_dying(int(pid)) or _started(pid) != started:
                    raise Taken(pid or "unknown") from None
                path.unlink(missing_ok=True)
                continue
            _write(fd, f"{os.getpid()} {_started('self')}\n")
            return fd
    finally:
        os.close(directory)


def is_locked(path: Path) -> bool:
    """Does another process hold the lock? Raises OSError."""
    with _opened(path) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def is_dying(pid: int) -> bool:
    """Has its first thread ended? The kernel lists it as a zombie until the others have."""
    try:
        return _status(str(pid))[0] in ("Z", "X")
    except OSError:  # of another pid namespace, where it cannot be seen
        return False


def _started(pid: str) -> str:
    """When, in the kernel's ticks: a pid is used again, this pair is not."""
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
        with suppress(OSError), _opened(path) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(fd, path):
                path.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)
