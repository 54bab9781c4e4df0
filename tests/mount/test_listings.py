"""Listings and absences after an invalidation: no name is missing, and none is wrongly absent (hazard 27)."""

import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Mount, cachefs, mounted_on, raises_errno, settle, wait_for

MakeMount = Callable[..., Mount]
FIRST, LATER = 100, 10
READ_ONLY, READ_WRITE, MUTABLE = ["--read-only"], [], ["--read-only", "--mutable", "*.log"]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Trees of two directories with 100 files, all older than two seconds."""
    base = tmp_path_factory.mktemp("listings")
    roots = []
    for number in range(32):
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


@pytest.mark.promise("PI-8")
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


@pytest.mark.promise("PI-8")
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


@pytest.mark.promise("PI-8")
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
    """`known`: how the mount learnt that the name is missing."""
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
        assert "nothing of it was cached" in cachefs("invalidate", m.path / name).stdout
    assert listed(m.path / "d/sub") == listed(tree / "d/sub")


@pytest.mark.promise("FA-7")
@pytest.mark.parametrize("arguments", [READ_ONLY, READ_WRITE])
def test_a_name_that_cannot_be_looked_at_spoils_no_listing(
    mount: MakeMount, tree: Path, tmp_path: Path, arguments: list[str]
) -> None:
    """A user's own FUSE filesystem in a shared directory answers no other user, or not at all."""
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
        assert listed(m.path / "d") == ["broken", "sub"]
        assert listed(m.path / "d") == ["broken", "sub"]
        assert len(listed(m.path / "d/sub")) == FIRST
        raises_errno(errno.ENOTCONN, lambda: (m.path / "d/broken").stat())
        assert m.status()["source_lost"] is False
    finally:
        subprocess.run(["umount", "-l", broken], check=True)
    assert (m.path / "d/broken").is_dir()
    assert listed(m.path / "d") == ["broken", "sub"]


@contextmanager
def hanging(tmp_path: Path, places: list[Path]) -> Iterator[Path]:
    """A filesystem of another user in these directories, which does not answer until the yielded file is removed."""
    served, faults = tmp_path / "served", tmp_path / "hanging-faults"
    for path in (served, faults, *places):
        path.mkdir()
    process = subprocess.Popen([sys.executable, "-m", "tests.faultfs", served, places[0], faults], cwd=REPOSITORY)
    mounted = []
    try:
        wait_for(lambda: mounted_on(places[0]), bool)
        mounted.append(places[0])
        for place in places[1:]:
            subprocess.run(["mount", "--bind", places[0], place], check=True)
            mounted.append(place)
        hang = faults / "hang-all"
        hang.touch()
        yield hang
        hang.unlink(missing_ok=True)
    finally:
        for place in reversed(mounted):
            subprocess.run(["umount", "-l", place], check=True)
        process.terminate()
        process.wait(20)


def types(directory: Path) -> dict[str, bool]:
    """Names of a listing, and whether the listing itself shows that they are regular files."""
    with os.scandir(directory) as entries:
        return {entry.name: entry.is_file(follow_symlinks=False) for entry in entries if entry.name != "hangs"}


NO_CACHE = ["--cache", "none"]
MODES = pytest.mark.parametrize(
    "mode",
    [READ_ONLY, [*READ_WRITE, "--attr-timeout", "0"], MUTABLE, NO_CACHE, ["--cache", "metadata"]],
    ids=["read-only", "read-write", "mutable", "none", "metadata"],
)


@pytest.mark.promise("FA-8")
@MODES
def test_a_name_that_hangs_costs_a_listing_a_second_once(
    mount: MakeMount, tree: Path, tmp_path: Path, mode: list[str]
) -> None:
    """Regression: the listing of the whole directory took --source-timeout and failed, and each held one more slot."""
    with hanging(tmp_path, [tree / "e/hangs"]) as hang:
        m = mount(tree, *mode, "--source-timeout", "25")
        expected = sorted(os.listdir(tree / "e"))
        began = time.monotonic()
        assert listed(m.path / "e") == expected and len(expected) == FIRST + 1
        assert time.monotonic() - began < 15
        ops = m.ops()
        for _ in range(6):
            assert listed(m.path / "e") == expected
            assert all(types(m.path / "e").values())
        assert m.status()["source_stuck_calls"] == 1
        assert time.monotonic() - began < 20
        if mode is READ_ONLY:
            assert m.ops()["lstat"] == ops["lstat"]
        assert (m.path / "e/f007").read_bytes() == b"x"
        hang.unlink()
        assert (m.path / "e/hangs").is_dir()
        assert listed(m.path / "e") == expected
        wait_for(lambda: m.status()["source_stuck_calls"], lambda stuck: stuck == 0)
    assert listed(m.path / "e") == expected


