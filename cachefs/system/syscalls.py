"""System calls that Python does not wrap: openat2, statx with birth times, credentials of one thread, and others.

They are called with ctypes, which releases the interpreter lock. Errors are raised as OSError.
"""

import ctypes
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from cachefs.errors import Busy
from cachefs.system.clock import NANOSECONDS
from cachefs.system.stat import Stat, clamped_ns

T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_openat2 = _libc["syscall"]  # an object of its own, with a prototype: converting arguments costs as much as the call
_openat2.restype = ctypes.c_long
_openat2.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
_id = ctypes.c_uint32  # of a user or group: glibc declares the results of both calls as int (hazard 38)
_libc.setfsuid.argtypes = _libc.setfsgid.argtypes = [_id]
_libc.setfsuid.restype = _libc.setfsgid.restype = _id
_libc.statx.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]

AT_SYMLINK_NOFOLLOW = 0x100
AT_EMPTY_PATH = 0x1000
_AT_STATX_FORCE_SYNC = 0x2000
_STATX_ATTR_ENCRYPTED = 0x800
_STATX_BTIME = 0x800
_STATX_WANTED = 0x7FF | _STATX_BTIME | 0x1000 | 0x4000
"""The attributes of stat(2), the birth time, and the mount: since Linux 6.8 a number that is never used twice."""
_FILE_HANDLE, _FILE_HANDLE_BYTES = struct.Struct("=Ii"), 128
_GENERATIONS = {1: struct.Struct("=II"), 0x81: struct.Struct("=QI")}
"""By the type of a file handle (FILEID_INO32_GEN; XFS with inode numbers of 64 bits): inode number, generation."""
_STATX = struct.Struct("=IIQIIIHxxQQQQ" + "qI4x" * 4 + "IIIIQ")

_RESOLVE_NO_XDEV = 0x01
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_HOW = struct.Struct("=QQQ")
_OPEN_TRIES = 4
_HOW_FLAGS = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS

# Numbers of the generic and the x86-64 tables; openat2 has the same number everywhere.
_SYS_CLOSE_RANGE = 436
_SYS_OPENAT2 = 437
_SYS_PIDFD_GETFD = 438
_CLOSE_RANGE_UNSHARE = 2
_SYS_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159}.get(os.uname().machine)


def _fail(path: bytes | None = None) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), os.fsdecode(path) if path is not None else None)


def _checked(result: int, path: bytes | None = None) -> int:
    """The result of a call. Raises OSError if it failed. `path`: for the message."""
    if result < 0:
        raise _fail(path)
    return result


def _statx(directory_fd: int, path: bytes, *, ask: bool = False) -> tuple[int, ...]:
    buffer = ctypes.create_string_buffer(256)
    flags = AT_SYMLINK_NOFOLLOW | (0 if path else AT_EMPTY_PATH) | (_AT_STATX_FORCE_SYNC if ask else 0)
    _checked(_libc.statx(directory_fd, path, flags, _STATX_WANTED, buffer), path)
    return _STATX.unpack_from(buffer)


def place_of(fd: int) -> tuple[int, int]:
    """The number of the mount that an open object was reached by, and its st_dev."""
    *_, dev_major, dev_minor, mount = _statx(fd, b"")
    return mount, os.makedev(dev_major, dev_minor)


def statx(
    directory_fd: int,
    path: bytes,
    volumes: Mapping[tuple[int, int], int] | None = None,
    connection: int = 0,
    *,
    ask: bool = False,
) -> Stat:
    """lstat of `path` in `directory_fd`, or of the descriptor itself for an empty path. Follows no symlink.

    `volumes`: (mount, st_dev) → `Stat.device`; raises KeyError where it is not known. None: st_dev itself.
    `connection`: to the source, as in `Stat`. `ask`: ask the source, and do not use cached attributes.
    """
    began_ns = time.monotonic_ns()
    (
        mask, blksize, attributes, nlink, uid, gid, mode, inode, size, blocks, _,
        atime, atime_ns, btime, btime_ns, ctime, ctime_ns, mtime, mtime_ns,
        rdev_major, rdev_minor, dev_major, dev_minor, mount,
    ) = _statx(directory_fd, path, ask=ask)  # fmt: skip
    device = os.makedev(dev_major, dev_minor)
    return Stat(
        mode,
        nlink,
        uid,
        gid,
        os.makedev(rdev_major, rdev_minor) & 0xFFFFFFFF,
        blksize,
        size,
        blocks,
        clamped_ns(atime * NANOSECONDS + atime_ns),
        clamped_ns(mtime * NANOSECONDS + mtime_ns),
        clamped_ns(ctime * NANOSECONDS + ctime_ns),
        clamped_ns(btime * NANOSECONDS + btime_ns) if mask & _STATX_BTIME else 0,
        device if volumes is None else volumes[mount, device],
        inode,
        began_ns,
        connection,
        is_encrypted=bool(attributes & _STATX_ATTR_ENCRYPTED),
    )


