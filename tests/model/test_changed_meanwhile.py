"""A file is opened for reading while a change of it by its path is under way: the open makes it not immutable."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio

from cachefs.fs.attributes import Changes
from cachefs.source.credentials import Caller
from tests.model.conftest import BEFORE, NAME, Run
from tests.model.node import Node

pytestmark = pytest.mark.promise("IM-1")
CALLER = Caller(0, 0, os.getpid())
CHANGES = {
    "truncate": Changes(size=3),
    "utimens": Changes(mtime_ns=1, atime_ns=1),
    "chmod": Changes(mode=0o600),
    "chown": Changes(uid=7),
}


class Delayed:
    """The next change of the source, which is made when it is let go."""

    def __init__(self, node: Node) -> None:
        self.asked = trio.Event()
        self._change: Callable[[], None] | None = None
        pool = node._parts.call_pool
        self._start = pool.start
        pool.start = self.start  # type: ignore[method-assign]

    def start(self, function: Any, done: Any, **options: Any) -> None:
        call = partial(self._start, function, done, **options)
        if self._change is None and options.get("once"):
            self._change = call
            self.asked.set()
        else:
            call()

    def let_go(self) -> None:
        assert self._change is not None
        self._change()


def read_meanwhile(run: Run, change: Callable[[Node, int], Any]) -> bytes:
    """What a reader gets after the change that opened the file before it was made."""
    read: list[bytes] = []

    async def scenario(node: Node) -> None:
        number = (await node.kernel.stat(os.fsdecode(NAME))).number
        delayed = Delayed(node)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(change, node, number)
            await delayed.asked.wait()
            file = await node.open(os.fsdecode(NAME), os.O_RDONLY)
            delayed.let_go()
        read.append(await node.read(file, 0, 100))
        await node.close(file)

    run(scenario)
    return read[0]


@pytest.mark.parametrize("kind", CHANGES)
def test_a_reader_sees_the_file_after_its_attributes_have_changed(run: Run, kind: str) -> None:
    async def change(node: Node, number: int) -> None:
        await node._parts.mutations.setattr(number, CHANGES[kind], None, CALLER)

    assert read_meanwhile(run, change) == BEFORE[: CHANGES[kind].size]


@pytest.mark.parametrize("operation", ["setxattr", "removexattr"])
def test_a_reader_sees_the_file_after_an_attribute_of_a_user_has_changed(
    run: Run, operation: str, tmp_path: Any
) -> None:
    name = b"user.name"
    os.setxattr(tmp_path / "source" / os.fsdecode(NAME), name, b"before")

    async def change(node: Node, number: int) -> None:
        value = (b"after",) if operation == "setxattr" else ()
        await getattr(node._parts.mutations, operation)(number, name, *value, CALLER)

    assert read_meanwhile(run, change) == BEFORE
