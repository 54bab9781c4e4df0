"""When the kernel's pages of young files are dropped. test_young_records.py has which files are young."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.data.young_files import YoungFiles
from cachefs.store.index.environment import Environment
from cachefs.store.index.index import Index
from cachefs.store.index.records import UNSETTLED, YOUNG, Inode
from cachefs.system.clock import NANOSECONDS, Clock

NOW_NS = 1_000 * NANOSECONDS
SECOND_NS = NANOSECONDS


def young_file(number: int = 7, settles_in_s: float = 0) -> Inode:
    """A record of a young file; it expires then, CLOCK_MONOTONIC."""
    expires_ns = NOW_NS + int(settles_in_s * SECOND_NS)
    return Inode(number, UNSETTLED | YOUNG, *(0,) * 21)._replace(expires_ns=expires_ns)


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
            young.was_read(young_file())
            young.was_read(young_file(8))
            young.note(9, NOW_NS + 5 * SECOND_NS, lambda: handled.append("noted"))
            # Its record is valid for longer: a reader would miss pages that it believes in.
            young.was_read(young_file(10, settles_in_s=3))
            await trio.sleep(2)
            young.was_read(young_file())  # once more, and later
            await trio.sleep(4)
            nursery.cancel_scope.cancel()
        seconds = [(round(at / 10 - start_s, 1), numbers) for at, numbers in kernel.dropped]
        assert [numbers for _, numbers in seconds] == [[7, 8], [10], [7], [9]]
        assert [int(at) for at, _ in seconds] == [2, 3, 4, 5] and handled == ["noted"]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.promise("CH-16")
def test_a_successor_drops_the_pages_that_its_predecessor_has_not(tmp_path: Path) -> None:
    """Of one file it has, one was read again after a later change, and one while its pages were being dropped."""
    index = Index(Environment(tmp_path / "durable", sync=False), Environment(tmp_path / "session", sync=False))

    async def first() -> None:
        start_s = trio.current_time()
        clock = lambda: NOW_NS + int((trio.current_time() - start_s) * NANOSECONDS)  # noqa: E731
        with trio.move_on_after(2.5):
            async with trio.open_nursery() as nursery:
                reads = [young_file(number) for number in (7, 8, 9)]

                class ReadOnce(Kernel):
                    async def pages(self, numbers: Iterable[int]) -> None:
                        if not self.dropped:
                            young.was_read(young_file(9))  # again, while it drops them
                        await super().pages(numbers)

                young = YoungFiles(ReadOnce(), index, clock=Clock(clock, clock))
                for read in reads:
                    young.was_read(read)
                young.was_read(young_file(8, settles_in_s=3))  # again, and later
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