@pytest.mark.promise("FA-9")
@pytest.mark.parametrize("mode", [READ_ONLY, READ_WRITE], ids=["read-only", "read-write"])
def test_a_stat_of_a_name_that_hangs_has_a_time_out_and_no_slot_of_its_own(
    mount: MakeMount, tree: Path, tmp_path: Path, mode: list[str]
) -> None:
    with hanging(tmp_path, [tree / "e/hangs"]):
        m = mount(tree, *mode, "--source-timeout", "4")
        assert len(listed(m.path / "e")) == FIRST + 1
        began = time.monotonic()
        raises_errno(errno.ETIMEDOUT, lambda: (m.path / "e/hangs").stat())
        assert time.monotonic() - began > 3
        assert m.status()["source_stuck_calls"] <= 2  # it is asked again when it has hung twice as long
        assert (m.path / "e/f007").read_bytes() == b"x"
        report = cachefs("warmup", m.path / "e", check=False)
        assert "e/hangs" in report.stdout + report.stderr
        assert m.flush()["cached_files"] == FIRST
    assert (m.path / "e/hangs").is_dir()


@pytest.mark.promise("FA-8")
@pytest.mark.parametrize("mode", [READ_ONLY, READ_WRITE], ids=["read-only", "read-write"])
def test_many_names_that_hang_leave_slots_for_others(
    mount: MakeMount, tree: Path, tmp_path: Path, mode: list[str]
) -> None:
    with hanging(tmp_path, [tree / f"e/hangs{number:02}" for number in range(40)]) as hang:
        m = mount(tree, *mode, "--source-timeout", "25")
        expected = sorted(os.listdir(tree / "e"))
        began = time.monotonic()
        for _ in range(3):
            assert listed(m.path / "e") == expected and len(expected) == FIRST + 40
        assert not (m.path / "d/missing").exists()
        assert len(listed(m.path / "d/sub")) == FIRST
        assert (m.path / "d/sub/f007").read_bytes() == b"x"
        assert time.monotonic() - began < 20
        assert 0 < m.status()["source_stuck_calls"] < 48
        hang.unlink()
        for number in range(40):
            assert (m.path / f"e/hangs{number:02}").is_dir()
        assert listed(m.path / "e") == expected


@pytest.mark.promise("TE-1")
def test_a_directory_that_the_kernel_forgot_is_listed_whole(mount: MakeMount, tree: Path) -> None:
    """A pinned name of it is kept. Regression: so was its record, and the last listing counted without its names."""
    m = mount(tree)
    names = listed(tree / "e")
    assert listed(m.path / "e") == names
    os.link(m.path / "e/f000", m.path / "another")
    (m.path / "e/f000").read_bytes()
    m.drop_caches()
    assert listed(m.path / "e") == names


def exchange(one: Path, other: Path) -> None:
    renamed = ctypes.CDLL(None, use_errno=True).renameat2(-100, bytes(one), -100, bytes(other), 2)  # RENAME_EXCHANGE
    assert renamed == 0, os.strerror(ctypes.get_errno())


@pytest.mark.parametrize("mode", [READ_WRITE, ["--mutable", "**"], ["--profile", "changing"]], ids=" ".join)
@pytest.mark.parametrize("read", ["before", "after"])
@pytest.mark.parametrize("kind", ["files", "a file and a directory"])
def test_names_that_are_exchanged_stay_where_they_are_in_a_listing(
    mount: MakeMount, tmp_path: Path, mode: list[str], read: str, kind: str
) -> None:
    """Before: a scan met them no more, or twice if the directory was listed again meanwhile.

    `read`: whether the scan has read the names before the exchange, or reads them afterwards.
    """
    directory = tmp_path / "tree/d"
    directory.mkdir(parents=True)
    for number in range(200):
        (directory / f"file{number:0200}").touch()  # several calls of getdents(2)
        (directory / f"directory{number:0200}").mkdir()
    scanned = mount(tmp_path / "tree", *mode, "--attr-timeout", "60").path / "d"
    names = os.listdir(scanned)
    near = names if read == "before" else names[::-1]
    one, *files = [name for name in near if name.startswith("file")]
    other = files[0] if kind == "files" else next(name for name in near if name.startswith("directory"))
    with os.scandir(scanned) as scan:
        seen = [next(scan).name]
        exchange(scanned / one, scanned / other)
        assert sorted(os.listdir(scanned)) == sorted(names)
        seen += [entry.name for entry in scan]
    assert sorted(seen) == sorted(names)


@pytest.mark.promise("TE-3")
@pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["fastpath", "python"])
def test_a_removed_name_does_not_stay_because_its_file_was_compared_by_another_name(
    mount: MakeMount, tmp_path: Path, mode: list[str]
) -> None:
    """Before: a listing gave the time of the record, not of the name. The name stayed for twice the time."""
    source = tmp_path / "tree"
    (source / "d/e").mkdir(parents=True)
    (source / "d/name").write_bytes(b"data")
    for other in ("d/e/other", "d/third"):
        (source / other).hardlink_to(source / "d/name")
    m = mount(source, "--attr-timeout", "3", *mode)
    assert (m.path / "d/e").stat()
    time.sleep(3.5)
    listed_s = time.monotonic()
    assert "name" in os.listdir(m.path / "d")
    (source / "d/name").unlink()
    time.sleep(max(0.0, listed_s + 2.4 - time.monotonic()))
    assert (m.path / "d/e/other").stat()
    os.listdir(m.path / "d")
    time.sleep(max(0.0, listed_s + 3.5 - time.monotonic()))
    assert not (m.path / "d/name").exists()
