"""Volumes: the filesystems that a source consists of, each as it is reached by one mount.

Inode numbers are unique within a volume only. The device number of an object does not say which volume it is of: loop
devices are given out in the order of their set-up (hazard 51), and a bind mount shows a directory at a second place
(hazard 54). So each volume has a number of our own, which is `Stat.device`:

- 0: what the root of the source lies on, reached by the same mount.
- Otherwise it is made of what lasts: the identity of the filesystem (store/filesystem.py), on Btrfs of the subvolume;
  the directory of it that is mounted; and where. So it is the same at the next mount.
- The objects in the snapshots of a CephFS on ceph-fuse are of a volume of their own: their inode numbers count in one
  connection only (hazard 58), and no recursive ctime covers them. Not where the source itself lies in a snapshot.
  Then `check_source` tells that the snapshot was removed, because ceph-fuse does not (hazard 71).
- Some are known by the number of their mount, which is not used again before the next boot: filesystems that cannot be
  recognized; FUSE filesystems, because a new mount may give their inode numbers to other objects; and idmapped mounts,
  because a new mount may show other owners.

The kernel says mount and device with each lstat; the volumes of these places are remembered. The mount number that it
gives is never used twice since Linux 6.8. Before, it may be another mount's later, and a filesystem that is mounted in
the place of another one while cachefs is mounted may be taken for it.

A Btrfs subvolume that is deleted leaves its device number to the next one. Therefore the root of a subvolume is
identified each time it is looked at.

Used from the threads of `call_pool.py`, concurrently.
"""

import errno
import hashlib
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from cachefs.client import mount_table
from cachefs.client.mount_table import Mount
from cachefs.store.filesystem import (
    FIRST_OF_SNAPSHOTS,
    ORDINARY,
    Kind,
    has_change_times,
    has_late_pages,
    has_own_clock,
    hides_mounts,
    identify,
    is_coherent,
    kind_of,
    numbers_last,
    numbers_snapshots,
    numbers_stay,
    sets_no_time_back,
)
from cachefs.store.runs import next_connection
from cachefs.system import syscalls
from cachefs.system.descriptors import closing
from cachefs.system.stat import NO_NUMBER, USED_ONCE, Stat
from cachefs.system.user_namespace import maps_all_users, of_nobody

log = logging.getLogger(__name__)

_FIRST_UNIQUE = 1 << 31
"""Mount numbers that are never used twice begin here."""
_FIRST_OF_SUBVOLUME = 256
"""The inode number of the root of a Btrfs subvolume."""
_OF_EMPTY_DIRECTORIES = 2
"""The inode number of every directory that stands for a subvolume in a Btrfs snapshot (hazard 76)."""
_NO_DEVICE = 0
"""Btrfs gives back the device number of a subvolume when it is deleted, and its open objects have none."""
_OURS = 1 << 63


class Place(NamedTuple):
    """By what the kernel tells volumes apart while they are mounted."""

    mount: int
    device: int
    """st_dev"""


