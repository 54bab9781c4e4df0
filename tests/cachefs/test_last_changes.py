"""What a READ waits for (metadata/last_changes.py)."""

from contextlib import ExitStack

import pytest
import trio
import trio.testing

from cachefs.metadata.last_changes import MOST_READS, LastChanges


@pytest.fixture
def changes() -> LastChanges:
    times = iter(range(1, 1000))
    return LastChanges(lambda: next(times))


def test_a_read_waits_for_the_writes_that_came_before(changes: LastChanges) -> None:
    events: list[str] = []

    async def write() -> None:
        with changes.writing(7):
            await trio.sleep(0.02)
            events.append("written")

    async def read() -> None:
        events.append("read")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await trio.testing.wait_all_tasks_blocked()
            await changes.read(8, read)
            await changes.read(7, read)

    trio.run(main)
    assert events == ["read", "written", "read"]


@pytest.mark.parametrize("ends", [True, False])
def test_a_read_is_repeated_if_a_write_came_meanwhile(changes: LastChanges, ends: bool) -> None:
    """`ends`: the write is made before the read ends."""
    reads: list[int] = []

    async def read() -> int:
        reads.append(7)
        if len(reads) == 1:
            under_way = ExitStack()
            under_way.enter_context(changes.writing(7))
            if ends:
                under_way.close()
            else:
                trio.lowlevel.spawn_system_task(end, under_way)
        return len(reads)

    async def end(under_way: ExitStack) -> None:
        under_way.close()

    assert trio.run(changes.read, 7, read) == 2


def test_a_read_ends_while_writes_go_on(changes: LastChanges) -> None:
    reads: list[int] = []

    async def read() -> None:
        reads.append(7)
        with changes.writing(7):
            pass

    trio.run(changes.read, 7, read)
    assert len(reads) == MOST_READS
