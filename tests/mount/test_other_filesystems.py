"""The filesystem of the source is mounted again, or another one in its place: real images on loop devices."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cachefs.system.descriptors import closing
from tests.bindfs import Bindfs
from tests.conftest import Mount, contents, expire, settle, wait_for
from tests.sources.images import MAKE, READ_ONLY, make_image, mount_image, umount_when_free

FSOFFSET = pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (6, 17), reason="EROFS has no option fsoffset"
)


class Image:
    def __init__(self, fstype: str, directory: Path) -> None:
        self.fstype = fstype
        self.path = directory / "image"
        self.place = directory / "images"
        self.place.mkdir()
        self._tree = directory / "tree"

    def make(self, content: bytes) -> None:
        """Replace the file of the image by another one, in which only the contents of files differ."""
        self._tree.mkdir(exist_ok=True)
        for name in ("a", "b"):
            (self._tree / name).write_bytes(content * 1000)
        make_image(self.fstype, self._tree, self.path)

    def mount(self, options: str = "") -> None:
        mount_image(self.fstype, self.path, self.place, options)
        if not any(self.place.iterdir()):  # XFS: an empty one was made
            for file in self._tree.iterdir():
                (self.place / file.name).write_bytes(file.read_bytes())

    def mount_elsewhere(self, loop: str) -> None:
        """Mount it on another loop device than before: another file takes that one, unless another test has done so."""
        other = self.path.with_name("other")
        other.write_bytes(bytes(1 << 20))

        def is_taken() -> bool:  # a device is free a moment after the unmount
            found = subprocess.run(
                ["losetup", "-n", "-O", "BACK-FILE", loop], check=False, capture_output=True, text=True
            )
            return found.stdout.strip() not in ("", str(self.path))

        wait_for(lambda: subprocess.run(["losetup", loop, other], check=False).returncode == 0 or is_taken(), bool)
        self.mount()
        assert self.loop() != loop

    def loop(self) -> str:
        """The loop device beneath the mount."""
        return subprocess.check_output(["findmnt", "-n", "-o", "SOURCE", self.place], text=True).strip()

    def umount(self) -> None:
        """Return when the loop device is free: another process that looks at it keeps it for a moment."""
        umount_when_free(self.place)
        wait_for(lambda: subprocess.check_output(["losetup", "-j", self.path], text=True), lambda found: not found)


@pytest.fixture
def image(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Image]:
    made = Image(request.param, tmp_path)
    made.make(b"old")
    yield made
    subprocess.run(["umount", "-l", made.place], check=False)
    found = subprocess.check_output(["losetup", "-j", tmp_path / "other"], text=True)
    for line in found.splitlines():
        subprocess.run(["losetup", "-d", line.partition(":")[0]], check=True)


def read(m: Mount) -> dict[Path, bytes]:
    m.drop_caches()
    found = contents(m.path)
    m.flush()
    return found


@pytest.mark.promise("CH-26")
@pytest.mark.parametrize("mode", [("--read-only",), (), ("--revalidate", "never")], ids=["ro", "rw", "never"])
@pytest.mark.parametrize("image", READ_ONLY, indirect=True)
def test_another_release_of_an_image_gets_nothing_of_the_last_one(
    mount: Callable[..., Mount], image: Image, mode: tuple[str, ...]
) -> None:
    """Inode numbers, sizes and times are the same. Before: old bytes, and a mix where not all was cached."""
    image.mount()
    m = mount(image.place, *mode)
    assert read(m)[Path("a")] == b"old" * 1000
    before = os.stat(image.place / "a")
    m.umount()
    image.umount()
    image.make(b"new")
    image.mount()
    now = os.stat(image.place / "a")
    assert (now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )
    m.start()
    assert read(m) == contents(image.place)
    assert m.log().count("is another filesystem than before") == 1
    m.umount()


@pytest.mark.promise("CH-26")
@pytest.mark.parametrize("mode", [("--read-only",), (), ("--no-fastpath",)], ids=["ro", "rw", "no-fastpath"])
@pytest.mark.parametrize(
    ("image", "options"),
    [("squashfs", "loop,ro"), ("erofs", "loop,ro"), ("erofs", "ro")],  # EROFS needs no loop device
    indirect=["image"],
)
def test_another_release_replaces_the_file_of_a_mounted_image(
    mount: Callable[..., Mount], image: Image, mode: tuple[str, ...], options: str
) -> None:
    """Regression: the data of the mounted image were recorded as those of the file that has its path now."""
    image.mount(options)
    image.make(b"new")
    m = mount(image.place, *mode)
    assert read(m)[Path("a")] == b"old" * 1000
    m.umount()
    image.umount()
    image.mount(options)
    m.start()
    assert read(m)[Path("a")] == b"new" * 1000
    m.umount()


@pytest.mark.promise("CH-26")
@pytest.mark.parametrize("mode", [("--read-only",), ()], ids=["ro", "rw"])
@pytest.mark.parametrize("start", [0, pytest.param(1 << 20, marks=FSOFFSET)], ids=["whole", "fsoffset"])
def test_another_release_of_an_erofs_differs_on_its_data_device_only(
    mount: Callable[..., Mount], tmp_path: Path, start: int, mode: tuple[str, ...]
) -> None:
    """Before: only the file of the first device counted, and a file had bytes of both releases. `start`: where the
    image begins in its file."""
    image, tree, place = (tmp_path / name for name in ("image", "tree", "place"))
    tree.mkdir()
    place.mkdir()
    for content in (b"old", b"new"):
        (tree / "file").write_bytes(content.ljust(4096) * 3)
        fixed = ["-T", "1000000000", "-U", "11111111-2222-3333-4444-555555555555", "--chunksize=4096"]
        data = f"--blobdev={tmp_path / content.decode()}"
        release = tmp_path / f"{content.decode()}-image"
        subprocess.run(["mkfs.erofs", *fixed, data, release, tree], check=True, capture_output=True)
    assert (tmp_path / "old-image").read_bytes() == (tmp_path / "new-image").read_bytes()
    image.write_bytes(bytes(start) + (tmp_path / "old-image").read_bytes())

    def mount_release(content: str) -> ExitStack:
        undo = ExitStack()
        (tmp_path / content).rename(tmp_path / "data")
        setup = ["losetup", "--find", "--show", "--read-only", tmp_path / "data"]
        loop = subprocess.check_output(setup, text=True).strip()
        undo.callback(subprocess.run, ["losetup", "-d", loop], check=True)
        # A mount namespace of another test may have a copy of the mount, which the next one would get.
        undo.callback(wait_for, lambda: subprocess.check_output(["losetup", "-j", image]), lambda found: not found)
        options = f"loop,ro,device={loop}" + f",fsoffset={start}" * bool(start)
        subprocess.run(["mount", "-t", "erofs", "-o", options, image, place], check=True)
        undo.callback(umount_when_free, place)
        return undo

    with mount_release("old"):
        m = mount(place, *mode)
        assert (m.path / "file").read_bytes().startswith(b"old")
        m.flush()
        m.umount()
    with mount_release("new"):
        m.start()
        assert (m.path / "file").read_bytes().startswith(b"new")
        m.umount()


@pytest.mark.promise("CH-26")
@pytest.mark.parametrize(
    ("image", "option"),
    [("squashfs", "offset"), pytest.param("erofs", "fsoffset", marks=FSOFFSET)],
    indirect=["image"],
    ids=["loop", "erofs"],
)
def test_two_images_in_one_file(mount: Callable[..., Mount], image: Image, option: str) -> None:
    """Regression: the offset of the mounted image did not count; then EROFS got an option of its own (Linux 6.17)."""
    old = image.path.read_bytes()
    image.make(b"new")
    offset = -(-len(old) // 4096) * 4096
    image.path.write_bytes(old.ljust(offset, b"\0") + image.path.read_bytes())
    image.mount()
    m = mount(image.place, "--read-only")
    assert read(m)[Path("a")] == b"old" * 1000
    m.umount()
    image.umount()
    image.mount(f"loop,ro,{option}={offset}")
    m.start()
    assert read(m)[Path("a")] == b"new" * 1000
    m.umount()


@pytest.mark.promise("CH-26")
@pytest.mark.parametrize("image", ["ext4", "xfs", "btrfs"], indirect=True)
@pytest.mark.parametrize("path", ["same path", "other path"])
def test_a_copy_of_an_image_is_another_filesystem(mount: Callable[..., Mount], image: Image, path: str) -> None:
    """Regression: Btrfs has a device number of its own, and a copy has the UUID of its origin. At the same path it may
    have the inode number as well."""
    image.mount()
    m = mount(image.place, "--read-only", "--revalidate", "never")
    assert read(m)[Path("a")] == b"old" * 1000
    m.umount()
    image.umount()
    subprocess.run(["cp", "--sparse=always", image.path, image.path.with_name("copy")], check=True)
    if path == "same path":
        image.path.unlink()
        image.path.with_name("copy").rename(image.path)
        subprocess.run(["cp", "--sparse=always", image.path, image.path.with_name("copy")], check=True)
        image.path.unlink()
        subprocess.run(["cp", "--sparse=always", image.path.with_name("copy"), image.path], check=True)
    else:
        image.path = image.path.with_name("copy")
    image.mount()
    (image.place / "a").write_bytes(b"new" * 1000)
    m.start()
    assert read(m)[Path("a")] == b"new" * 1000
    assert m.log().count("is another filesystem than before") == 1
    m.umount()


@pytest.mark.promise("CH-26")
def test_a_writable_image_that_may_have_got_the_number_of_another_is_not_recognized(
    mount: Callable[..., Mount], old_ext4: Path, tmp_path: Path
) -> None:
    """Regression: without birth times a new file at the same path, with the same number, was taken for the former."""
    image, place = old_ext4 / "image", tmp_path / "place"
    place.mkdir()
    subprocess.run(["mke2fs", "-q", "-t", "ext4", image, "4M"], check=True)
    mount_image("ext4", image, place)
    try:
        m = mount(place)
        m.umount()
        m.start()
        m.umount()
        assert m.log().count("(ext4) cannot be told from another one that is mounted in its place") == 1
    finally:
        umount_when_free(place)


@pytest.mark.promise("CH-26")
@pytest.mark.parametrize("above", ["another image", "another image on bindfs", "an overlay"])
def test_the_image_that_an_image_or_an_overlay_lies_on_is_exchanged(
    mount: Callable[..., Mount], tmp_path: Path, above: str
) -> None:
    """Regression: they have the path, number, size and times of the former one, and were taken for it. bindfs does not
    show that the filesystem beneath it is another one."""
    for name in ("tree", "packed/one", "packed/two", "outer", "bindfs", "source"):
        (tmp_path / name).mkdir(parents=True)

    def put_together(content: bytes) -> None:
        for directory in ("tree", "packed/one"):
            (tmp_path / directory / "a").write_bytes(content)
        make_image("squashfs", tmp_path / "tree", tmp_path / "packed/image")
        make_image("squashfs", tmp_path / "packed", tmp_path / "outer.image")
        mount_image("squashfs", tmp_path / "outer.image", tmp_path / "outer")
        if above == "another image":
            mount_image("squashfs", tmp_path / "outer/image", tmp_path / "source")
        elif above == "another image on bindfs":
            subprocess.run(["bindfs", tmp_path / "outer", tmp_path / "bindfs"], check=True)
            mount_image("squashfs", tmp_path / "bindfs/image", tmp_path / "source")
        else:
            layers = f"lowerdir={tmp_path}/outer/one:{tmp_path}/outer/two"
            subprocess.run(["mount", "-t", "overlay", "-o", layers, "overlay", tmp_path / "source"], check=True)

    def take_apart() -> None:
        umount_when_free(tmp_path / "source")
        if above == "another image on bindfs":
            umount_when_free(tmp_path / "bindfs")
        umount_when_free(tmp_path / "outer")

    put_together(b"old")
    try:
        m = mount(tmp_path / "source", "--read-only")
        assert read(m)[Path("a")] == b"old"
        m.umount()
        take_apart()
        put_together(b"new")
        m.start()
        assert read(m)[Path("a")] == b"new"
        m.umount()
    finally:
        subprocess.run(["umount", "-l", tmp_path / "source", tmp_path / "bindfs", tmp_path / "outer"], check=False)


@pytest.mark.promise("CH-26")
@pytest.mark.parametrize("arguments", [(), ("--read-only",), ("--no-fastpath",)], ids=" ".join)
def test_a_fuse_source_shows_extended_attributes_that_it_hid(
    mount: Callable[..., Mount], source: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """No option in the mount table and no time shows it. Before: attributes and ACLs stayed missing."""
    os.setxattr(source / "d0/f00000", "user.a", b"value")
    settle()
    bindfs = Bindfs(source, tmp_path / "bindfs", "rw,xattr-none")
    try:
        m = mount(bindfs.path, *arguments)
        for _ in range(2):
            assert (m.path / "d0/f00000").read_bytes()
            with pytest.raises(OSError, match=r"not supported|No data"):
                os.getxattr(m.path / "d0/f00000", "user.a")
            expire()
        m.umount()
        bindfs.options = "rw"
        bindfs.again()
        m.start()
        assert os.getxattr(m.path / "d0/f00000", "user.a") == b"value"
        assert m.log().count("is another filesystem than before") == 1
        m.umount()
    finally:
        bindfs.close()


@pytest.mark.promise("CH-26")
@pytest.mark.parametrize("image", list(MAKE), indirect=True)
def test_a_filesystem_is_recognized_on_another_loop_device(mount: Callable[..., Mount], image: Image) -> None:
    image.mount()
    m = mount(image.place, "--read-only")
    m.umount()
    m.start()  # what was just written is old enough by now
    first = read(m)
    cached = m.flush()["cached_files"]
    assert cached == 2
    m.umount()
    loop = image.loop()
    image.umount()
    image.mount_elsewhere(loop)
    m.start()
    assert m.status()["cached_files"] == cached
    assert read(m) == first
    assert m.ops().get("read", 0) == 0
    assert "starts empty" not in m.log()
    m.umount()


@pytest.mark.promise("CH-1", "WR-8")
@pytest.mark.parametrize("mode", [(), ("--no-fastpath",)], ids=["fastpath", "python"])
def test_an_object_keeps_its_identity_when_overlayfs_copies_it_up(
    mount: Callable[..., Mount], tmp_path: Path, beneath: ExitStack, mode: tuple[str, ...]
) -> None:
    """The copy has another birth time. Before: it counted as another object. A process that worked in the directory,
    such as git, got ESTALE, and 1 in 5 opens with O_TRUNC failed after the file was emptied at the source."""
    lower, upper, work, source = (tmp_path / name for name in ("lower", "upper", "work", "source"))
    for directory in (lower, upper, work, source):
        directory.mkdir()
    names = [str(number) for number in range(20)]
    for name in names:
        (lower / name / "beneath").mkdir(parents=True)
        (lower / name / "beneath/file").write_bytes(b"contents")
    settle()
    layers = f"lowerdir={lower},upperdir={upper},workdir={work},index=on"
    subprocess.run(["mount", "-t", "overlay", "-o", layers, "overlay", source], check=True)
    beneath.callback(subprocess.run, ["umount", "-l", source], check=True)
    m = mount(source, *mode)
    for name in names:
        directory = m.path / name
        paths = (directory, directory / "beneath", directory / "beneath/file")
        before = [path.stat().st_ino for path in paths]
        with closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY)) as working_in:
            os.link("beneath/file", "link", src_dir_fd=working_in, dst_dir_fd=working_in)
            with closing(os.open("link", os.O_WRONLY | os.O_TRUNC, dir_fd=working_in)) as link:
                os.write(link, b"new")
            assert sorted(os.listdir(working_in)) == ["beneath", "link"]
        assert [path.stat().st_ino for path in paths] == before
        assert (directory / "beneath/file").read_bytes() == b"new"
        assert (source / name / "link").read_bytes() == b"new"
