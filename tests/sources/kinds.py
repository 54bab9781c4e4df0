"""Kinds of filesystems that a source may lie on. Each kind says how it is made, changed, and mounted again."""

import shutil
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.ceph.cluster import CephFs
from tests.conftest import mounted_on, small_disk, wait_for
from tests.sources.images import READ_ONLY, make_image, mount_image, umount_when_free
from tests.sshfs import start_sshfs

MakeTree = Callable[[Path], None]
HIGHEST_ID = (1 << 32) - 2
_DISK = "512M"


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)


class Source:
    """A directory that cachefs is mounted over. It is closed with `stack`."""

    takes_changes = True
    """Other nodes may change it while it is mounted. False: only another image may take its place."""
    is_writable = True
    has_change_times = True
    """False: a file that is replaced by another one of the same size and mtime looks unchanged."""
    has_numbers = True
    """An object has the same inode number on a mount as here. False: several volumes use the same number, or the
    number may change while the source is mounted."""
    has_attributes = True
    """It has extended attributes."""
    knows_files = True
    """False: libfuse takes each name of a file for a file of its own. So the number of links is outdated for a second,
    and an open file whose name is gone is renamed to .fuse_hidden…, or cannot be opened by another name."""
    own_results: tuple[str, ...] = ()
    """Calls whose results a mount does not repeat, for the reason that each kind gives. Their names begin so."""
    highest_owner = HIGHEST_ID
    is_kept = True
    """What is cached is used when the source has been mounted again."""
    counts_beneath = False
    """The size of a directory is what is beneath it, and is counted late."""

    def __init__(self, base: Path, stack: ExitStack) -> None:
        self.base = base
        self.stack = stack
        self.path = base / "source"
        self.behind = self.path
        """The same tree, where another node changes it."""
        self.path.mkdir()

    def start(self, make: MakeTree) -> None:
        """Make the tree and mount it."""
        raise NotImplementedError

    def mount(self) -> None:
        raise NotImplementedError

    def umount(self) -> None:
        umount_when_free(self.path)

    def make_directory(self, name: str) -> None:
        """One that can be saved and rolled back."""
        (self.behind / name).mkdir()

    def save(self, name: str) -> None:
        run("cp", "-a", self.behind / name, self.behind / f"{name}.saved")

    def roll_back(self, name: str) -> None:
        (self.behind / name).rename(self.behind / f"{name}.rejected")
        (self.behind / f"{name}.saved").rename(self.behind / name)

    def _detach(self) -> None:
        while mounted_on(self.path):
            subprocess.run(["umount", "-l", self.path], check=True)


class OnDevice(Source):
    fstype = ""

    def start(self, make: MakeTree) -> None:
        nothing = self.base / "nothing"
        nothing.mkdir()
        make_image(self.fstype, nothing, self.base / "image")
        self.mount()
        self.stack.callback(self._detach)
        make(self.path)

    def mount(self) -> None:
        mount_image(self.fstype, self.base / "image", self.path)


class Ext4(OnDevice):
    fstype = "ext4"


class Xfs(OnDevice):
    fstype = "xfs"


class Btrfs(OnDevice):
    """What is rolled back is a subvolume."""

    fstype = "btrfs"
    has_numbers = False

    def make_directory(self, name: str) -> None:
        run("btrfs", "subvolume", "create", self.path / name)

    def save(self, name: str) -> None:
        run("btrfs", "subvolume", "snapshot", self.path / name, self.path / f"{name}.saved")

    def roll_back(self, name: str) -> None:
        run("btrfs", "subvolume", "delete", "-c", self.path / name)
        run("btrfs", "subvolume", "snapshot", self.path / f"{name}.saved", self.path / name)


class Image(OnDevice):
    """`behind` is the tree that the next image is made of."""

    takes_changes = is_writable = False

    def start(self, make: MakeTree) -> None:
        self.behind = self.base / "tree"
        self.behind.mkdir()
        make(self.behind)
        self.release()
        self.mount()
        self.stack.callback(self._detach)

    def release(self) -> None:
        """Put another image in the place of the present one, which stays mounted."""
        make_image(self.fstype, self.behind, self.base / "image")


