"""Damages while nothing is mounted, and while a mount serves."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, contents, contents_of_damaged, wait_for
from tests.damage.damages import drawn

MODES = {"read-only": ["--read-only"], "read-write": [], "Python alone": ["--read-only", "--no-fastpath"]}
LIVE = 3
"""Damages of one mount, after one while it was unmounted."""


@pytest.mark.promise("FA-16", "FA-33", "FA-34", "FA-36", "FA-37", "TE-2")
@pytest.mark.parametrize("mode", MODES)
def test_random_damages_of_a_cache(
    mount: Callable[..., Mount], source: Path, mode: str, random_seed: int, request: pytest.FixtureRequest
) -> None:
    draw = random.Random(f"{random_seed} {mode}")
    expected = contents(source)
    m = mount(source, *MODES[mode])
    m.killed_fastpaths = 1000  # a program that the kernel ends because of a damaged page is started again
    done: list[str] = []
    left = max(1, request.config.getoption("--damages") // len(MODES))
    while left > 0:
        assert contents(m.path) == expected, done
        wait_for(m.status, lambda s: s["index_problem"] or (s["write_behind_bytes"] == 0 and s["uncommitted"] == 0))
        m.umount()
        for live in (False, *[True] * LIVE):
            damage = drawn(draw, live=live)
            done.append(("live: " if live else "cold: ") + str(damage))
            print(done[-1], flush=True)
            damage.do(m.cache)
            if not live:
                shutil.rmtree(m.cache / "index.broken", ignore_errors=True)
                m.start()
            assert contents_of_damaged(m.path) == expected, done
            m.drop_caches()
            assert contents_of_damaged(m.path) == expected, done
            left -= 1
