"""Identify the filesystem of a source by what lasts, so that a cache is not used for another one: `identify`.

Device numbers do not last: loop devices are given out in the order of their set-up (hazard 51). Nor does a UUID alone
prove that a filesystem is the same, because images are copied: of a block device the identity also has the file of a
loop device, or the name of a device-mapper volume. A read-only image keeps its times when it is replaced by another
release (hazard 52), so its file must be the same file, unchanged, on the same filesystem.

The path of that file may lead to another one by now: a release is installed while the former one is mounted. So the
kernel is asked which file the loop device has. Where it does not say, the filesystem is not recognized.
"""

import enum
import errno
import fcntl
import hashlib
import os
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cachefs.client import mount_table
from cachefs.client.mount_table import Mount
from cachefs.system import syscalls
from cachefs.system.descriptors import closing


class _Unknown(Exception):
    """Nothing says which file a loop device has."""


class Recognized(enum.Enum):
    """By what a filesystem is known again, after a reboot, too."""

    FSID = enum.auto()
    """f_fsid, which is made of a UUID. (On XFS and SquashFS it is the device number.)"""
    XFS_UUID = enum.auto()
    UUID = enum.auto()
    """FS_IOC_GETFSUUID (Linux 6.9), and type and source."""
    IMAGE = enum.auto()
    """A read-only image: its file, as it is now."""
    NOT = enum.auto()
    """An overlay: paths name its layers, and may lead elsewhere by now."""
    NAME = enum.auto()
    """Type and source, as in the mount table; of a block device the serial number of the filesystem."""


_TYPES = {
    **dict.fromkeys(("ext2", "ext3", "ext4", "btrfs", "ceph", "zfs", "tmpfs"), Recognized.FSID),
    "xfs": Recognized.XFS_UUID,
    "overlay": Recognized.NOT,
    **dict.fromkeys(("squashfs", "erofs", "iso9660", "udf", "cramfs", "romfs"), Recognized.IMAGE),
    **dict.fromkeys(("bcachefs", "f2fs"), Recognized.UUID),
}
_FS_IOC_GETFSUUID = 0x80111500
_XFS_IOC_FSGEOMETRY = 0x8100587E
_XFS_GEOMETRY_BYTES = 256
_XFS_UUID = slice(64, 80)
"""Where a struct xfs_fsop_geom has it."""
_DEVICES = Path("/sys/dev/block")
_LOOP_GET_STATUS64 = 0x4C05
_LOOP_INFO_BYTES = 232
_LOOP_INFO = struct.Struct("=QQ8xQQ")
"""Device and inode number of the file; offset and size limit of the part that the loop device shows."""
_EROFS_EXTRA_DEVICES = 1024 + 86
"""Where the superblock has their number, in 16 bits."""
_SERIAL_NUMBERS = Path("/dev/disk/by-uuid")
_HIDING = ("noacl", "nouser_xattr")
_OWNERS_AND_MODES = ("uid", "gid", "umask", "fmask", "dmask", "file_mode", "dir_mode")
_NAMES = ("codepage", "iocharset", "utf8")
_DECIDING = frozenset(_HIDING + _OWNERS_AND_MODES + _NAMES)
"""Options that decide which attributes, owners, modes and names are shown. No time shows that they have changed."""

