"""How often a refused request is logged. tests/mount/test_refusals.py has the texts."""

import pytest

from cachefs.fs.refusals import MOST_PATHS, PERIOD_S, Refusals
from cachefs.options import Options
from cachefs.stats.metrics import Metrics
from cachefs.store.index.index import Index
from tests.cachefs.inode_caches import inode_cache


def test_each_path_is_logged_once_in_an_hour_and_no_more_than_a_hundred(
    index: Index, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    metrics = Metrics()
    refusals = Refusals(inode_cache(index, Options()), metrics, lambda: now_s)
    for _ in range(3):
        refusals.immutable(7)
        refusals.changed(7)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "inode 7: a change was refused with EPERM",
        "inode 7: a read failed with ESTALE",
    ]
    for number in range(1000):
        refusals.immutable(number)
    assert len(caplog.records) == MOST_PATHS and metrics.refused_changes == 1003 and metrics.stale_reads == 3
    now_s += PERIOD_S
    refusals.immutable(7)
    assert len(caplog.records) == MOST_PATHS + 1