def generation_of(directory_fd: int, path: bytes) -> tuple[int, int]:
    """The inode number and the generation of an object, by its file handle. An inode number that is used again has
    another generation. For an empty path of the descriptor itself. Follows no symlink.

    Raises OSError, EOPNOTSUPP where the filesystem has no file handles, or other ones.
    """
    handle = ctypes.create_string_buffer(
        _FILE_HANDLE.pack(_FILE_HANDLE_BYTES, 0), _FILE_HANDLE.size + _FILE_HANDLE_BYTES
    )
    mount, flags = ctypes.c_int(), 0 if path else AT_EMPTY_PATH
    _checked(_libc.name_to_handle_at(directory_fd, path, handle, ctypes.byref(mount), flags), path)
    _, kind = _FILE_HANDLE.unpack_from(handle)
    if kind not in _GENERATIONS:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    inode, generation = _GENERATIONS[kind].unpack_from(handle, _FILE_HANDLE.size)
    return inode, generation


_U64_MAX = (1 << 64) - 1


def statvfs(place: int | str | os.PathLike[str]) -> os.statvfs_result:
    """os.statvfs of a path or a descriptor, with the values that the filesystem gave.

    Python takes them for signed numbers: it makes -1 of the highest one, by which CephFS says "not known" (hazard 43).
    """
    return os.statvfs_result([value & _U64_MAX for value in os.statvfs(place)])


def openat2(directory_fd: int, path: bytes, flags: int, mode: int = 0) -> int:
    """Open beneath `directory_fd`: no symlink is followed, nothing outside is reached."""
    how = _HOW.pack(flags | os.O_CLOEXEC, mode, _HOW_FLAGS)
    # EAGAIN, EXDEV: a rename raced with the walk (EXDEV: what was found is outside now), and another try helps. Or
    # another process has a lease on the file, and may keep it for long (hazard 30): then the caller pauses.
    for _ in range(_OPEN_TRIES):
        fd: int = _openat2(_SYS_OPENAT2, directory_fd, path, how, _HOW.size)
        if fd >= 0:
            return fd
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EXDEV, errno.EINTR):
            raise _fail(path)
    raise Busy


def open_on_mount(directory_fd: int, path: bytes) -> int:
    """An O_PATH descriptor of a directory; `path` may lead upwards, but not to another mount (EXDEV)."""
    resolve = _RESOLVE_NO_XDEV | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
    how = _HOW.pack(os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0, resolve)
    fd: int = _openat2(_SYS_OPENAT2, directory_fd, path, how, _HOW.size)
    if fd < 0:
        raise _fail(path)
    return fd


def set_thread_groups(groups: list[int]) -> None:
    """setgroups of only the calling thread; os.setgroups changes every thread of the process (hazard 19)."""
    if _SYS_SETGROUPS is None:
        raise OSError(errno.ENOSYS, "setgroups: unknown architecture")
    array = (_id * len(groups))(*groups)
    _checked(_libc.syscall(_SYS_SETGROUPS, ctypes.c_size_t(len(groups)), array))


_NO_ID = 0xFFFFFFFF


def set_thread_fs_ids(uid: int, gid: int) -> None:
    """setfsgid and setfsuid of the calling thread. They report no error: a second call returns the present id."""
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)
    if _libc.setfsgid(_NO_ID) != gid or _libc.setfsuid(_NO_ID) != uid:
        raise PermissionError(errno.EPERM, "cannot take the caller's identity")


_CLONE_FS = 0x200


