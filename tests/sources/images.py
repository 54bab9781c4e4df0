"""Filesystems in files: made from a tree, mounted on loop devices."""

import subprocess
from pathlib import Path

from tests.conftest import wait_for

READ_ONLY = ("squashfs", "erofs")
MAKE = {
    "squashfs": "mksquashfs {tree} {image} -all-time 1700000000 -noappend -quiet -no-progress",
    "erofs": "mkfs.erofs -T 1700000000 -U 11111111-1111-1111-1111-111111111111 {image} {tree}",
    "ext4": "mke2fs -q -t ext4 -d {tree} {image} {mebibytes}M",
    "xfs": "truncate -s {mebibytes}M {image} && mkfs.xfs -q {image}",
    "btrfs": "truncate -s {mebibytes}M {image} && mkfs.btrfs -q -f -r {tree} {image}",
}
"""XFS: an empty one is made. Two images of one kind that is read-only differ in nothing but the contents of files."""
MEBIBYTES = 320


def make_image(fstype: str, tree: Path, image: Path) -> None:
    """Replace the file of the image, if there is one, by another file."""
    new = image.with_name(f"{image.name}.new")
    command = MAKE[fstype].format(tree=tree, image=new, mebibytes=MEBIBYTES)

    def make() -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(command, shell=True, check=False, capture_output=True)

    # mkfs.btrfs fails if a loop device of another test goes while it looks through them.
    wait_for(make, lambda done: done.returncode == 0)
    new.rename(image)


def mount_image(fstype: str, image: Path, place: Path, options: str = "") -> None:
    options = options or ("loop,ro" if fstype in READ_ONLY else "loop")
    subprocess.run(["mount", "-t", fstype, "-o", options, image, place], check=True)


def umount_when_free(place: Path) -> None:
    """The processes of a mount that has ended may need a moment to close the source."""
    wait_for(lambda: subprocess.run(["umount", place], check=False).returncode, lambda code: code == 0)
