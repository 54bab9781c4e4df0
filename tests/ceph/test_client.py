"""ceph-fuse is killed and mounted again, or the cluster shuts it out.

Hits never fail, and misses work within `BACK_WITHIN_S` seconds of the source's return.
"""

import os
import signal
from collections.abc import Callable

import pytest

from tests.ceph.cluster import CephFs
from tests.ceph.conftest import CACHED, MODES, Dataset, check, check_back, drop_caches, halves
from tests.conftest import Mount, cachefs, mounted_on, wait_for

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
