"""Where a mount is possible: over files, over the source itself, twice, again; and where it is not (hazard 22)."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.client import locations
from tests.conftest import Mount, cachefs, make_files, mount_lines, mounted_on, settle, wait_for

MakeMount = Callable[..., Mount]


def test_two_mounts_of_two_sources_at_once(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_files(other, 20, seed=9)
    settle()
    first, second = mount(source, name="one"), mount(other, name="two")
    for m, root in ((first, source), (second, other)):
        for path in root.rglob("f*"):
            assert (m.path / path.relative_to(root)).read_bytes() == path.read_bytes()
    assert (first.flush()["cached_files"], second.flush()["cached_files"]) == (40, 20)


def test_over_a_directory_that_is_not_empty(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    (tmp_path / "mnt/covered").touch()
    m = mount(source)
    assert not (m.path / "covered").exists() and (m.path / "d0").is_dir()
    m.umount()
    assert (tmp_path / "mnt/covered").exists()


def check_over_itself(m: Mount, expected: dict[str, bytes]) -> None:
    assert mounted_on(m.path)[-1] == "fuse.cachefs"
    assert {str(p.relative_to(m.path)): p.read_bytes() for p in m.path.rglob("f*")} == expected
    (m.path / "written").write_bytes(b"through")
    assert (m.path / "written").read_bytes() == b"through"


def test_over_the_source_itself_and_again_after_restarts_and_a_kill(mount: MakeMount, source: Path) -> None:
    expected = {str(p.relative_to(source)): p.read_bytes() for p in source.rglob("f*")}
    m = mount(source, name=".")
    check_over_itself(m, expected)
    m.umount()
    assert (source / "written").read_bytes() == b"through"  # what lies underneath was changed
    m.start()
    check_over_itself(m, expected)
    m.flush()
    m.kill()
    m.start()
    assert mounted_on(m.path).count("fuse.cachefs") == 1
    check_over_itself(m, expected)
    m.umount()
    assert "fuse.cachefs" not in mounted_on(m.path)
    place = str(locations.mount_directory(str(m.path)))  # of the bind of what is underneath
    assert not [line for line in mount_lines() if place in line]


@pytest.fixture
def bindfs(source: Path, tmp_path: Path) -> Iterator[Path]:
    """A source that is a FUSE mount itself."""
    if shutil.which("bindfs") is None:
        pytest.fail("bindfs is missing: make test installs it")
    place = tmp_path / "bindfs"
    place.mkdir()
    subprocess.run(["bindfs", source, place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_over_a_source_that_is_a_fuse_mount(mount: MakeMount, bindfs: Path, source: Path) -> None:
    expected = {str(p.relative_to(source)): p.read_bytes() for p in source.rglob("f*")}
    m = mount(bindfs, name=".")
    check_over_itself(m, expected)
    m.umount()
    assert mounted_on(bindfs) == ["fuse"] or mounted_on(bindfs) == ["fuse.bindfs"]
    m.start()
    check_over_itself(m, expected)
    m.kill()
    m.start()
    check_over_itself(m, expected)
    m.umount()


@pytest.mark.parametrize("arguments", [(), ("--cache", "none"), ("--no-fastpath",)], ids=lambda a: "-".join(a))
def test_a_symlink_that_took_the_number_of_another_leads_where_it_says(
    mount: MakeMount, bindfs: Path, source: Path, arguments: tuple[str, ...]
) -> None:
    """Without birth times both are the same object; the kernel keeps the target of an object for ever."""
    link, number = source / "another", 0
    link.symlink_to("d0")
    m = mount(bindfs, *arguments)
    assert (m.path / "another").readlink() == Path("d0")
    for _ in range(100):
        number = link.lstat().st_ino
        link.unlink()
        link.symlink_to("d1")
        if link.lstat().st_ino == number:
            break
    else:
        pytest.skip("this filesystem does not use numbers again")
    wait_for(lambda: (m.path / "another").readlink(), lambda target: target == Path("d1"), 10)


@pytest.fixture
def shared(source: Path) -> Iterator[Path]:
    """The source as a mount of its own, with shared propagation."""
    subprocess.run(["mount", "--bind", source, source], check=True)
    subprocess.run(["mount", "--make-shared", source], check=True)
    yield source
    subprocess.run(["umount", "-l", source], check=True)


def test_over_the_source_under_shared_propagation(mount: MakeMount, shared: Path) -> None:
    expected = {str(p.relative_to(shared)): p.read_bytes() for p in shared.rglob("f*")}
    m = mount(shared, name=".")
    check_over_itself(m, expected)
    binds = [line.split(" ")[4] for line in mount_lines() if f"/run/cachefs/mount-{shared.name}-" in line]
    assert len(binds) == 1, "the overmount has propagated into the bind"
    m.umount()
    m.start()
    check_over_itself(m, expected)
    m.umount()


def test_one_strictly_inside_the_other_is_refused_with_a_reason(source: Path, tmp_path: Path) -> None:
    for where, what in ((source, source / "d0"), (source / "d0", source)):
        done = cachefs("mount", where, what, "--cache-dir", tmp_path / "cache", check=False)
        assert done.returncode == 1 and "inside" in done.stderr and done.stderr.count("\n") == 1
        assert not mounted_on(what)


@pytest.mark.promise("LC-22")
@pytest.mark.parametrize("mode", [[], ["--no-fastpath"]])
@pytest.mark.parametrize("where", ["mnt", "mnt/cache", "link/cache", "source", "source/d0/cache"])
def test_a_cache_in_the_mount_or_in_the_source_is_refused(
    source: Path, tmp_path: Path, where: str, mode: list[str]
) -> None:
    """The daemon would wait for itself, and its own files would appear in the dataset."""
    place = tmp_path / "mnt"
    place.mkdir()
    (tmp_path / "source").symlink_to(source)
    (tmp_path / "link").symlink_to("mnt")
    done = cachefs("mount", source, place, "--cache-dir", tmp_path / where, *mode, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "the cache directory" in done.stderr and "is inside the" in done.stderr
    assert not mounted_on(place) and not list(place.iterdir())
    done = cachefs(
        *("mount", source, place, "--cache-dir", tmp_path / "cache", "--metrics", place / "metrics", *mode), check=False
    )
    assert done.returncode == 1 and "the metrics socket" in done.stderr
    assert not mounted_on(place)


def test_over_the_source_its_default_cache_may_not_lie_in_it(source: Path) -> None:
    """As with a home directory that is mounted over itself."""
    done = cachefs("mount", source, source, "--cache-dir", source / ".cache/cachefs", check=False)
    assert done.returncode == 1 and "is inside the mountpoint" in done.stderr
    assert not (source / ".cache").exists() and not mounted_on(source)


def test_a_cachefs_mount_as_a_source_is_refused(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    m = mount(source)
    (tmp_path / "again").mkdir()
    done = cachefs("mount", m.path, tmp_path / "again", "--cache-dir", tmp_path / "c", check=False)
    assert done.returncode == 1 and "cachefs mount" in done.stderr


def test_kernel_settings(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    device = os.stat(m.path).st_dev
    ahead = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    assert ahead.read_text().strip() == "1024"