_NO_CHANGE_TIMES = frozenset(("vfat", "msdos", "exfat", "cifs", "smb3"))
_HAS_NO_NUMBERS = frozenset(("vfat", "msdos", "exfat", "fuseblk"))
"""FAT, and exFAT and NTFS as FUSE filesystems: exfat-fuse has none, ntfs-3g has, and nothing tells the two apart."""
_HAS_OWN_TIMES = frozenset(("fuse.juicefs", "fuse.JuiceFS"))
_HAS_OWN_NUMBERS = _HAS_OWN_TIMES | {"fuse.bindfs", "fuse.glusterfs", "fuse.mergerfs"}
_OUR_CLOCK = frozenset(_TYPES) - {"ceph", "overlay"}
FIRST_OF_SNAPSHOTS = 1 << 48
"""Inode numbers from this on are of objects in snapshots. The upper 16 bits are the number of the snapshot."""
_CEPH_FUSE = frozenset(("fuse.ceph", "fuse.ceph-fuse"))
_CEPH = _CEPH_FUSE | {"ceph"}
_INCOHERENT = frozenset(("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "beegfs"))


class Kind(NamedTuple):
    """What the type of a filesystem says of the identity of its objects."""

    follows_paths: bool = False
    """Does the descriptor of a directory lead to what has its path now? libfuse's interface with paths does so (bindfs,
    mergerfs, sshfs and many others, hazard 57)."""
    has_generations: bool = False
    """Do its file handles say the generation of an inode (`syscalls.generation_of`)?"""
    uses_numbers_once: bool = False
    """Does no object get the inode number of a removed one, except in snapshots? CephFS gives each number out once."""
    has_twins: bool = False
    """May two objects have one inode number, because it passes on those of several filesystems (hazard 74)? mergerfs
    does so with one of its options, which the mount table does not show."""
    is_btrfs: bool = False
    copies_up: bool = False
    """Does an object that is changed for the first time become a copy, which was born later? The number stays."""
    fails_for_attributes: bool = False
    """Does it answer EIO for each extended attribute of a file, because it has none (hazard 90)?"""


ORDINARY = Kind()


@dataclass(frozen=True, slots=True)
class Filesystem:
    fstype: str
    """Empty: it is not in the mount table."""
    identity: bytes
    """The same for the same filesystem, whenever and wherever it is mounted. Empty: it cannot be recognized again."""


def is_coherent(fstype: str) -> bool:
    """Is what the kernel caches of such a filesystem always what the filesystem has? `fstype`: as in the mount table.

    False: attributes and pages may be outdated (hazard 50). So versions are compared with AT_STATX_FORCE_SYNC, and
    fetches bypass the page cache of the source. False as well where the type is not known.
    """
    return not _promises_nothing(fstype) and fstype not in _INCOHERENT


def has_late_pages(fstype: str) -> bool:
    """May the kernel show new times for some seconds before it drops the old pages (hazard 62)?"""
    return fstype in _CEPH_FUSE


def is_in_snapshot(fstype: str, inode: int) -> bool:
    """Is an object with this inode number in a snapshot that such a filesystem does not let go of (hazard 71)?"""
    return numbers_snapshots(fstype) and inode >= FIRST_OF_SNAPSHOTS


def has_change_times(fstype: str) -> bool:
    """Does ctime move with each change on such a filesystem? False: it may be a copy of mtime, which can be set, as on
    sshfs (hazard 52), or bindfs over such a filesystem, or 0. A ctime later than mtime is neither."""
    return fstype in _HAS_OWN_TIMES or not (_promises_nothing(fstype) or fstype in _NO_CHANGE_TIMES)


def hides_mounts(fstype: str) -> bool:
    """May such a filesystem show objects of another one, which is mounted beneath it or is another branch, under its
    own device number? Then an object may be older than its name (hazard 70)."""
    return _promises_nothing(fstype) or fstype in ("9p", "virtiofs")


def checks_attributes(fstype: str) -> bool:
    """May such a filesystem refuse extended attributes to users whom the kernel lets read them? ceph-fuse does."""
    return fstype.split(".")[0] == "fuse"


def has_own_clock(fstype: str) -> bool:
    """Does another clock than this machine's set the times of files? False of filesystems that lie on a local disk."""
    return fstype not in _OUR_CLOCK


def kind_of(fstype: str) -> Kind:
    return Kind(
        follows_paths=_promises_nothing(fstype),
        has_generations=fstype in ("ext2", "ext3", "ext4", "xfs"),
        uses_numbers_once=fstype in _CEPH,
        has_twins=hides_mounts(fstype) and fstype not in _HAS_OWN_NUMBERS - {"fuse.bindfs", "fuse.mergerfs"},
        is_btrfs=fstype == "btrfs",
        copies_up=fstype == "overlay",
        fails_for_attributes=fstype == "fuse.rclone",
    )


def numbers_last(fstype: str) -> bool:
    """Has an object the same inode number when such a filesystem is mounted again?"""
    return not _promises_nothing(fstype) and fstype not in _HAS_NO_NUMBERS


def numbers_stay(fstype: str) -> bool:
    """Does an object keep its inode number as long as such a filesystem is mounted?

    False: libfuse's interface with paths, unless its option use_ino is given (sshfs, rclone and many others), gives a
    number to each object that is looked up, and another one when the kernel has forgotten the object (hazard 56). Such
    a program has a type of its own, because libfuse makes the type of the program's name. A FUSE filesystem whose type
    is plain "fuse" is bindfs, which passes numbers on, or a program that chooses its numbers itself. The kernel's FAT
    and exFAT count the objects that they have in memory.
    """
    if fstype in _HAS_NO_NUMBERS:
        return False
    return not fstype.startswith("fuse.") or numbers_last(fstype) or fstype in _HAS_OWN_NUMBERS


def sets_no_time_back(fstype: str) -> bool:
    """Do the times of a file never become earlier? Then a rewrite by a node whose clock is behind leaves no trace
    (hazard 59)."""
    return fstype in _CEPH


def numbers_snapshots(fstype: str) -> bool:
    """Does such a filesystem give its snapshots numbers of its own, in the order in which it meets them (hazard 58)?
    Then the numbers of objects in them, FIRST_OF_SNAPSHOTS and more, count in one connection only."""
    return fstype in _CEPH_FUSE


def _promises_nothing(fstype: str) -> bool:
    """Is it a FUSE filesystem other than ceph-fuse, or not known?"""
    return not fstype or (fstype.startswith("fuse") and not fstype.startswith("fuse.ceph"))


def identify(fd: int) -> Filesystem:
    """The filesystem of a directory that is open for reading. Accesses the source. Raises OSError."""
    mount = mount_table.mount_of(fd)
    if mount is None:  # it was detached
        return Filesystem("", b"")
    if mount.is_idmapped:  # the mount table does not say how: the next mount may show other owners, with the same times
        return Filesystem(mount.fstype, b"")
    try:
        identity = _identity(fd, mount)
    except _Unknown:
        identity = b""
    return Filesystem(mount.fstype, identity and hashlib.blake2b(identity, digest_size=16).digest())


def _identity(fd: int, mount: Mount) -> bytes:
    """What identifies a filesystem. Empty, or raises _Unknown: it cannot be recognized again."""
    recognized = _TYPES.get(mount.fstype, Recognized.NAME)
    if recognized is Recognized.NOT:
        return b""
    words: list[bytes] = []
    options = mount.options.split(",")
    if recognized is Recognized.FSID:
        fsid = os.fstatvfs(fd).f_fsid
        words.append(b"%d" % fsid if fsid else b"")
    elif recognized in (Recognized.XFS_UUID, Recognized.UUID):
        words.append(_uuid(fd, recognized))
    is_image, is_on_device = recognized is Recognized.IMAGE, not mount.device.startswith("0:")
    if is_on_device and recognized is Recognized.NAME:
        words.append(_serial_number(mount.device))
    if is_image or is_on_device:
        device = _DEVICES / mount.device
        lies_in = _loop_file(device, as_it_is=is_image or _is_read_only(fd))
        if lies_in and mount.fstype == "erofs" and _has_other_devices(device, options):
            raise _Unknown
        words.append(lies_in or (b"" if is_image else _volume(device)))
    elif recognized in (Recognized.NAME, Recognized.UUID):
        words.append(os.fsencode(mount.source))
    elif lies_in := _loop_file(_device_of(mount.source), as_it_is=_is_read_only(fd)):
        words.append(lies_in)  # Btrfs has a device number of its own
    is_proven = bool(words[-1] if is_image else b"".join(words))
    fstype = "nfs" if mount.fstype == "nfs4" else mount.fstype
    # Any option may choose a part of an image: one of its sessions, or where in the file it begins.
    words += sorted(os.fsencode(each) for each in options if is_image or each.partition("=")[0] in _DECIDING)
    if recognized is Recognized.NAME and not _has_attributes(fd):
        words.append(b"no attributes")
    return b"\0".join([fstype.encode(), *words]) if is_proven else b""


def _is_read_only(fd: int) -> bool:
    return bool(os.fstatvfs(fd).f_flag & os.ST_RDONLY)


def _has_attributes(fd: int) -> bool:
    """Are there extended attributes? A FUSE filesystem may hide them (bindfs --xattr-none), which no option shows."""
    try:
        os.getxattr(fd, b"user.cachefs")
    except OSError as error:
        return error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS)
    return True


def _uuid(fd: int, recognized: Recognized) -> bytes:
    """Empty where there is none."""
    with suppress(OSError):
        if recognized is Recognized.XFS_UUID:
            return bytes(fcntl.ioctl(fd, _XFS_IOC_FSGEOMETRY, bytes(_XFS_GEOMETRY_BYTES))[_XFS_UUID])
        answer = fcntl.ioctl(fd, _FS_IOC_GETFSUUID, bytes(17))
        return bytes(answer[1 : 1 + answer[0]])
    return b""


def _serial_number(device: str) -> bytes:
    """The serial number of a FAT or NTFS filesystem, which udev has read. Empty: not known."""
    with suppress(OSError):
        for link in _SERIAL_NUMBERS.iterdir():
            number = os.stat(link).st_rdev
            if f"{os.major(number)}:{os.minor(number)}" == device:
                return os.fsencode(link.name)
    return b""


def _device_of(path: str) -> Path:
    """The place of a block device in sysfs. Any other path gives a place that does not exist."""
    number = 0
    with suppress(OSError):
        now = os.stat(path)
        number = now.st_rdev if stat.S_ISBLK(now.st_mode) else 0
    return _DEVICES / f"{os.major(number)}:{os.minor(number)}"


def _volume(device: Path) -> bytes:
    """The name of a device-mapper volume. Empty: it is none."""
    with suppress(OSError):
        return (device / "dm" / "uuid").read_bytes().strip()
    return b""


def _has_other_devices(device: Path, options: Iterable[str]) -> bool:
    """Do data of this EROFS lie on other devices? The kernel does not say on which. Raises OSError."""
    start = next((int(each.removeprefix("fsoffset=")) for each in options if each.startswith("fsoffset=")), 0)
    with closing(os.open(b"/dev/" + os.fsencode(device.resolve().name), os.O_RDONLY)) as fd:
        return any(os.pread(fd, 2, start + _EROFS_EXTRA_DEVICES))


def _loop_file(device: Path, *, as_it_is: bool) -> bytes:
    """What identifies the file of a loop device, and the part of it that is mounted. Empty: it is no loop device, or
    this process may not read the two. Raises _Unknown.

    `as_it_is`: nothing writes to the filesystem, so that another size or time means another image.
    """
    try:
        start = b""
        if (device / "partition").exists():
            start = (device / "start").read_bytes().strip()
            device = device.resolve().parent
        if not (device / "loop").exists():
            return b""
        path = (device / "loop" / "backing_file").read_bytes().rstrip(b"\n")
        with closing(os.open(b"/dev/" + os.fsencode(device.resolve().name), os.O_RDONLY)) as loop:
            info = fcntl.ioctl(loop, _LOOP_GET_STATUS64, bytes(_LOOP_INFO_BYTES))
        with closing(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as file:
            now, lies_on = syscalls.statx(file, b"", ask=True), identify(file)
    except PermissionError:
        return b""
    except OSError as error:
        raise _Unknown from error
    *actual, offset, size_limit = _LOOP_INFO.unpack_from(info)
    if not stat.S_ISREG(now.mode) or actual != [now.device, now.inode] or not lies_on.identity:
        raise _Unknown
    if as_it_is and not has_change_times(lies_on.fstype) and now.ctime_ns <= now.mtime_ns:
        raise _Unknown  # another image of the same size may have got the same times
    if not (as_it_is or now.btime_ns or kind_of(lies_on.fstype).uses_numbers_once):
        raise _Unknown  # another image may have got the number of the former one
    numbers = [now.inode, now.btime_ns, offset, size_limit]
    if as_it_is:
        numbers += [now.size, now.mtime_ns, now.ctime_ns]
    return b"\0".join([path, lies_on.identity, start, *(b"%d" % number for number in numbers)])
