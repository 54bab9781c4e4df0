"""What a daemon that leaves does about notifications that the kernel has not taken yet."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.environment import Environment
from cachefs.index import Index
from cachefs.notifier import KernelNotifier


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = Index(Environment(tmp_path / "durable", sync=False), Environment(tmp_path / "session", sync=False))
    yield made
    made.close()


def test_a_daemon_leaves_when_nothing_is_under_way_and_its_successor_sends_the_rest(index: Index) -> None:
    """A pipe that is full stands for a kernel that waits for a request."""
    reader, device = os.pipe()
    filled = os.write(device, bytes(1 << 16))
    messages: list[bytes] = []

    async def leave() -> None:
        async with trio.open_nursery() as nursery:
            notifier = KernelNotifier(nursery, device)
            left = trio.Event()
            notifier.entry_soon(7, b"under way")
            await trio.testing.wait_all_tasks_blocked()
            notifier.hold_back(left.set)
            await notifier.entry(8, b"held back")
            await notifier.pages([9])
            await trio.testing.wait_all_tasks_blocked(0.2)
            assert not left.is_set()
            while sum(map(len, messages)) < filled:
                messages.append(await trio.to_thread.run_sync(os.read, reader, filled))
            await left.wait()
            notifier.save(index)

    async def take_over() -> None:
        async with trio.open_nursery() as nursery:
            KernelNotifier(nursery, device).restore(index)

    try:
        trio.run(leave)
        under_way = os.read(reader, 1 << 16)
        assert b"under way" in under_way and b"held back" not in under_way
        for expected in (True, False):  # once
            trio.run(take_over)
            os.write(device, b"end")
            sent = os.read(reader, 1 << 16)
            assert (b"held back" in sent and (9).to_bytes(8, "little") in sent) == expected
    finally:
        os.close(reader)
        os.close(device)