class SquashFs(Image):
    fstype = "squashfs"
    has_attributes = False
    has_numbers = False  # an object may have the number 1, which is the root's on a mount


class Erofs(Image):
    fstype = "erofs"


class OnDisk(Source):
    """A filesystem that shows directories of another one: of a tmpfs of its own, whose free space nobody else uses."""

    def start(self, make: MakeTree) -> None:
        self.disk = self.stack.enter_context(small_disk(self.base / "disk", _DISK))
        self.behind = self.disk / "root"
        self.behind.mkdir()
        make(self.behind)
        self.mount()
        self.stack.callback(self._detach)


class Tmpfs(OnDisk):
    """The same tmpfs, bound to another place."""

    def mount(self) -> None:
        run("mount", "--bind", self.behind, self.path)


class Overlay(OnDisk):
    """The tree lies in the lower directory. Only through the overlay may it change."""

    is_kept = False

    def start(self, make: MakeTree) -> None:
        super().start(make)
        self.behind = self.path

    def mount(self) -> None:
        upper, work = self.disk / "upper", self.disk / "work"
        for directory in (upper, work):
            directory.mkdir(exist_ok=True)
        layers = f"lowerdir={self.disk / 'root'},upperdir={upper},workdir={work},redirect_dir=on"
        run("mount", "-t", "overlay", "overlay", "-o", layers, self.path)


class BindfsReadWrite(OnDisk):
    options = "rw"
    highest_owner = (1 << 31) - 1  # bindfs fails with EIO if it is higher
    knows_files = False

    def mount(self) -> None:
        run("bindfs", "-o", self.options, self.behind, self.path)
        wait_for(lambda: mounted_on(self.path), bool)


class BindfsReadOnly(BindfsReadWrite):
    options = "ro"
    is_writable = False


class Sshfs(OnDisk):
    """Without the directory cache of sshfs, which answers for 20 seconds whatever the server has."""

    has_change_times = has_numbers = has_attributes = knows_files = is_kept = False
    own_results = ("access ",)  # the server knows the rights, and sshfs says yes

    def mount(self) -> None:
        start_sshfs(self.behind, self.path, "-o", "dir_cache=no")


class Mergerfs(OnDisk):
    """Of two directories: the tree, and one that is empty."""

    knows_files = False
    own_results = ("open of a name that is too long",)  # a look-up finds nothing, so a read-only mount says EROFS
    has_numbers = False  # its numbers use all 64 bits; a mount keeps some of them for itself

    def mount(self) -> None:
        (self.disk / "second").mkdir(exist_ok=True)
        run("mergerfs", "-o", "use_ino,minfreespace=0", f"{self.behind}:{self.disk / 'second'}", self.path)
        wait_for(lambda: mounted_on(self.path), bool)


class CephFuse(Source):
    """A directory of a real CephFS, which other tests use as well."""

    counts_beneath = True

    def __init__(self, base: Path, stack: ExitStack, cephfs: CephFs) -> None:
        super().__init__(base, stack)
        self._cephfs = cephfs
        self.path = self.behind = cephfs.path / base.name

    def start(self, make: MakeTree) -> None:
        self.path.mkdir()
        make(self.path)
        self.stack.callback(shutil.rmtree, self.path)

    def umount(self) -> None:
        """With `mount`."""

    def mount(self) -> None:
        self._cephfs.again()


KINDS: dict[str, type[Source]] = {
    "ext4": Ext4,
    "xfs": Xfs,
    "btrfs": Btrfs,
    "tmpfs": Tmpfs,
    "overlayfs": Overlay,
    "squashfs": SquashFs,
    "erofs": Erofs,
    "bindfs": BindfsReadWrite,
    "bindfs-ro": BindfsReadOnly,
    "sshfs": Sshfs,
    "mergerfs": Mergerfs,
    "ceph-fuse": CephFuse,
}
IN_EACH_RUN = ("xfs", "squashfs", "bindfs")
"""A filesystem of a device, an image and a FUSE filesystem. All others: `--all-sources`."""
assert set(READ_ONLY) <= set(KINDS)