class Volumes:
    def __init__(self, root_fd: int, roots: Iterable[Place] = (), found: Callable[[Place, int], None] | None = None):
        """`roots`: of the source; empty: it is asked when a volume is identified. `found`: called with each volume."""
        # dependencies
        self._root_fd = root_fd
        self._found = found
        # state
        self.numbers: dict[tuple[int, int], int] = dict.fromkeys(roots, 0)
        """Read without the lock."""
        self.without_numbers: set[int] = set()
        """Volumes whose inode numbers do not stay. Read without the lock."""
        self.kinds: dict[int, Kind] = {}
        """Volume → what its type says of its objects. Read without the lock."""
        self.snapshots: dict[int, tuple[int, int]] = {}
        """Volumes on ceph-fuse: `Stat.device` and `Stat.connection` of the objects in their snapshots. Read without the
        lock."""
        self.trusted = {0}
        """The source's own volume, and those whose attributes, pages and change times prove what those of a local disk
        prove. Of others, and of those that are not identified yet, the fast path fetches nothing."""
        self.other_clocks: set[int] = set()
        """Volumes beneath the source's own whose times are set by another clock than this machine's."""
        self.with_nobody: set[int] = set()
        """Volumes that may show nobody's id instead of an owner's (system/user_namespace.py)."""
        self._subvolumes: set[int] = set()
        """Volumes on Btrfs, beneath the source's own."""
        self.refuses_private = False
        """May other users enter our mount, so that it must not show a FUSE filesystem mounted without allow_other?"""
        self._refused: set[int] = set()
        """Mounts that are not shown, by number."""
        self._way: bytes | None = None
        """As of `way_into_snapshot`. Empty: there is none. None: not known yet."""
        self._lock = threading.Lock()

    def following(self, roots: Iterable[Place]) -> "Volumes":
        """The source was mounted anew. Its volumes get the numbers that they had."""
        following = Volumes(self._root_fd, roots)
        following.without_numbers = self.without_numbers & {0}
        following.kinds = {0: self.kind(0)}
        following.with_nobody = self.with_nobody & {0}
        following.trusted, following.other_clocks = self.trusted, self.other_clocks
        following.refuses_private = self.refuses_private
        if 0 in self.snapshots:
            device, connection = self.snapshots[0]
            following.snapshots[0] = device, next_connection(connection)
        if self._found is not None:
            following.tell(self._found)
        return following

    def holds_snapshots(self, device: int) -> bool:
        """Are the objects with this `Stat.device` in snapshots?"""
        return bool(device) and any(device == each for each, _ in tuple(self.snapshots.values()))

    def is_left_to_daemon(self, device: int) -> bool:
        """Does the fast path fetch nothing from the volume with this `Stat.device`? (`_tell`)"""
        is_snapshot = self.snapshots.get(0, (None,))[0] == device
        return is_snapshot or device in self._subvolumes or device not in self.trusted or self.holds_snapshots(device)

    def check_source(self) -> None:
        """Raises OSError if the source lies in a snapshot that was removed. Accesses the source.

        ceph-fuse goes on answering by descriptors of the snapshot, and gives zeros (hazard 71).
        """
        if self.snapshots.get(0, (None,))[0] != 0:
            return
        if self._way is None:
            self._way = way_into_snapshot(self._root_fd)
        if self._way:
            try:
                with closing(syscalls.open_on_mount(self._root_fd, self._way)) as fd:
                    is_there = syscalls.statx(fd, b"", ask=True).inode == syscalls.statx(self._root_fd, b"").inode
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EXDEV):
                    raise
                is_there = False
            if not is_there:
                raise OSError(errno.ESTALE, "the snapshot that the source lies in was removed or covered")

    def kind(self, number: int) -> Kind:
        return self.kinds.get(number, ORDINARY)

    def describe(self, number: int, fstype: str) -> None:
        """Note what the type of a volume says. Called for the source's own one before any look-up."""
        self.kinds[number] = kind_of(fstype)

    def forgo_numbers(self) -> None:
        """Inode numbers of the source's own volume do not stay (store/filesystem.py). Called before any look-up."""
        self.without_numbers.add(0)

    def number_snapshots(self, connection: int, root_inode: int) -> None:
        """The source's own volume is on ceph-fuse. Called before any look-up. `root_inode`: of the source."""
        is_snapshot = root_inode >= FIRST_OF_SNAPSHOTS
        self.snapshots[0] = 0 if is_snapshot else _of_snapshots(0), connection
        self.trusted.add(self.snapshots[0][0])

    def tell(self, found: Callable[[Place, int], None]) -> None:
        """Call this for each volume that is known, or becomes known."""
        with self._lock:
            self._found = found
            for place, number in self.numbers.items():
                self._tell(Place(*place), number)

    def may_be_another(self, inode: int, number: int) -> bool:
        """May an object with this inode number be of another volume than this, which was found for its place?"""
        return inode == _FIRST_OF_SUBVOLUME and number in self._subvolumes

    def identify(self, fd: int) -> None:
        """Make `numbers` know the volume of an open object. Accesses the source. Raises OSError."""
        if 0 not in self.numbers.values():
            self._note(Place(*syscalls.place_of(self._root_fd)), 0)
        place = Place(*syscalls.place_of(fd))
        if place.device == _NO_DEVICE:
            raise OSError(errno.ESTALE, "its subvolume was deleted")
        if self.numbers.get(place) != 0:
            mount = mount_table.mount_of(fd)
            if self.refuses_private and mount is not None and mount.is_private:
                self._refuse(mount)
            number = self._number(fd, place, mount)
            if mount is not None:
                self._classify(number, mount.fstype)
            self._note_nobody(number, mount)
            self._note(place, number)

    def _refuse(self, mount: Mount) -> NoReturn:
        if mount.number not in self._refused:
            self._refused.add(mount.number)
            log.warning("%s is not shown: it was mounted without allow_other, for one user", mount.mountpoint)
        raise OSError(errno.EACCES, "a FUSE filesystem without allow_other")

    def _note_nobody(self, number: int, mount: Mount | None) -> None:
        if not maps_all_users() or (mount is not None and mount.is_idmapped):
            self.with_nobody.add(number)

    def look_at_users(self, *, allow_other: bool) -> None:
        """Note whether the source's own volume may show nobody's id. Called before any look-up.

        `allow_other`: other users may enter our mount. Then it does not show what only one user may enter.
        """
        mount = mount_table.mount_of(self._root_fd)
        self._note_nobody(0, mount)
        self.refuses_private = allow_other and not (mount is not None and mount.is_private)

    def _classify(self, number: int, fstype: str) -> None:
        if fstype == "btrfs":
            self._subvolumes.add(number)
        if not numbers_stay(fstype):
            self.without_numbers.add(number)
        self.describe(number, fstype)
        doubts = has_late_pages, hides_mounts, sets_no_time_back
        if is_coherent(fstype) and has_change_times(fstype) and not any(doubt(fstype) for doubt in doubts):
            self.trusted.add(number)
        if has_own_clock(fstype):
            self.other_clocks.add(number)
        if numbers_snapshots(fstype):
            self.snapshots[number] = _of_snapshots(number), secrets.randbits(32)

    def _note(self, place: Place, number: int) -> None:
        with self._lock:
            if self.numbers.get(place) != number:
                self.numbers[place] = number
                self._tell(place, number)

    def _tell(self, place: Place, number: int) -> None:
        """The fast path is not told of subvolumes: it does not look at their roots. Nor of volumes that are not
        trusted: it has rules for the source's own only."""
        if self._found is not None and number not in self._subvolumes and number in self.trusted:
            self._found(place, number)

    def _number(self, fd: int, place: Place, mount: Mount | None) -> int:
        identity = b"" if mount is None else _identity(fd, place, mount)
        if mount is not None and identity:
            source = os.readlink(f"/proc/self/fd/{self._root_fd}")
            at = mount_table.beneath(source, mount.mountpoint)
            words = [identity, os.fsencode(mount.root), os.fsencode(mount.mountpoint if at is None else at)]
        elif place.mount >= _FIRST_UNIQUE:
            boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
            words = [boot, b"%d" % place.mount, b"%d" % place.device]
        else:
            words = [os.urandom(16)]
        return _digest(words)


