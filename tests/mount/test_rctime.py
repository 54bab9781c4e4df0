"""A source that reports the last change beneath a directory, as CephFS does: cachefs/source/rctime.py.

A real one is in tests/ceph; here it is a file.
"""

import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, contents, settle, wait_for

MakeMount = Callable[..., Mount]
LONG_AGO, LATER = "1000000000.5", "1000000007.25"
BELIEVED, CHANGED = "the source has not changed", "the source has changed"

pytestmark = pytest.mark.promise("CH-18")


def read_all(m: Mount, source: Path) -> dict[str, int]:
    """What the source was asked for meanwhile."""
    before = m.ops()
    assert contents(m.path) == contents(source)
    after = m.ops()
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}


def restarted(m: Mount, *arguments: str) -> None:
    m.flush()
    m.remount(*arguments)


def log_since_mount(m: Mount) -> str:
    """Earlier mounts of a test may live long enough to be certain."""
    return m.log().rpartition("all data are on disk")[2]


@pytest.fixture(params=[[], ["--read-only"]], ids=["read-write", "read-only"])
def cached(
    request: pytest.FixtureRequest, mount: MakeMount, faulty: tuple[Path, Path], source: Path
) -> tuple[Mount, Path]:
    """A mount that has read everything, and has been restarted; where its source's rctime is."""
    root, faults = faulty
    (faults / "rctime").write_text(LONG_AGO)
    m = mount(root, *request.param)
    read_all(m, source)
    restarted(m, *request.param)
    return m, faults / "rctime"


def test_what_has_not_changed_is_not_compared(cached: tuple[Mount, Path], source: Path) -> None:
    """Except a symbolic link, which is not pinned on a read-write mount, and the directory above it, because this
    source may have no change times of its own (permissions.py)."""
    m, _ = cached
    most = 1 if "--read-only" in m.arguments else 2
    wait_for(lambda: log_since_mount(m), lambda log: BELIEVED in log)
    asked = read_all(m, source)
    assert asked.get("lstat", 0) <= most and "read" not in asked
    restarted(m, *map(str, m.arguments))
    wait_for(lambda: log_since_mount(m), lambda log: BELIEVED in log)
    assert read_all(m, source).get("lstat", 0) <= most


def test_until_it_is_certain_everything_is_compared(cached: tuple[Mount, Path], source: Path) -> None:
    """The rctime may follow a change by seconds: this change was made before the restart."""
    m, rctime = cached
    m.umount()
    (source / "d0/f00000").write_bytes(b"changed")
    m.start()
    assert (m.path / "d0/f00000").read_bytes() == b"changed"
    rctime.write_text(LATER)
    wait_for(lambda: log_since_mount(m), lambda log: CHANGED in log)
    assert BELIEVED not in log_since_mount(m)
    assert read_all(m, source)["lstat"] >= 40


def test_a_change_that_was_made_meanwhile_is_seen(cached: tuple[Mount, Path], source: Path) -> None:
    m, rctime = cached
    m.umount()
    (source / "d0/f00000").write_bytes(b"changed")
    rctime.write_text(LATER)
    m.start()
    assert contents(m.path) == contents(source)
    assert BELIEVED not in log_since_mount(m)


def test_lazy_compares_whatever_the_number_says(cached: tuple[Mount, Path], source: Path) -> None:
    m, _ = cached
    restarted(m, *map(str, m.arguments), "--revalidate", "lazy")
    assert read_all(m, source)["lstat"] >= 40
    assert BELIEVED not in log_since_mount(m)


def test_a_source_that_does_not_answer_is_asked_again(
    cached: tuple[Mount, Path], source: Path, faulty: tuple[Path, Path]
) -> None:
    m, _ = cached
    arguments = [*map(str, m.arguments), "--source-timeout", "0.5"]
    restarted(m, *arguments)
    hang = faulty[1] / "hang-all"
    hang.touch()
    wait_for(m.log, lambda log: "trying again" in log)
    hang.unlink()
    wait_for(lambda: log_since_mount(m), lambda log: BELIEVED in log)
    assert contents(m.path) == contents(source)


@pytest.mark.parametrize("where", ["hard link", "mounted beneath"])
@pytest.mark.parametrize("mode", [[], ["--read-only"]], ids=["read-write", "read-only"])
def test_what_the_number_does_not_vouch_for_is_compared(
    mount: MakeMount,
    faulty: tuple[Path, Path],
    source: Path,
    tmp_path: Path,
    beneath: ExitStack,
    mode: list[str],
    where: str,
) -> None:
    """A file with another name outside, whose change may count there; another filesystem."""
    root, faults = faulty
    (faults / "rctime").write_text(LONG_AGO)
    if where == "hard link":
        changed, path = tmp_path / "outside", Path("d0/f00000")
        os.link(source / path, changed)
    else:
        (source / "other").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root / "other"], check=True)
        beneath.callback(subprocess.run, ["umount", "-l", root / "other"], check=True)
        path = Path("other/file")
        changed = root / path
        changed.write_bytes(b"before")
    settle()
    m = mount(root, *mode)
    for file in [path, Path("d1/f00001")]:
        assert (m.path / file).read_bytes() == (root / file).read_bytes()
    m.flush()
    m.umount()
    changed.write_bytes(b"changed")
    m.start()
    wait_for(lambda: log_since_mount(m), lambda log: BELIEVED in log)
    before = m.ops()
    assert (m.path / "d1/f00001").read_bytes() == (source / "d1/f00001").read_bytes()
    assert m.ops() == before
    assert (m.path / path).read_bytes() == b"changed"


def test_what_a_snapshot_said_is_compared_after_a_restart(
    mount: MakeMount, faulty: tuple[Path, Path], source: Path, tmp_path: Path
) -> None:
    """It was recorded before the rctime: a change in between moved the rctime, and is in neither record."""
    root, faults = faulty
    (faults / "rctime").write_text(LONG_AGO)
    m = mount(root, "--read-only", name="exporter")
    cachefs("warmup", m.path, "--metadata-only")
    cachefs("snapshot", "export", m.path, tmp_path / "snapshot")
    (source / "d0/f00000").write_bytes(b"changed")
    (faults / "rctime").write_text(LATER)
    m = mount(root, "--read-only", "--metadata-snapshot", tmp_path / "snapshot")
    assert os.stat(m.path / "d0/f00000").st_size != len(b"changed")
    for _ in range(2):
        m.umount()
        m.start()
    wait_for(lambda: log_since_mount(m), lambda log: BELIEVED in log)  # what the second run has compared: nothing
    assert (m.path / "d0/f00000").read_bytes() == b"changed"


def test_a_snapshot_leaves_out_what_the_number_does_not_vouch_for(
    mount: MakeMount, faulty: tuple[Path, Path], source: Path, tmp_path: Path
) -> None:
    root, faults = faulty
    (faults / "rctime").write_text(LONG_AGO)
    os.link(source / "d0/f00000", tmp_path / "outside")
    settle()
    m = mount(root, "--read-only", name="exporter")
    cachefs("warmup", m.path, "--metadata-only")
    m.umount()
    (tmp_path / "outside").write_bytes(b"changed")
    m.start()
    wait_for(lambda: log_since_mount(m), lambda log: BELIEVED in log)
    cachefs("snapshot", "export", m.path, tmp_path / "snapshot")
    m = mount(root, "--read-only", "--metadata-snapshot", tmp_path / "snapshot")
    assert contents(m.path) == contents(source)
    assert m.ops()["lstat"] < 10  # of 46: the file, and a directory that is not completely known
