"""Several filesystems beneath the source, subvolumes, and one directory at two places (source/volumes.py)."""

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from cachefs.system.descriptors import closing
from tests.bindfs import Bindfs
from tests.bindfs import take_over as take_over_by
from tests.conftest import Mount, contents, expire, read_after_change, settle, wait_for
from tests.sources.images import make_image, mount_image
from tests.sources.kinds import run

MakeMount = Callable[..., Mount]
PAGE = 4096
ROOT_OF_SUBVOLUME = 256
MODES = pytest.mark.parametrize(
    "mode",
    [("--read-only",), (), ("--read-only", "--no-fastpath"), ("--no-fastpath",)],
    ids=["read-only", "read-write", "read-only-no-fastpath", "read-write-no-fastpath"],
)


@pytest.fixture
def cleanup(beneath: ExitStack) -> ExitStack:
    """What is done when the mounts of the test have ended."""
    return beneath


@pytest.fixture
def images(tmp_path: Path) -> Iterator[list[Path]]:
    """Two SquashFS images whose files have the same inode numbers, sizes and times."""
    made = []
    for letter in "ab":
        tree = tmp_path / letter
        tree.mkdir()
        for number in range(3):
            (tree / f"shard{number}").write_bytes(letter.encode() * 200_000)
        make_image("squashfs", tree, tmp_path / f"{letter}.sqsh")
        made.append(tmp_path / f"{letter}.sqsh")
    yield made


def mount_until_the_end(image: Path, place: Path, cleanup: ExitStack) -> None:
    place.mkdir(exist_ok=True)
    mount_image("squashfs", image, place)
    cleanup.callback(subprocess.run, ["umount", "-l", place], check=False, stderr=subprocess.DEVNULL)


@pytest.mark.promise("CH-30")
@MODES
def test_two_images_beneath_the_source_are_exchanged_between_mounts(
    mount: MakeMount, tmp_path: Path, images: list[Path], cleanup: ExitStack, mode: tuple[str, ...]
) -> None:
    """Before: their loop devices exchanged their numbers, and each file had the bytes of the other one."""
    source = tmp_path / "source"
    source.mkdir()
    mount_until_the_end(images[0], source / "train", cleanup)
    mount_until_the_end(images[1], source / "val", cleanup)
    m = mount(source, *mode)
    expected = contents(source)
    assert contents(m.path) == expected
    m.flush()
    m.umount()
    run("umount", source / "train")
    run("umount", source / "val")
    mount_until_the_end(images[1], source / "val", cleanup)  # it gets the loop device of the other one
    mount_until_the_end(images[0], source / "train", cleanup)
    m.start()
    before = m.ops().get("read", 0)
    assert contents(m.path) == expected
    assert m.ops().get("read", 0) == before  # and what was cached is used
    run("umount", "-l", source / "train")
    run("umount", "-l", source / "val")
    m.umount()


@pytest.mark.promise("CH-30")
@MODES
def test_another_image_is_mounted_in_the_place_of_one(
    mount: MakeMount, tmp_path: Path, images: list[Path], cleanup: ExitStack, mode: tuple[str, ...]
) -> None:
    """While cachefs is mounted. It lets go of a filesystem that nobody uses. Before: EBUSY for ever, or its bytes."""
    source = tmp_path / "source"
    source.mkdir()
    mount_until_the_end(images[0], source / "set", cleanup)
    m = mount(source, *mode)
    assert (m.path / "set/shard0").read_bytes() == b"a" * 200_000
    m.drop_caches()
    wait_for(lambda: subprocess.run(["umount", source / "set"], check=False).returncode, lambda code: code == 0)
    mount_until_the_end(images[1], source / "set", cleanup)
    m.umount()
    m.start()
    assert {(m.path / f"set/shard{number}").read_bytes() for number in range(3)} == {b"b" * 200_000}


@pytest.mark.promise("CH-30")
@MODES
def test_another_image_is_mounted_in_the_place_of_one_before_a_mount_that_compares_nothing(
    mount: MakeMount, tmp_path: Path, images: list[Path], cleanup: ExitStack, mode: tuple[str, ...]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "one").write_bytes(b"x")
    os.link(source / "one", source / "two")
    mount_until_the_end(images[0], source / "set", cleanup)
    settle()
    m = mount(source, *mode, "--revalidate", "never")
    assert (m.path / "set/shard0").read_bytes() == b"a" * 200_000
    assert [(m.path / name).read_bytes() for name in ("one", "two")] == [b"x"] * 2
    m.umount()
    run("umount", source / "set")
    mount_until_the_end(images[1], source / "set", cleanup)
    m.start()
    assert {(m.path / f"set/shard{number}").read_bytes() for number in range(3)} == {b"b" * 200_000}
    before = m.ops().get("lstat", 0)
    assert (m.path / "two").read_bytes() == b"x"
    assert "--read-only" not in mode or m.ops().get("lstat", 0) == before


