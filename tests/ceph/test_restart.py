"""What is believed after a restart: the recursive ctime of a real CephFS."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ceph.conftest import CephFs, Dataset, check, drop_caches, flush
from tests.conftest import Mount, cachefs, contents, wait_for

MakeMount = Callable[..., Mount]
AGE_S = 0.5
GRACE_S = 30 * AGE_S
BELIEVED, CHANGED = "the source has not changed", "the source has changed"


@pytest.fixture
def recorded(cephfs: CephFs, dataset: Dataset, mount: MakeMount) -> Mount:
    """A mount, ended, that has read everything when nothing had been changed for longer than rctime.py asks for."""
    root, files = dataset
    wait_for(time.time, lambda now: now - cephfs.rctime(root) > GRACE_S + 1, timeout_s=60)
    m = mount(root, "--read-only", "--minimum-age", str(AGE_S), "--revalidate", "auto")
    check(m, files)
    m.flush()
    m.umount()
    drop_caches()
    return m


@pytest.mark.promise("CH-18")
def test_nothing_is_compared_where_nothing_has_changed(recorded: Mount, dataset: Dataset) -> None:
    m = recorded
    m.start()
    wait_for(m.log, lambda log: BELIEVED in log, timeout_s=GRACE_S + 30)
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
    wait_for(lambda: cephfs.rctime(root), lambda now: now > at, timeout_s=60)
    print(f"the rctime followed the change within {time.monotonic() - changed:.1f} s")
    if is_late:  # as the mount has seen it as well
        wait_for(m.log, lambda log: CHANGED in log, timeout_s=GRACE_S + 30)
    assert BELIEVED not in m.log()
    check(m, {**files, path: b"changed"})


@pytest.mark.promise("PI-14")
def test_a_snapshot_of_its_metadata(recorded: Mount, dataset: Dataset, mount: MakeMount, tmp_path: Path) -> None:
    m = recorded
    m.start()
    expected = contents(m.path)
    m.flush()
    cachefs("snapshot", "export", m.path, tmp_path / "snapshot")
    other = mount(dataset[0], "--read-only", "--metadata-snapshot", tmp_path / "snapshot", name="other")
    assert contents(other.path) == expected
    assert not {"lstat", "readdir"} & other.ops().keys()