def way_into_snapshot(fd: int) -> bytes:
    """The path to a directory in a snapshot, from itself, by the directory that the snapshot was made of: for example
    `../../.snap/NAME`. Empty: there is none on its mount, as of a bind mount of the snapshot. Accesses the source."""
    names = os.readlink(b"/proc/self/fd/%d" % fd).split(b"/")
    for depth in range(1, len(names)):
        up = b"/".join([b".."] * depth)
        try:
            with closing(syscalls.open_on_mount(fd, up)) as above:
                is_outside = syscalls.statx(above, b"").inode < FIRST_OF_SNAPSHOTS
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ENOSYS):
                raise
            return b""
        if is_outside:
            return b"/".join([up, *names[-depth:]])
    return b""


def _of_snapshots(volume: int) -> int:
    """The volume of the objects in the snapshots of another one."""
    return _digest([b"snapshots", b"%d" % volume])


def _digest(words: list[bytes]) -> int:
    return int.from_bytes(hashlib.blake2b(b"\0".join(words), digest_size=8).digest(), "big") | _OURS


class Connection(NamedTuple):
    """To the source: since it was last mounted anew, and in the present run only.

    In one piece, because threads use it while the source is mounted anew.
    """

    volumes: Volumes
    root_device: int
    """st_dev of the root."""
    number: int = 0
    """0: the source has birth times, or its inode numbers last. `Stat.connection`."""

    @property
    def counted(self) -> int:
        """The number of this connection, if some of the inode numbers do not last."""
        return self.number or self.volumes.snapshots.get(0, (0, 0))[1]

    def stat(self, fd: int, name: bytes, *, ask: bool) -> Stat:
        """lstat of a name in a directory; if it is empty, of `fd` itself. `ask`: as of `Source.stat`."""
        now = self._numbered_stat(fd, name, ask=ask)
        kind = self.volumes.kind(now.device)
        if kind.copies_up:
            now = now._replace(btime_ns=0)
        elif not now.btime_ns:
            now = self._with_generation(fd, name, now, kind)
        if now.device in self.volumes.with_nobody:
            now = of_nobody(now)
        if kind.has_twins:
            now = now._replace(may_have_twins=True)
        if kind.is_btrfs and now.inode == _OF_EMPTY_DIRECTORIES:
            return now._replace(inode=NO_NUMBER, btime_ns=0)
        if now.inode >= FIRST_OF_SNAPSHOTS and now.device in self.volumes.snapshots:
            device, connection = self.volumes.snapshots[now.device]
            return now._replace(device=device, connection=connection)
        return now._replace(inode=NO_NUMBER) if now.device in self.volumes.without_numbers else now

    def _with_generation(self, fd: int, name: bytes, now: Stat, kind: Kind) -> Stat:
        """Without birth times the generation says whether an inode number was used again. It stands for the birth time:
        no two objects with one number have the same."""
        if kind.uses_numbers_once and now.inode < FIRST_OF_SNAPSHOTS:
            return now._replace(btime_ns=USED_ONCE)
        if not kind.has_generations:
            return now
        with suppress(OSError):
            inode, generation = syscalls.generation_of(fd, name)
            if inode == now.inode:  # the name was not given to another object meanwhile
                return now._replace(btime_ns=generation + 1)
        return now

    def _numbered_stat(self, fd: int, name: bytes, *, ask: bool) -> Stat:
        try:
            now = syscalls.statx(fd, name, self.volumes.numbers, self.number, ask=ask)
            if not self.volumes.may_be_another(now.inode, now.device):
                return now
        except KeyError:
            pass  # identified now
        began_ns = time.monotonic_ns()
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        with closing(os.open(name, flags, dir_fd=fd) if name else os.dup(fd)) as found:
            self.volumes.identify(found)
            try:
                now = syscalls.statx(found, b"", self.volumes.numbers, self.number, ask=ask)
            except KeyError:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from None
        return now._replace(began_ns=began_ns)

    def following(self, root: Place) -> "Connection":
        if self.number:
            return Connection(self.volumes.following([root]), root.device, next_connection(self.number))
        # Calls that are under way may have the root before.
        before = [Place(*place) for place, number in self.volumes.numbers.items() if number == 0]
        return Connection(self.volumes.following([root, *before[:1]]), root.device)


def _identity(fd: int, place: Place, mount: Mount) -> bytes:
    """The identity of a filesystem. Empty: it is not known whether it is the same when it is mounted again."""
    if not numbers_last(mount.fstype):
        return b""
    is_whole = mount.device == f"{os.major(place.device)}:{os.minor(place.device)}"
    if not is_whole and mount.fstype != "btrfs":
        return b""  # a layer of an overlay, which has a device number of its own
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode) or stat.S_ISREG(mode):  # others may do something when they are opened
        with suppress(OSError):
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            with closing(os.open(f"/proc/self/fd/{fd}", flags)) as readable:
                return identify(readable).identity
    return b""
