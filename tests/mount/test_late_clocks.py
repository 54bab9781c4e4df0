"""The clock that sets the times of the source is late or early (hazard 53)."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, drop_caches_of, wait_for
from tests.stalled_write import HALF, StalledWrite

pytestmark = pytest.mark.full_age  # what it is about

MakeMount = Callable[..., Mount]
MODES = [("--read-only",), (), ("--read-only", "--no-fastpath"), ("--no-fastpath",)]


@pytest.fixture
def behind(faulty: tuple[Path, Path], request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A source whose clock is late, by so many seconds, and the directory of its faults."""
    slow, faults = faulty
    (faults / "behind").write_text(str(request.param))
    return slow, faults


@pytest.mark.promise("CH-29")
@pytest.mark.parametrize("behind", [5, 500, -3600], indirect=True)
@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_what_is_read_during_a_write_is_not_there_afterwards_whatever_the_clock_of_the_source(
    mount: MakeMount, source: Path, behind: tuple[Path, Path], mode: tuple[str, ...]
) -> None:
    """Before: half of the write was cached if the clock was 5 s late. What lies in the future was never cached."""
    slow, faults = behind
    old, new = b"a" * 2 * HALF, b"b" * 2 * HALF
    (source / "victim").write_bytes(old)
    (source / "rest").write_bytes(new[HALF:])
    drop_caches_of(slow)  # the rest must come from there
    m = mount(slow, *mode)
    with StalledWrite(source / "victim", new[:HALF], slow / "rest", faults):
        opened = os.open(m.path / "victim", os.O_RDONLY)
        torn = os.read(opened, 4 * HALF)
    try:
        assert torn[:HALF] == new[:HALF]
        wait_for((m.path / "victim").read_bytes, lambda content: bool(content == new))
        wait_for(lambda: os.pread(opened, 4 * HALF, 0), lambda content: bool(content == new))
    finally:
        os.close(opened)

    def is_cached() -> bool:
        m.drop_caches()
        assert (m.path / "victim").read_bytes() == new
        return bool(m.flush()["cached_bytes"] == len(new))

    wait_for(is_cached, bool)
    m.umount()
    m.start()
    assert (m.path / "victim").read_bytes() == new


@pytest.mark.promise("CH-15")
@pytest.mark.parametrize("behind", [-3600, 60], indirect=True)
def test_a_warm_up_caches_what_another_clock_has_dated(mount: MakeMount, behind: tuple[Path, Path]) -> None:
    m = mount(behind[0], "--read-only")
    report = json.loads(cachefs("warmup", m.path, "--json", check=False).stdout)
    assert (report["files"], report["cached_files"], report["problems"]) == (41, 41, [])
