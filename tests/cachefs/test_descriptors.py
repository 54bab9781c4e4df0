"""The descriptors of a handle are closed once, whatever else waits."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from cachefs.data.handle import Handle
from cachefs.fs import descriptors
from cachefs.fs.descriptors import Descriptors


class SlowPool:
    async def run(self, call: Callable[[], Any], *, once: bool) -> None:
        await trio.sleep(0.01)
        call()


def test_a_handle_that_two_tasks_close_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last borrower leaves while the RELEASE waits: by then the number may be another file's."""
    closed: list[int] = []
    monkeypatch.setattr(descriptors, "close_all", closed.extend)
    owner = object.__new__(Descriptors)
    owner.fs = SimpleNamespace(call_pool=SlowPool())  # type: ignore[assignment]
    opened = Handle(7, fd=1000, stale=[1001], released=True)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(owner.close, opened)
            nursery.start_soon(owner.close, opened)

    trio.run(main)
    assert sorted(closed) == [1000, 1001]
