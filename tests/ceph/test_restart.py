"""What is believed after a restart: the recursive ctime of a real CephFS."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ceph.cluster import CephFs
from tests.ceph.conftest import CACHED, MODES, Dataset, check, drop_caches, flush
from tests.conftest import Mount, cachefs, contents, wait_for

MakeMount = Callable[..., Mount]
AGE_S = 0.5
GRACE_S = 30 * AGE_S
SOON_OLD = ("--minimum-age", str(AGE_S))
BELIEVED, CHANGED = "the source has not changed", "the source has changed"


def wait_until_old(cephfs: CephFs, root: Path) -> None:
    """Until nothing has been changed for longer than rctime.py asks for."""
    wait_for(time.time, lambda now: now - cephfs.rctime(root) > GRACE_S + 1, timeout_s=60)


def wait_until_moved(cephfs: CephFs, root: Path, at: float) -> None:
    """Until the rctime is later than `at`."""
    wait_for(lambda: cephfs.rctime(root), lambda now: now > at, timeout_s=60)


@pytest.fixture(params=CACHED)
def recorded(request: pytest.FixtureRequest, cephfs: CephFs, dataset: Dataset, mount: MakeMount) -> Mount:
    """A mount, ended, that has read everything when nothing had been changed for longer than rctime.py asks for."""
    root, files = dataset
    wait_until_old(cephfs, root)
    m = mount(root, *MODES[request.param], *SOON_OLD)
    check(m, files)
    m.flush()
    m.umount()
    drop_caches()
    return m


def wait_until_believed(m: Mount) -> None:
    wait_for(m.log, lambda log: log.count(BELIEVED) == 1, timeout_s=GRACE_S + 30)


@pytest.mark.promise("CH-18")
def test_nothing_is_compared_where_nothing_has_changed(cephfs: CephFs, recorded: Mount, dataset: Dataset) -> None:
    """The source is a directory of the CephFS: what changes beside it does not count."""
    m = recorded
    (cephfs.path / "beside").write_bytes(b"x")
    m.start()
    wait_until_believed(m)
    before = m.ops()
    check(m, dataset[1])
    assert m.ops() == before


@pytest.mark.promise("CH-18")
def test_a_change_just_before_the_mount_is_seen(cephfs: CephFs, recorded: Mount, dataset: Dataset) -> None:
    root, files = dataset
    m, path = recorded, next(iter(files))
    at = cephfs.rctime(root)
    (root / path).write_bytes(b"changed")
    flush(root)
    changed, is_late = time.monotonic(), cephfs.rctime(root) == at
    m.start()
    assert (m.path / path).read_bytes() == b"changed"
    wait_until_moved(cephfs, root, at)
    print(f"the rctime followed the change within {time.monotonic() - changed:.1f} s")
    if is_late:  # as the mount has seen it as well
        wait_for(m.log, lambda log: CHANGED in log, timeout_s=GRACE_S + 30)
    assert BELIEVED not in m.log()
    check(m, {**files, path: b"changed"})


@pytest.mark.promise("CH-18")
def test_a_change_long_before_the_mount_is_seen(cephfs: CephFs, recorded: Mount, dataset: Dataset) -> None:
    """Everything is compared in the run that sees it, and nothing in the one after that."""
    root, files = dataset
    m, path = recorded, next(iter(files))
    at = cephfs.rctime(root)
    (root / path).write_bytes(b"changed")
    flush(root)
    wait_until_moved(cephfs, root, at)
    wait_until_old(cephfs, root)
    now = {**files, path: b"changed"}
    m.start()
    check(m, now)
    assert m.ops()["lstat"] >= len(files)
    m.flush()
    m.umount()
    m.start()
    wait_until_believed(m)
    before = m.ops()
    check(m, now)
    assert m.ops() == before


@pytest.mark.promise("CH-18")
def test_a_file_that_counts_elsewhere_is_compared(cephfs: CephFs, dataset: Dataset, mount: MakeMount) -> None:
    """Its first name is outside: the rctime of the source stands still whatever becomes of it. (Ceph 16)"""
    root, files = dataset
    outside, path = root.with_name(f"{root.name}-outside"), Path("d0/link")
    outside.write_bytes(b"before")
    os.link(outside, root / path)
    flush(root)
    wait_until_old(cephfs, root)
    m = mount(root, "--read-only", *SOON_OLD)
    check(m, {**files, path: b"before"})
    m.flush()
    m.umount()
    fd = os.open(root / path, os.O_WRONLY)
    os.write(fd, b"change")
    os.fsync(fd)
    os.close(fd)
    m.start()
    wait_until_believed(m)
    before = m.ops()
    check(m, files)
    assert m.ops() == before
    assert (m.path / path).read_bytes() == b"change"


@pytest.mark.promise("CH-18")
def test_a_mount_that_wrote_compares_when_it_begins_again(cephfs: CephFs, dataset: Dataset, mount: MakeMount) -> None:
    root, files = dataset
    wait_until_old(cephfs, root)
    at = cephfs.rctime(root)
    m = mount(root, *SOON_OLD)
    check(m, files)
    (m.path / "new").write_bytes(b"new")
    m.flush()
    m.umount()
    wait_until_moved(cephfs, root, at)
    m.start()
    check(m, files)
    assert m.ops()["lstat"] >= len(files)
    assert BELIEVED not in m.log()


@pytest.mark.promise("PI-14")
def test_a_snapshot_of_its_metadata(dataset: Dataset, mount: MakeMount, tmp_path: Path) -> None:
    m = mount(dataset[0], "--read-only")
    expected = contents(m.path)
    m.flush()
    cachefs("snapshot", "export", m.path, tmp_path / "snapshot")
    other = mount(dataset[0], "--read-only", "--metadata-snapshot", tmp_path / "snapshot", name="other")
    assert contents(other.path) == expected
    assert not {"lstat", "readdir"} & other.ops().keys()
