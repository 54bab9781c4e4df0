"""A read-write mount without a kernel, for tests of calls that are under way at the same time."""

import os
import random
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.model.clocks import Clocks
from tests.model.modes import OPTIONS
from tests.model.node import Node, TrioThread

NAME, BEFORE = b"file", b"before"

Run = Callable[[Callable[[Node], Awaitable[None]]], None]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """`run(scenario)`: in the thread of trio."""
    clocks = Clocks()
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / os.fsdecode(NAME)).write_bytes(BEFORE)
    with TrioThread(clocks).running() as call:
        node = Node(tmp_path / "source", tmp_path, OPTIONS["read-write"], clocks, random.Random(0))
        call(node.start)
        yield lambda scenario: call(partial(scenario, node))
        call(node.end)
