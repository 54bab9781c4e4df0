"""ceph-fuse is killed and mounted again, or the cluster shuts it out.

Hits never fail, and misses work within `BACK_WITHIN_S` seconds of the source's return.
"""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ceph.cluster import CephFs
from tests.ceph.conftest import CACHED, MODES, Dataset, check, check_back, drop_caches, halves
from tests.conftest import Mount, cachefs, expire, mounted_on, wait_for

MakeMount = Callable[..., Mount]


@pytest.mark.promise("FA-10")
@pytest.mark.parametrize("restarts", [False, True], ids=["", "restart"])
@pytest.mark.parametrize("mode", MODES)
def test_a_client_that_is_killed_and_mounted_again(
    cephfs: CephFs, dataset: Dataset, mount: MakeMount, mode: str, restarts: bool
) -> None:
    root, files = dataset
    first, rest = halves(files)
    m = mount(root, *MODES[mode])
    if restarts and m.no_fastpath:
        pytest.skip("needs a fast path")
    check(m, first)
    if mode in CACHED:
        m.flush()
    cephfs.kill()
    drop_caches()
    if restarts:
        cachefs("restart", m.path)
        m.pid = int(m.status()["pid"])
    if mode in CACHED:
        check(m, first)
    cephfs.again()
    check_back(m, rest)
    check(m, first)
    status = m.status()
    assert (status["source_lost"], status["source_reconnects"]) == (False, 1)


@pytest.mark.promise("FA-10")
@pytest.mark.parametrize("how", ["evict", "blocklist"])
@pytest.mark.parametrize("mode", MODES)
def test_a_client_that_the_cluster_shuts_out(
    cephfs: CephFs, dataset: Dataset, mount: MakeMount, mode: str, how: str
) -> None:
    """Its mount answers, with errors, until the operator mounts it again."""
    root, files = dataset
    first, rest = halves(files)
    m = mount(root, *MODES[mode])
    check(m, first)
    if mode in CACHED:
        m.flush()
    old = cephfs.client_pid()
    getattr(cephfs, how)()
    drop_caches()
    if mode in CACHED:
        check(m, first)
    os.kill(old, signal.SIGKILL)
    cephfs.again()
    assert mounted_on(cephfs.path)
    check_back(m, rest)
    wait_for(lambda: m.status()["source_lost"], lambda is_lost: not is_lost)
    check(m, first)


@pytest.mark.promise("FA-10")
@pytest.mark.parametrize("mode", ["read-only", "read-write"])
def test_a_client_that_was_evicted_makes_no_name_absent(
    cephfs: CephFs, tmp_path: Path, mount: MakeMount, mode: str
) -> None:
    """ceph-fuse says that what is open does not exist: directories counted as removed, and their names as absent."""
    root = cephfs.path / tmp_path.name
    names = [Path(f"d{number}/f") for number in range(6)]
    for name in names:
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(b"x")
    m = mount(root, *MODES[mode], "--source-timeout", "2")
    (m.path / "d0").stat()
    cephfs.evict()

    def error_of(path: Path) -> int | None:
        try:
            path.stat()
        except OSError as error:
            return error.errno
        return None

    wait_for(lambda: error_of(root / names[-1]), bool)
    expire()
    assert {error_of(m.path / name) for name in names} <= {errno.ETIMEDOUT, errno.ESHUTDOWN}
    cephfs.kill()
    cephfs.again()
    check_back(m, dict.fromkeys(names, b"x"))
