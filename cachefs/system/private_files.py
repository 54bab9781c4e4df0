"""The daemon's own files and directories, which only this module creates (hazard 28).

The daemon runs with umask 0, for the files of its callers, and often as root. Its own files therefore have explicit
modes (0600, directories 0700), belong to it, and are no symlinks: a file that another user planted is an error, and is
neither used nor overwritten. The checks stay valid, because only root and the daemon's user can rename the directories
of the path: none of them belongs to another user or is writable for others, unless its sticky bit prevents them from
renaming files of this user (/tmp).

Errors are CacheFsError with one line, or the OSError of the system call.
"""

import errno
import os
import socket
import stat
from collections import deque
from pathlib import Path

from cachefs.errors import CacheFsError
from cachefs.system import user_namespace
from cachefs.system.descriptors import closing, closing_on_error

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
PARENT_MODE = 0o755
_MAX_SYMLINKS = 40
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_directory(path: Path) -> None:
    """Create the directory, or check that it is ours, and set its mode to 0700. Missing parents get 0755."""
    with closing(_walk(path, makes=True)) as fd:
        _check_owner(path, os.fstat(fd))
        os.chmod(f"/proc/self/fd/{fd}", DIRECTORY_MODE)


def check_directory(path: Path) -> None:
    """Check that only this user could and can write to it. Nothing is changed.

    Raises FileNotFoundError if it is missing.
    """
    if path.is_symlink():
        raise CacheFsError(f"{path} is a symbolic link, which cachefs does not make: remove it")
    if check_own(path) & 0o077:
        raise CacheFsError(f"{path} must be closed to others: run chmod 700 {path}")
    check_contents(path)


def check_own(path: Path) -> int:
    """Check that the directory is this user's, and that no other user can replace it. Returns its mode.

    Raises FileNotFoundError if it is missing.
    """
    with closing(_walk(path, makes=False)) as fd:
        found = os.fstat(fd)
        _check_owner(path, found)
        return found.st_mode


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise CacheFsError(f"{path} belongs to {_owner(found)}: use a directory of your own")


def _walk(path: Path, *, makes: bool) -> int:
    """An O_PATH descriptor of the directory. Each directory of the path is checked.

    `makes`: make missing directories; False: raise FileNotFoundError. Only symlinks of root and of this user are
    followed.
    """
    waiting = deque(Path(os.path.abspath(path)).parts[1:])
    at, walked, symlinks = os.open("/", _DIRECTORY), Path("/"), 0
    try:
        while waiting:
            _check_parent(walked, os.fstat(at))
            name = waiting.popleft()
            try:
                following = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            except FileNotFoundError:
                if not makes:
                    raise
                _make(at, name, PARENT_MODE if waiting else DIRECTORY_MODE)
                following = os.open(name, _DIRECTORY, dir_fd=at)
            found = os.fstat(following)
            if not stat.S_ISLNK(found.st_mode):
                os.close(at)
                at, walked = following, walked / name
                continue
            symlinks += 1
            target = os.readlink("", dir_fd=following)
            os.close(following)
            if symlinks > _MAX_SYMLINKS or found.st_uid not in (0, os.geteuid()):
                raise CacheFsError(f"{walked / name} is a symbolic link of {_owner(found)}, which is not followed")
            if target.startswith("/"):
                os.close(at)
                at, walked = os.open("/", _DIRECTORY), Path("/")
            waiting.extendleft(reversed([part for part in target.split("/") if part not in ("", ".")]))
        if not stat.S_ISDIR(os.fstat(at).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    except BaseException:
        os.close(at)
        raise
    return at


def _make(parent: int, name: str, mode: int) -> None:
    try:
        os.mkdir(name, mode, dir_fd=parent)
    except FileExistsError:
        return
    with closing(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)) as fd:
        os.fchmod(fd, mode)  # whatever the umask


