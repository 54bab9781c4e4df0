"""Listings and absences after an invalidation: nothing is missing, and nothing is believed missing (hazard 27)."""

import errno
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, mounted_on, raises_errno, settle, wait_for

MakeMount = Callable[..., Mount]
FIRST, LATER = 100, 10
READ_ONLY, READ_WRITE, MUTABLE = ["--read-only"], [], ["--read-only", "--mutable", "*.log"]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Trees of two directories with 100 files, all older than two seconds."""
    base = tmp_path_factory.mktemp("listings")
    roots = []
    for number in range(16):
        root = base / f"tree{number}"
        for place in (root / "d/sub", root / "e"):
            place.mkdir(parents=True)
            for name in range(FIRST):
                (place / f"f{name:03}").write_bytes(b"x")
        roots.append(root)
    settle()
    return roots.pop


@pytest.fixture
def tree(trees: Callable[[], Path]) -> Path:
    return trees()


def add_files(directory: Path) -> None:
    for name in range(LATER):
        (directory / f"new{name}").write_bytes(b"x")


def listed(directory: Path) -> list[str]:
    found = sorted(os.listdir(directory))
    assert len(set(found)) == len(found), "a name twice"
    return found


@pytest.mark.parametrize(
    ("mode", "place"),
    [(READ_ONLY, "d/sub"), (READ_ONLY, ""), (READ_WRITE, "d"), (MUTABLE, "d")],
    ids=["read-only, directory", "read-only, mount", "read-write, parent", "mutable, parent"],
)
def test_a_listing_after_an_invalidation_is_complete_and_stays_so(
    mount: MakeMount, tree: Path, mode: list[str], place: str
) -> None:
    m = mount(tree, *mode)
    assert len(listed(m.path / "d/sub")) == FIRST
    (m.path / "d/sub/f007").read_bytes()
    add_files(tree / "d/sub")
    cachefs("invalidate", m.path / place)
    assert listed(m.path / "d/sub") == listed(tree / "d/sub")
    assert listed(m.path / "d/sub") == listed(tree / "d/sub")  # by the index
    if mode is READ_ONLY and not place:
        report = cachefs("warmup", m.path / "d").stdout
        assert "110" in report and m.flush()["cached_files"] == FIRST + LATER
    m.umount()
    m.start()
    assert listed(m.path / "d/sub") == listed(tree / "d/sub")
    for name in listed(tree / "d/sub"):
        os.stat(m.path / "d/sub" / name)


def test_a_listing_under_way_shows_each_name_once_though_it_is_invalidated(mount: MakeMount, tree: Path) -> None:
    m = mount(tree, "--read-only")
    with os.scandir(m.path / "d/sub") as entries:
        seen = [next(entries).name]
        cachefs("invalidate", m.path / "d")
        seen += [entry.name for entry in entries]
    assert sorted(seen) == listed(tree / "d/sub")


def test_a_directory_that_changed_between_two_mounts_is_listed_again(mount: MakeMount, tree: Path) -> None:
    m = mount(tree, "--read-only")
    assert len(listed(m.path / "d/sub")) == FIRST
    m.umount()
    add_files(tree / "d/sub")
    (tree / "d/sub/f000").unlink()
    settle()
    m.start()
    assert not (m.path / "d/sub/f000").exists()
    assert (m.path / "d/sub/new0").exists()
    assert listed(m.path / "d/sub") == listed(tree / "d/sub")


def test_mutable_names_of_a_listed_directory_are_there_after_a_restart(mount: MakeMount, tree: Path) -> None:
    (tree / "e/a.log").write_bytes(b"x")
    settle()
    m = mount(tree, "--read-only", "--mutable", "*.log")
    assert listed(m.path / "e") == listed(tree / "e")
    m.umount()
    m.start("--revalidate", "never")
    assert (m.path / "e/a.log").read_bytes() == b"x"
    assert listed(m.path / "e") == listed(tree / "e")


@pytest.mark.parametrize(
    ("what", "directory", "known"),
    [
        ("directory", "", "looked up"),
        ("directory", "", "listed"),
        ("directory", "d/sub", "listed"),
        ("name", "", "looked up"),
        ("name", "d/sub", "listed"),
    ],
)
def test_what_was_missing_shows_up_when_it_is_invalidated(
    mount: MakeMount, tree: Path, what: str, directory: str, known: str
) -> None:
    """`known`: how the mount came to believe that it is missing."""
    m = mount(tree, "--read-only")
    if known == "listed":
        os.listdir(m.path / directory)
    missing = m.path / directory / "missing"
    assert not missing.exists()
    (tree / directory / "missing").write_bytes(b"there")
    assert not missing.exists()  # the dataset is taken as complete
    cachefs("invalidate", missing if what == "name" else m.path / directory)
    assert missing.read_bytes() == b"there"
    assert "missing" in listed(m.path / directory)


def test_invalidating_a_name_that_does_not_exist_is_no_error(mount: MakeMount, tree: Path) -> None:
    m = mount(tree, "--read-only")
    for name in ("nowhere", "nowhere/at/all", "d/sub/nowhere", "d/sub/f000/nowhere"):
        assert cachefs("invalidate", m.path / name).stdout.endswith("0 dropped\n")
    assert listed(m.path / "d/sub") == listed(tree / "d/sub")


@pytest.mark.parametrize("arguments", [READ_ONLY, READ_WRITE])
def test_a_name_that_cannot_be_looked_at_spoils_no_listing(
    mount: MakeMount, tree: Path, tmp_path: Path, arguments: list[str]
) -> None:
    """A user's own FUSE filesystem in a shared directory answers nobody else, or not at all."""
    other = tmp_path / "other"
    other.mkdir()
    broken = tree / "d/broken"
    broken.mkdir()
    process = subprocess.Popen(["bindfs", "-f", other, broken])
    try:
        wait_for(lambda: mounted_on(broken), bool)
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        raises_errno(errno.ENOTCONN, lambda: broken.stat())
        m = mount(tree, *arguments, "--attr-timeout", "0") if arguments is READ_WRITE else mount(tree, *arguments)
        assert listed(m.path / "d") == ["sub"]
        assert len(listed(m.path / "d/sub")) == FIRST
        raises_errno(errno.ENOTCONN, lambda: (m.path / "d/broken").stat())
        assert m.status()["source_lost"] is False
    finally:
        subprocess.run(["umount", "-l", broken], check=True)
    assert (m.path / "d/broken").is_dir()
    wait_for(lambda: listed(m.path / "d"), lambda names: names == ["broken", "sub"])  # a listing counts for a second
