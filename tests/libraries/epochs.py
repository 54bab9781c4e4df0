"""A job that reads a dataset through a mount, once and again."""

from collections.abc import Callable
from pathlib import Path

from tests.conftest import Mount


def check_two_epochs(m: Mount, read: Callable[[Path], str], expected: str, *, read_only: bool) -> int:
    """`read` returns `expected` twice, and the second time asks the source for nothing. Returns the cached files.

    On a read-write mount names and listings that are not pinned are looked up again, but no data are read.
    """
    assert read(m.path) == expected
    before = m.flush()
    assert before["cached_bytes"] > 0
    m.drop_caches()
    assert read(m.path) == expected
    after = m.status()
    assert after["source_bytes"] == before["source_bytes"] and after["misses"] == before["misses"]
    if read_only:
        assert after["source_ops"] == before["source_ops"]
    return int(before["cached_files"])