@pytest.mark.promise("CH-30")
@MODES
def test_an_image_is_mounted_over_a_directory_before_a_mount_that_compares_nothing(
    mount: MakeMount, tmp_path: Path, images: list[Path], cleanup: ExitStack, mode: tuple[str, ...]
) -> None:
    """And a file over a file. Before: names and bytes of what lies beneath, for good."""
    source = tmp_path / "source"
    (source / "deep/set").mkdir(parents=True)
    (source / "deep/set/shard0").write_bytes(b"beneath")
    (source / "file").write_bytes(b"beneath")
    (source / "other").write_bytes(b"other")
    settle()
    m = mount(source, *mode, "--revalidate", "never")
    before = contents(m.path)
    m.umount()
    mount_until_the_end(images[0], source / "deep/set", cleanup)
    run("mount", "--bind", source / "other", source / "file")
    cleanup.callback(subprocess.run, ["umount", "-l", source / "file"], check=False, stderr=subprocess.DEVNULL)
    m.start()
    after = {Path("other"): b"other", Path("file"): b"other"}
    assert contents(m.path) == {**after, **{Path(f"deep/set/shard{number}"): b"a" * 200_000 for number in range(3)}}
    m.umount()
    run("umount", source / "deep/set")
    run("umount", source / "file")
    m.start()
    assert contents(m.path) == before


@pytest.mark.promise("CH-30")
@MODES
def test_the_other_image_gets_the_loop_device_while_cachefs_is_mounted(
    mount: MakeMount, tmp_path: Path, images: list[Path], cleanup: ExitStack, mode: tuple[str, ...]
) -> None:
    source = tmp_path / "source"
    (source / "val").mkdir(parents=True)
    mount_until_the_end(images[0], source / "train", cleanup)
    m = mount(source, *mode, "--mutable", "val")
    assert (m.path / "train/shard0").read_bytes() == b"a" * 200_000
    m.drop_caches()
    wait_for(lambda: subprocess.run(["umount", source / "train"], check=False).returncode, lambda code: code == 0)
    mount_until_the_end(images[1], source / "val", cleanup)
    wait_for(lambda: list((m.path / "val").iterdir()), bool)
    assert {path.read_bytes() for path in (m.path / "val").iterdir()} == {b"b" * 200_000}


@pytest.fixture
def btrfs(tmp_path: Path, cleanup: ExitStack) -> Path:
    """A Btrfs with a subvolume `cur`, and a snapshot of it, `keep`."""
    source = tmp_path / "source"
    source.mkdir()
    make_image("btrfs", source, tmp_path / "image")
    mount_image("btrfs", tmp_path / "image", source)
    cleanup.callback(subprocess.run, ["umount", "-l", source], check=False)
    run("btrfs", "subvolume", "create", source / "cur")
    (source / "cur/sub").mkdir()
    (source / "cur/f").write_text("old")
    (source / "cur/sub/g").write_text("old")
    run("btrfs", "subvolume", "snapshot", source / "cur", source / "keep")
    settle()
    return source


@pytest.mark.promise("CH-47")
@MODES
def test_the_empty_directories_of_a_snapshot_stay_what_they_are(
    mount: MakeMount, btrfs: Path, mode: tuple[str, ...]
) -> None:
    """Before: all have the number 2, each was taken for the next one, and an open one lost its name."""
    for name in "abc":
        run("btrfs", "subvolume", "create", btrfs / "cur" / name)
    run("btrfs", "subvolume", "snapshot", btrfs / "cur", btrfs / "later")
    m = mount(btrfs, *mode)
    names = [m.path / "later" / name for name in "abc"]
    with closing(os.open(names[0], os.O_RDONLY)) as fd:
        before = [path.stat().st_ino for path in names]
        for _ in range(3):
            expire()
            assert [path.stat().st_ino for path in names] == before
            assert os.readlink(f"/proc/self/fd/{fd}") == str(names[0])
            assert os.listdir(fd) == os.listdir(names[0]) == []
    assert len(set(before)) == len(before)


