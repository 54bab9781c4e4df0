"""Slabs of the blob are granted by a daemon, and end with it."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, wait_for

MakeMount = Callable[..., Mount]
LONG_ENOUGH_S = 1.0
"""Fetched data are appended within 10 ms if they may be."""


@pytest.mark.fastpath
def test_a_slab_is_not_used_when_its_daemon_has_gone(mount: MakeMount, source: Path) -> None:
    """Another daemon may use the slab's place for other records. Data fetched meanwhile wait for one of its slabs."""
    m = mount(source, "--read-only", "--simulate-latency", "700")
    first, second = m.path / "d0/f00000", m.path / "d0/f00004"
    expected = (source / "d0/f00004").read_bytes()
    first.read_bytes()  # there is a slab from now on
    second.stat()
    before = m.flush()
    results: list[bytes] = []
    thread = threading.Thread(target=lambda: results.append(second.read_bytes()))
    thread.start()
    wait_for(m.ops, lambda ops: ops["open"] > before["source_ops"]["open"])
    blob = m.cache / "blob"
    m.kill()
    size, changed = blob.stat().st_blocks, blob.stat().st_mtime_ns
    thread.join(60)
    assert results == [expected]
    time.sleep(LONG_ENOUGH_S)
    assert (blob.stat().st_blocks, blob.stat().st_mtime_ns) == (size, changed)
    m.start()
    assert m.flush()["cached_files"] == 2
    assert second.read_bytes() == expected
