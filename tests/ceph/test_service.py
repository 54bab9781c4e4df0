"""A mount of a CephFS as a service: its client, its daemon, and both, are replaced while jobs read what is cached."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ceph.cluster import CephFs
from tests.ceph.conftest import BACK_WITHIN_S, MODES, Dataset, drop_caches, halves
from tests.conftest import wait_for
from tests.load import Load, sums_of
from tests.service_manager import ServiceManager, services, status

Start = Callable[..., ServiceManager]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Start]:
    with services(tmp_path) as start:
        yield start


@pytest.mark.promise("FA-10")
@pytest.mark.fastpath
@pytest.mark.parametrize("how", ["stopped", "killed"])
@pytest.mark.parametrize("mode", ["read-only", "read-write"])
def test_a_service_is_replaced_while_its_client_is_dead(
    request: pytest.FixtureRequest,
    cephfs: CephFs,
    dataset: Dataset,
    service: Start,
    tmp_path: Path,
    mode: str,
    how: str,
) -> None:
    root, files = dataset
    first, rest = halves(files)
    place = tmp_path / "mnt"
    manager = service(root, *MODES[mode])
    for path, data in first.items():
        assert (place / path).read_bytes() == data
    wait_for(lambda: status(place), lambda s: s["write_behind_bytes"] == 0 and s["uncommitted"] == 0)
    sums = {name: one for name, one in sums_of(tmp_path / "local").items() if Path(name) in first}
    load = Load(place, sums, None)
    request.addfinalizer(load.stop.set)
    cephfs.kill()
    drop_caches()
    before = status(place)["pid"]
    # SIGUSR1 is what ExecStop= sends when it is a restart.
    manager.kill_and_wait(signal.SIGUSR1 if how == "stopped" else signal.SIGKILL)
    manager.start()
    wait_for(lambda: status(place).get("pid", before), lambda pid: pid != before)
    cephfs.again()
    returned = time.monotonic()
    for path, data in rest.items():
        assert (place / path).read_bytes() == data
    elapsed = time.monotonic() - returned
    print(f"all misses worked {elapsed:.2f} s after the source's return; longest wait for a hit {load.finish():.2f} s")
    assert elapsed < BACK_WITHIN_S
    wait_for(lambda: status(place)["source_lost"], lambda is_lost: not is_lost)
