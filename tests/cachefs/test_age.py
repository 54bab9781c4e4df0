"""Which files are young, and when the kernel's pages of them are dropped."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.contract.shared import SETTLE_NS
from cachefs.data.young_files import YoungFiles
from cachefs.source import age
from cachefs.store.index.environment import Environment
from cachefs.store.index.index import Index
from cachefs.store.index.records import UNSETTLED, Inode
from cachefs.system.clock import NANOSECONDS, Clock

NOW_NS = 1_000 * NANOSECONDS
SECOND_NS = NANOSECONDS


def changed(mtime_s: float, ctime_s: float) -> Inode:
    times = {"mtime_ns": NOW_NS + int(mtime_s * SECOND_NS), "ctime_ns": NOW_NS + int(ctime_s * SECOND_NS)}
    return Inode(7, *(0,) * 22)._replace(**times)


@pytest.mark.parametrize(
    ("mtime_s", "ctime_s", "young", "written_s", "waiting_s"),
    [
        (-9, -9, False, 0, 0),
        (-9, -2, False, 0, 0),
        (-9, -1.5, True, 0.5, 0.5),  # either time counts
        (-1, -9, True, 1, 1),
        (1, -9, True, 2, 3),  # the source's clock is a little ahead
        (-9, 3600, True, 2, 0),  # nobody waits for that
    ],
)
def test_both_times_count_and_the_future_is_young(
    mtime_s: float, ctime_s: float, young: bool, written_s: float, waiting_s: float
) -> None:
    file = changed(mtime_s, ctime_s)
    assert age.is_young(file, NOW_NS, SETTLE_NS) is young
    assert age.until_written_ns(file, NOW_NS, SETTLE_NS) == written_s * SECOND_NS
    assert age.worth_waiting_ns(file, NOW_NS, SETTLE_NS) == waiting_s * SECOND_NS


class Kernel:
    def __init__(self) -> None:
        self.dropped: list[tuple[int, list[int]]] = []

    async def pages(self, numbers: Iterable[int]) -> None:
        self.dropped.append((round(trio.current_time() * 10), list(numbers)))


def test_each_read_of_a_young_file_has_its_pages_dropped_when_it_is_due() -> None:
    async def main() -> None:
        start_s = trio.current_time()
        kernel = Kernel()
        clock = lambda: NOW_NS + int((trio.current_time() - start_s) * NANOSECONDS)  # noqa: E731
        young = YoungFiles(kernel, clock=Clock(clock, clock))
        handled: list[str] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(young.run)
            young.was_read(changed(-9, -1))
            young.was_read(changed(-9, -1)._replace(number=8))
            young.note(9, NOW_NS + 5 * SECOND_NS, lambda: handled.append("noted"))
            # Its record is believed for longer: a reader would miss pages that it believes in.
            settling = changed(-9, -1)._replace(number=10, flags=UNSETTLED, expires_ns=NOW_NS + 3 * SECOND_NS)
            young.was_read(settling)
            await trio.sleep(2)
            young.was_read(changed(3600, 0))  # once more, and later
            await trio.sleep(4)
            nursery.cancel_scope.cancel()
        seconds = [(round(at / 10 - start_s, 1), numbers) for at, numbers in kernel.dropped]
        assert [numbers for _, numbers in seconds] == [[7, 8], [10], [7], [9]]
        assert [int(at) for at, _ in seconds] == [1, 3, 4, 5] and handled == ["noted"]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.promise("CH-16")
def test_a_successor_drops_the_pages_that_its_predecessor_has_not(tmp_path: Path) -> None:
    """Of one file it has, one was read again after a later change, and one while its pages were being dropped."""
    index = Index(Environment(tmp_path / "durable", sync=False), Environment(tmp_path / "session", sync=False))

    async def first() -> None:
        start_s = trio.current_time()
        clock = lambda: NOW_NS + int((trio.current_time() - start_s) * NANOSECONDS)  # noqa: E731
        with trio.move_on_after(1.5):
            async with trio.open_nursery() as nursery:
                reads = [changed(-9, -1)._replace(number=number) for number in (7, 8, 9)]

                class ReadOnce(Kernel):
                    async def pages(self, numbers: Iterable[int]) -> None:
                        if not self.dropped:
                            young.was_read(changed(3600, 0)._replace(number=9))  # again, while it drops them
                        await super().pages(numbers)

                young = YoungFiles(ReadOnce(), index, clock=Clock(clock, clock))
                for read in reads:
                    young.was_read(read)
                young.was_read(changed(-9, 0)._replace(number=8))  # a later change
                nursery.start_soon(young.run)

    async def second() -> None:
        kernel = Kernel()
        young = YoungFiles(kernel, index, clock=Clock(monotonic_ns=lambda: NOW_NS + 60 * SECOND_NS))
        young.restore()
        with trio.move_on_after(1):
            await young.run()
        dropped.append(sorted(number for _, numbers in kernel.dropped for number in numbers))

    dropped: list[list[int]] = []
    trio.run(first, clock=trio.testing.MockClock(autojump_threshold=0))
    for _ in range(2):
        trio.run(second, clock=trio.testing.MockClock(autojump_threshold=0))
    index.close()
    assert dropped == [[8, 9], []]