def with_umask(mask: int, function: Callable[[], T]) -> T:
    """Call `function` with a umask of only this thread.

    The threads of a process share one umask, except for a thread that has called unshare(CLONE_FS): from then on it
    has a umask and a working directory of its own.
    """
    _checked(_libc.unshare(_CLONE_FS))
    before = os.umask(mask)
    try:
        return function()
    finally:
        os.umask(before)


_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITY_HEAD = struct.Struct("=Ii")
_CAPABILITY_SETS = struct.Struct("=6I")  # effective, permitted, inheritable; twice, the lower half first


def _capability_sets() -> list[int]:
    sets = ctypes.create_string_buffer(_CAPABILITY_SETS.size)
    _checked(_libc.capget(_CAPABILITY_HEAD.pack(_CAPABILITY_VERSION_3, 0), sets))
    return list(_CAPABILITY_SETS.unpack(sets.raw))


def thread_capabilities() -> tuple[int, int]:
    """(effective, permitted) of the calling thread."""
    sets = _capability_sets()
    return sets[0] | sets[3] << 32, sets[1] | sets[4] << 32


def set_thread_capabilities(effective: int) -> None:
    """Replace the effective set of the calling thread. The permitted set stays, so that the old one can be restored."""
    sets = _capability_sets()
    sets[0], sets[3] = effective & 0xFFFFFFFF, effective >> 32
    _checked(_libc.capset(_CAPABILITY_HEAD.pack(_CAPABILITY_VERSION_3, 0), _CAPABILITY_SETS.pack(*sets)))


UTIME_NOW = (1 << 30) - 1
UTIME_OMIT = (1 << 30) - 2
_TIMES = struct.Struct("=4q")


def utimensat(path: bytes, atime: tuple[int, int], mtime: tuple[int, int]) -> None:
    """Times as (seconds, nanoseconds); nanoseconds may be UTIME_NOW or UTIME_OMIT. Follows symlinks."""
    _checked(_libc.utimensat(-100, path, _TIMES.pack(*atime, *mtime), 0), path)


def mount(source: str, target: str, filesystem: str, flags: int, data: str = "") -> None:
    place = os.fsencode(target)
    _checked(_libc.mount(os.fsencode(source), place, filesystem.encode(), ctypes.c_ulong(flags), data.encode()), place)


def umount2(target: str, flags: int = 0) -> None:
    _checked(_libc.umount2(os.fsencode(target), flags), os.fsencode(target))


def unshare_descriptors_from(first: int) -> None:
    """Give this thread a table of descriptors of its own, without those from this number on. They are not closed."""
    _checked(_libc.syscall(_SYS_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(0xFFFFFFFF), _CLOSE_RANGE_UNSHARE))


def pidfd_getfd(pidfd: int, fd: int) -> int:
    """A copy of a descriptor of another process."""
    return _checked(_libc.syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0))


def renameat2(old_fd: int, old: bytes, new_fd: int, new: bytes, flags: int) -> None:
    _checked(_libc.renameat2(old_fd, old, new_fd, new, ctypes.c_uint(flags)), old)


MS_BIND = 4096
MS_PRIVATE = 1 << 18
MNT_FORCE = 1
MNT_DETACH = 2

_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2


def punch_hole(fd: int, offset: int, length: int) -> None:
    _checked(_libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, offset, length))


def pread_past_pages(fd: int, length: int, offset: int) -> bytes:
    """os.pread, past the pages that the kernel keeps of a source. The descriptor keeps O_DIRECT where that works.

    The kernel keeps pages of FUSE filesystems and of NFS for some time after the file has changed elsewhere. Fresh
    attributes do not make them fresh (hazard 50). Such filesystems take O_DIRECT with any offset, length and memory.
    Where one does not, its pages are dropped before the read; those that another process has mapped stay. The fast path
    has the same rule (misses/source.c).
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        if not flags & os.O_DIRECT:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        return os.pread(fd, length, offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return os.pread(fd, length, offset)


def pread_beyond_known_end(fd: int, length: int, offset: int) -> bytes:
    """Bytes behind what the kernel takes for the end of a file. bindfs takes each name of a file for a file of its own,
    and the kernel keeps the size of each for a second, whatever is written by another one."""
    return os.pread(fd, length, offset) if statx(fd, b"", ask=True).size > offset else b""