@pytest.mark.promise("CH-32")
@MODES
def test_a_subvolume_is_rolled_back_to_its_snapshot(mount: MakeMount, btrfs: Path, mode: tuple[str, ...]) -> None:
    """Before: the directory was empty for ever, and new files in it were lost."""
    m = mount(btrfs, *mode)
    assert os.listdir(m.path / "cur/sub") == ["g"]
    assert (m.path / "cur/f").read_text() == "old"
    run("btrfs", "subvolume", "delete", "-c", btrfs / "cur")
    run("btrfs", "subvolume", "snapshot", btrfs / "keep", btrfs / "cur")

    def found() -> set[str]:
        try:
            return set(os.listdir(m.path / "cur")) | set(os.listdir(m.path / "cur/sub"))
        except OSError:  # ESTALE: the next look-up finds it
            return set()

    wait_for(found, lambda names: names == {"f", "sub", "g"})
    if "--read-only" not in mode:
        wait_for(lambda: (m.path / "cur/new").touch() or (btrfs / "cur/new").exists(), bool)  # type: ignore[func-returns-value]
    m.umount()
    m.start()
    assert contents(m.path / "cur") == contents(btrfs / "cur")


@pytest.mark.promise("CH-32")
@MODES
def test_a_subvolume_whose_files_have_the_times_of_the_former_ones(
    mount: MakeMount, btrfs: Path, mode: tuple[str, ...]
) -> None:
    """It has the name and the device number of a deleted one. Both files had been written in one tick of the clock."""
    run("btrfs", "subvolume", "snapshot", btrfs / "cur", btrfs / "alt")
    files = {b"A": btrfs / "cur/sub/g", b"B": btrfs / "alt/sub/g"}
    size = 3 << 20
    for letter, path in files.items():
        path.write_bytes(letter * size)

    def written_at_once() -> bool:
        for letter, path in files.items():
            with open(path, "r+b", buffering=0) as file:
                file.write(letter)
        return len({path.stat().st_ctime_ns for path in files.values()}) == 1

    wait_for(written_at_once, bool)
    run("sync")
    settle()
    m = mount(btrfs, *mode)
    with open(m.path / "cur/sub/g", "rb", buffering=0) as file:
        assert file.read(PAGE) == b"A" * PAGE
        run("btrfs", "subvolume", "delete", "-C", btrfs / "cur")
        with suppress(subprocess.TimeoutExpired):  # it waits as long as the mount has the file open
            subprocess.run(["btrfs", "subvolume", "sync", btrfs], check=True, timeout=8)
        run("btrfs", "subvolume", "snapshot", btrfs / "alt", btrfs / "cur")
        try:
            assert os.pread(file.fileno(), PAGE, 2 << 20) == b"A" * PAGE
        except OSError as error:
            assert error.errno == errno.ESTALE
    assert read_after_change(m.path / "cur/sub/g")[::PAGE] in (b"A" * (size // PAGE), b"B" * (size // PAGE))


@pytest.mark.promise("CH-32")
@MODES
def test_a_subvolume_and_its_snapshot_exchange_names(mount: MakeMount, btrfs: Path, mode: tuple[str, ...]) -> None:
    """Before: the listing of one with the files of the other, for good."""
    (btrfs / "cur/later").write_text("new")
    settle()
    m = mount(btrfs, *mode)
    assert set(os.listdir(m.path / "cur")) == {"f", "sub", "later"}
    assert set(os.listdir(m.path / "keep")) == {"f", "sub"}
    (btrfs / "cur").rename(btrfs / "other")
    (btrfs / "keep").rename(btrfs / "cur")
    (btrfs / "other").rename(btrfs / "keep")
    if "--read-only" in mode:  # what it has seen stays as it was until the next mount
        m.umount()
        m.start()

    def found(name: str) -> set[str]:
        try:
            return set(os.listdir(m.path / name))
        except OSError as error:
            assert error.errno == errno.ESTALE  # the change is noticed; the next look-up finds the other one
            return set()

    wait_for(lambda: found("cur"), lambda names: names == {"f", "sub"})
    wait_for(lambda: found("keep"), lambda names: names == {"f", "sub", "later"})
    assert contents(m.path) == contents(btrfs)


@pytest.mark.promise("CH-33")
@MODES
def test_one_directory_at_two_places(
    mount: MakeMount, tmp_path: Path, cleanup: ExitStack, mode: tuple[str, ...]
) -> None:
    """Before: ESTALE in one of some hundred reads, and a shell was moved to the other place."""
    source = tmp_path / "source"
    (source / "set/sub").mkdir(parents=True)
    for number in range(40):
        (source / f"set/sub/f{number}").write_bytes(b"%d" % number * 1000)
    (source / "all/set").mkdir(parents=True)
    (source / "all/root").mkdir()
    for what, where in ((source / "set", source / "all/set"), (source, source / "all/root")):
        run("mount", "--bind", what, where)
        cleanup.callback(subprocess.run, ["umount", "-l", where], check=False)
    settle()
    m = mount(source, *mode)
    errors: list[Exception] = []

    def read(place: Path) -> None:
        try:
            for _ in range(4):
                for path in sorted(place.rglob("f*")):
                    assert path.read_bytes() == (source / "set/sub" / path.name).read_bytes()
        except Exception as error:
            errors.append(error)

    readers = [threading.Thread(target=read, args=(m.path / at,)) for at in ("set", "all/set", "all/root/set")]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert errors == []
    inside = os.open(m.path / "set", os.O_RDONLY)
    assert len(os.listdir(m.path / "all/set/sub")) == 40
    assert os.readlink(f"/proc/self/fd/{inside}") == str(m.path / "set")
    os.close(inside)
    assert len(subprocess.check_output(["find", m.path, "-type", "f"]).splitlines()) == 120


@pytest.fixture(params=["subvolume", "bindfs"])
def left_to_daemon(request: pytest.FixtureRequest, tmp_path: Path, cleanup: ExitStack) -> Path:
    """A source whose directory `sub` is on a volume from which the fast path fetches nothing."""
    source = tmp_path / "source"
    source.mkdir()
    if request.param == "subvolume":
        with open(tmp_path / "image", "wb") as file:
            file.truncate(120 << 20)
        run("mkfs.btrfs", "-q", tmp_path / "image")
        mount_image("btrfs", tmp_path / "image", source)
        cleanup.callback(subprocess.run, ["umount", "-l", source], check=True)
        run("btrfs", "-q", "subvolume", "create", source / "sub")
    else:
        (tmp_path / "root").mkdir()
        cleanup.callback(Bindfs(tmp_path / "root", source / "sub").close)
    for directory in (source, source / "sub"):
        for number, size in enumerate((5, 200_000, 3 << 20)):
            (directory / f"file{number}").write_bytes(f"{directory.name}{number}".encode().ljust(size, b"x"))
    settle()
    return source


@pytest.mark.promise("CH-32")
@MODES
def test_what_the_fast_path_leaves_to_the_daemon_is_cached(
    mount: MakeMount, left_to_daemon: Path, mode: tuple[str, ...]
) -> None:
    """Before: it was read from the source each time, if there was a fast path."""
    expected = contents(left_to_daemon)
    m = mount(left_to_daemon, *mode)

    def reads() -> int:
        before = m.ops().get("read", 0)
        assert contents(m.path) == expected
        m.flush()
        m.drop_caches()
        return m.ops().get("read", 0) - before

    wait_for(reads, lambda count: count == 0)
    for take_over in ("restart", "kill"):
        if "--no-fastpath" not in mode:
            take_over_by(m, take_over)
            assert reads() == 0
    m.umount()
    m.start()
    assert contents(m.path) == expected
    if (left_to_daemon / "sub").stat().st_ino == ROOT_OF_SUBVOLUME:  # bindfs has no change times (CH-28)
        assert m.ops().get("read", 0) == 0


@pytest.mark.promise("CH-4")
@pytest.mark.parametrize("mode", [(), ("--no-fastpath",)], ids=["read-write", "no-fastpath"])
def test_names_are_made_at_once_in_subvolumes_that_have_exchanged_their_names(
    mount: MakeMount, btrfs: Path, mode: tuple[str, ...]
) -> None:
    """Before: the directory was dropped, not the name of the subvolume, and some calls failed with ESTALE."""
    (btrfs / "moved").mkdir()
    m = mount(btrfs, *mode)
    for round_ in range(4):
        for name in ("cur", "keep"):
            assert (m.path / name / "sub/g").read_text() == "old"
            os.listdir(m.path / name)
        for name, new in (("cur", "moved/cur"), ("keep", "cur"), ("moved/cur", "keep")):
            (btrfs / name).rename(btrfs / new)
        expire()
        (m.path / f"cur/sub/file{round_}").touch()
        (m.path / f"cur/sub/directory{round_}").mkdir()
        (m.path / f"cur/sub/directory{round_}").rename(m.path / f"cur/moved{round_}")
        assert (btrfs / f"cur/sub/file{round_}").exists()
        assert (btrfs / f"cur/moved{round_}").is_dir()
