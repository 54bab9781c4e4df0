"""Times that do not fit into signed 64-bit nanoseconds: after 2262-04-11, and before 1677-09-21.

ext4 supports times until 2446, tmpfs any. Such a file is served; it counts as in the future, or old, like any other.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.system.syscalls import utimensat
from tests.conftest import Mount, cachefs, contents, settle, small_disk, wait_for

pytestmark = pytest.mark.promise("CH-20")

MakeMount = Callable[..., Mount]
FUTURE_S, PAST_S = 15_032_385_535, -9_300_000_000
LATEST_S, EARLIEST_S = 9_223_372_036, -9_223_372_037
"""What is shown instead: the second of the nearest representable time."""
MODES = pytest.mark.parametrize(
    "mode",
    [
        ("--read-only",),
        ("--read-only", "--no-fastpath"),
        (),
        ("--no-fastpath",),
        ("--mutable", "**"),
        ("--cache", "metadata"),
        ("--cache", "none"),
    ],
    ids=lambda mode: "".join(mode) or "read-write",
)
WITH_AND_WITHOUT = pytest.mark.parametrize("mode", [(), ("--no-fastpath",)], ids=["fastpath", "no-fastpath"])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Three files in a directory, and an empty directory. All are new, on a disk that supports any time."""
    with small_disk(tmp_path / "disk", "16M") as place:
        for name in ("d", "d/e"):
            (place / name).mkdir()
        for name in ("a", "b", "c"):
            (place / "d" / name).write_bytes(name.encode() * 5000)
        set_time(place / "d/b", FUTURE_S)
        set_time(place / "d/c", PAST_S)
        yield place


def set_time(path: Path, time_s: int) -> None:
    os.utime(path, (time_s, time_s))


def times_s(path: Path) -> set[int]:
    found = path.stat()
    return {found.st_atime_ns // 10**9, found.st_mtime_ns // 10**9}


@MODES
def test_what_has_a_far_time_is_served_and_so_is_all_around_it(
    mount: MakeMount, disk: Path, mode: tuple[str, ...]
) -> None:
    set_time(disk / "d/e", PAST_S)
    for path in (disk / "d", disk):
        set_time(path, FUTURE_S)
    m = mount(disk, *mode)
    for path in (m.path, m.path / "d", m.path / "d/b"):
        assert times_s(path) == {LATEST_S}
    for path in (m.path / "d/c", m.path / "d/e"):
        assert times_s(path) == {EARLIEST_S}
    for _ in range(2):
        assert sorted(entry.name for entry in os.scandir(m.path / "d") if entry.stat().st_size == 5000) == [*"abc"]
        assert contents(m.path) == contents(disk)
        m.drop_caches()
    m.remount(*mode)
    assert contents(m.path) == contents(disk)
    assert m.status()["errors"] == 0


@pytest.mark.parametrize("mode", [(), ("--no-fastpath",), ("--mutable", "**")], ids=["", "no-fastpath", "mutable"])
def test_far_times_are_set_through_the_mount(mount: MakeMount, disk: Path, mode: tuple[str, ...]) -> None:
    m = mount(disk, *mode)
    (m.path / "new").write_bytes(b"new")
    for time_s, shown_s in ((FUTURE_S, LATEST_S), (PAST_S, EARLIEST_S)):
        utimensat(os.fsencode(m.path / "new"), (time_s, 1), (time_s, 2))
        assert times_s(disk / "new") == {time_s}
        assert times_s(m.path / "new") == {shown_s}
        assert (m.path / "new").read_bytes() == b"new"


@pytest.mark.full_age
@WITH_AND_WITHOUT
def test_a_file_with_a_far_time_is_cached(mount: MakeMount, disk: Path, mode: tuple[str, ...]) -> None:
    m = mount(disk, "--read-only", *mode)
    settle()
    report = json.loads(cachefs("warmup", m.path, "--json", check=False).stdout)
    assert (report["files"], report["cached_files"], report["problems"]) == (3, 3, [])
    m.drop_caches()
    before = m.ops()
    assert (m.path / "d/c").read_bytes() == b"c" * 5000
    assert m.ops() == before
    snapshot = disk.parent / "snapshot"
    cachefs("snapshot", "export", m.path, snapshot)
    another = mount(disk, "--read-only", "--metadata-snapshot", snapshot, *mode, name="another")
    assert times_s(another.path / "d/c") == {EARLIEST_S}
    assert contents(another.path) == contents(disk)


@WITH_AND_WITHOUT
def test_prefetching_goes_on_beyond_a_far_time(mount: MakeMount, disk: Path, mode: tuple[str, ...]) -> None:
    set_time(disk / "d", FUTURE_S)
    m = mount(disk, "--read-only", "--prefetch", "all", *mode)
    wait_for(lambda: m.status()["cached_files"], lambda count: count == 3)
