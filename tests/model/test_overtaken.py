"""An lstat that began before a write of this mount and is answered after it: the size that it brings is an old one.

The kernel would take it over, and put there what is appended next.
"""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import outcome
import pytest
import trio
import trio.testing

from cachefs.contract.index import ROOT_INODE
from cachefs.fs.names import Entry
from tests.model.conftest import BEFORE, NAME, Run
from tests.model.node import Node

AFTER = b" after"
pytestmark = pytest.mark.promise("TE-4")


class Held:
    """Answers of the source to lstats of the file, which come when they are let go."""

    def __init__(self, node: Node) -> None:
        self.is_holding = False
        self._held = trio.Event()
        self._answers: list[Callable[[], None]] = []
        pool = node._parts.call_pool
        self._start = pool.start
        pool.start = self.start  # type: ignore[method-assign]

    def start(self, function: Callable[[], Any], done: Callable[[outcome.Outcome[Any]], None], **options: Any) -> None:
        def hold(answer: outcome.Outcome[Any]) -> None:
            self._answers.append(partial(done, answer))
            self._held.set()

        is_held = self.is_holding and options.get("question") == (ROOT_INODE, NAME)
        self._start(function, hold if is_held else done, **options)

    async def hold(self) -> None:
        """Return when one has been answered and is held."""
        await self._held.wait()
        self.is_holding = False

    def let_go(self) -> None:
        for answer in self._answers:
            answer()


def size_of(entry: Entry) -> int:
    assert entry.inode is not None
    return entry.inode.size


@asynccontextmanager
async def appended_meanwhile(node: Node, held: Held) -> AsyncIterator[int]:
    """An lstat of the file has been answered, and is held until the block ends; then the file grew. Its number."""
    file = await node.open(os.fsdecode(NAME), os.O_WRONLY)
    async with trio.open_nursery() as nursery:
        held.is_holding = True
        nursery.start_soon(node._parts.filesystem.lookup, ROOT_INODE, NAME)
        await held.hold()
        await node.write(file, len(BEFORE), AFTER)
        await node.close(file)
        yield file.inode.number
        held.let_go()


def test_it_is_not_believed_afterwards(run: Run) -> None:
    async def scenario(node: Node) -> None:
        held = Held(node)
        async with appended_meanwhile(node, held) as number:
            pass
        assert size_of(await node._parts.attributes.getattr(number)) == len(BEFORE + AFTER)

    run(scenario)


def test_it_answers_nobody_who_asks_afterwards(run: Run) -> None:
    async def scenario(node: Node) -> None:
        held = Held(node)
        sizes: list[int] = []

        async def ask() -> None:
            sizes.append(size_of(await node._parts.filesystem.lookup(ROOT_INODE, NAME)))

        async with trio.open_nursery() as nursery, appended_meanwhile(node, held):
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
        assert sizes == [len(BEFORE + AFTER)]

    run(scenario)