def _check_parent(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise CacheFsError(f"{path} belongs to {_owner(found)}, who could replace files in it: use another place")
    if found.st_mode & stat.S_ISVTX:
        return
    others = found.st_mode & stat.S_IWOTH
    group = found.st_mode & stat.S_IWGRP and found.st_gid not in (0, os.getegid())
    if others or group:
        who = "everybody" if others else f"group {found.st_gid}"
        raise CacheFsError(f"{path} may be written to by {who}, who could replace files in it: chmod go-w, or +t")


def _owner(found: os.stat_result) -> str:
    if user_namespace.is_unmapped(found.st_uid):
        return "a user outside this user namespace"
    return "root" if found.st_uid == 0 else f"user {found.st_uid}"


def check_contents(path: Path) -> None:
    """Check that a directory, which may have been open to others before, has no symlink and no file of another user.

    Named pipes and devices are refused, too: opening one may block for ever.
    """
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # another process of ours has just removed it
                continue
            if entry.is_symlink():
                raise CacheFsError(f"{entry.path} is a symbolic link, which cachefs does not make: remove it")
            if stat.S_IFMT(found.st_mode) in (stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK):
                raise CacheFsError(f"{entry.path} is a named pipe or a device, which cachefs does not make: remove it")
            if found.st_uid not in (0, os.geteuid()):
                raise CacheFsError(f"{entry.path} belongs to {_owner(found)}: remove it, or use another directory")


def open_file(path: Path, flags: int) -> int:
    """Open or create a file of ours, 0600, in a directory that was checked. Follows no symlink."""
    safe = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # truncated after the checks
    with closing(os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        try:
            fd = os.open(path.name, safe, FILE_MODE, dir_fd=directory)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CacheFsError(f"{path} is a symbolic link, which cachefs does not make: remove it") from None
            raise
    with closing_on_error(fd):
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink > 1:
            raise CacheFsError(f"{path} is not a regular file of your own, with one name: remove it")
        if stat.S_IMODE(found.st_mode) != FILE_MODE:
            os.fchmod(fd, FILE_MODE)
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
        os.set_blocking(fd, True)
    return fd


def open_given(path: Path) -> int:
    """Open a file to read it whose content the daemon trusts. Symlinks are followed.

    Raises CacheFsError unless it is a regular file of root or this user that no other user may write to.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with closing_on_error(fd):
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise CacheFsError(f"{path} is not a regular file")
        if found.st_uid not in (0, os.geteuid()):
            raise CacheFsError(f"{path} belongs to {_owner(found)}: make a copy of your own if you trust its content")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):  # of the group: or by an entry of an ACL
            raise CacheFsError(f"{path} may be written to by others: chmod go-w if you trust its content")
    return fd


def temporary_of(path: Path) -> Path:
    """The file that `write_file` writes first. A crash may leave it behind."""
    return path.with_suffix(".new")


def write_file(path: Path, content: bytes) -> None:
    """Replace a file of ours. After a crash of the machine it has the old or the new content."""
    temporary = temporary_of(path)
    temporary.unlink(missing_ok=True)
    with os.fdopen(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def opener(path: str, flags: int) -> int:
    """For open()."""
    return open_file(Path(path), flags)


def bind_socket(listener: socket.socket, path: Path, mode: int = FILE_MODE) -> None:
    """Bind a unix socket to a path. Replaces a socket of ours, and nothing else."""
    with closing(_walk(path.parent, makes=False)) as directory:
        _check_parent(path.parent, os.fstat(directory))  # others must not replace the socket: root sets its mode
        try:
            found = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
                raise CacheFsError(f"{path} is not a socket of your own: remove it, or use another path")
            os.unlink(path.name, dir_fd=directory)
        os.fchmod(listener.fileno(), mode)  # what bind() makes has this mode, less the umask, from the first moment
        listener.bind(f"/proc/self/fd/{directory}/{path.name}")
        with closing(os.open(path.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)) as made:
            os.chmod(f"/proc/self/fd/{made}", mode)
