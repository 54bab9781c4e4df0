"""The MDS is killed and started again; the OSD stops for a while.

Hits never fail, and misses work within `BACK_WITHIN_S` seconds of the source's return.
"""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ceph.cluster import CephFs
from tests.ceph.conftest import CACHED, MODES, Dataset, check, check_back, drop_caches, halves
from tests.conftest import Mount, mounted_on

MakeMount = Callable[..., Mount]
STOPPED_S = 30.0


def source_serves(path: Path) -> None:
    """Returns when it does, asked without us."""
    with path.open("rb", buffering=0) as file:
        file.read(1)


def reader(path: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["cat", path], stdout=subprocess.PIPE)


@pytest.mark.promise("FA-10")
@pytest.mark.parametrize("mode", MODES)
def test_an_mds_that_is_killed_and_started_again(cephfs: CephFs, dataset: Dataset, mount: MakeMount, mode: str) -> None:
    root, files = dataset
    first, rest = halves(files)
    m = mount(root, *MODES[mode])
    check(m, first)
    if mode in CACHED:
        m.flush()
    drop_caches()
    cephfs.kill_mds()
    waiting, expected = rest.popitem()
    job = reader(m.path / waiting)
    try:
        try:
            # Without the fast path the kernel asks for one name of a directory at a time (libfuse 3.14).
            others = {p: data for p, data in first.items() if not m.no_fastpath or p.parent != waiting.parent}
            if mode in CACHED:
                check(m, others)
                assert job.poll() is None  # it waits for the MDS; nobody else does
        finally:
            cephfs.start_mds()
        probe, _ = rest.popitem()
        source_serves(root / probe)
        check_back(m, rest)
        assert job.communicate(timeout=30)[0] == expected
    finally:
        job.kill()
        job.wait()
    check(m, first)
    assert mounted_on(cephfs.path)


@pytest.mark.promise("FA-10")
@pytest.mark.parametrize("mode", MODES)
def test_an_osd_that_stops_for_a_while(cephfs: CephFs, dataset: Dataset, mount: MakeMount, mode: str) -> None:
    root, files = dataset
    first, rest = halves(files)
    cephfs.again()  # what it wrote, a client would read from its own memory
    m = mount(root, *MODES[mode], "--source-timeout", "60")
    check(m, first)
    if mode in CACHED:
        m.flush()
    drop_caches()
    waiting, expected = rest.popitem()
    cephfs.stop_osd()
    job = reader(m.path / waiting)
    try:
        try:
            until = time.monotonic() + STOPPED_S
            while mode in CACHED and time.monotonic() < until:
                check(m, first)
            with pytest.raises(subprocess.TimeoutExpired):  # nobody but who needs it waits for the OSD
                job.wait(max(0.0, until - time.monotonic()))
        finally:
            cephfs.continue_osd()
        probe, _ = rest.popitem()
        source_serves(root / probe)
        check_back(m, rest)
        assert job.communicate(timeout=30)[0] == expected
    finally:
        job.kill()
        job.wait()
