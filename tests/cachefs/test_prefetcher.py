"""When the prefetch engine believes that there is no room."""

from types import SimpleNamespace
from typing import Any

import trio

from cachefs.prefetch.engine import PrefetchEngine


class Data:
    """A cache of 100 bytes, of which so many are used when it is asked again and again."""

    capacity_bytes = 100

    def __init__(self, used: list[int]) -> None:
        self._used = used
        self.writes = SimpleNamespace(round_ended=trio.sleep_forever)
        self.evictions = 0

    def fits(self, record_bytes: int) -> bool:
        return self.used_bytes + record_bytes <= self.capacity_bytes

    def make_room(self, wanted_bytes: int) -> None:
        self.evictions += 1

    @property
    def used_bytes(self) -> int:
        return self._used.pop(0) if len(self._used) > 1 else self._used[0]

    @property
    def is_under_way(self) -> bool:
        return len(self._used) > 1


def has_room(data: Data, *, evicts: bool) -> bool:
    nothing: Any = None
    engine = PrefetchEngine(data, *(nothing,) * 5)  # type: ignore[arg-type]

    async def bounded() -> bool:
        with trio.fail_after(10):
            return await engine.has_room(20, evicts=evicts)

    return trio.run(bounded)


def test_what_counts_twice_for_a_moment_does_not_end_it() -> None:
    for evicts in (False, True):
        data = Data([90, 90, 70, 70])
        assert has_room(data, evicts=evicts)
        assert data.evictions == 3 * evicts


def test_a_cache_that_is_full_is_full() -> None:
    for evicts in (False, True):
        assert not has_room(Data([90, 90, 90]), evicts=evicts)
