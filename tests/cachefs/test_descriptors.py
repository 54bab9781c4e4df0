"""The descriptors of a handle are closed once, whatever else waits."""

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from cachefs.data.handle import Handle
from cachefs.fs import descriptors
from cachefs.fs.descriptors import Descriptors
from cachefs.fs.handles import OpenFiles


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


class PoolOfOneSource:
    async def run(self, call: Callable[[], Any], *, once: bool) -> Any:
        return call()


def test_a_change_that_ends_after_the_source_was_remounted_counts_as_lost() -> None:
    """It was made at the old source, and another call has opened the handle again meanwhile."""
    source = SimpleNamespace(generation=0)
    owner = object.__new__(Descriptors)
    owner.fs = SimpleNamespace(call_pool=PoolOfOneSource(), source=source)  # type: ignore[assignment]
    owner.has_fastpath = False
    opened = Handle(7, fd=1000, writable=True)

    def write(_: int) -> int:
        source.generation = opened.generation = 1
        return 5

    async def main() -> None:
        assert await owner.change(opened, write) == 5
        for _ in range(2):
            assert opened.has_lost(source.generation)
        with pytest.raises(OSError, match="Input/output error"):
            await owner.sync(opened, lambda fd: None)
        assert await owner.change(opened, lambda fd: fd) == 1000
        assert not opened.has_lost(source.generation)
        await owner.sync(opened, lambda fd: None)
        assert opened.unsynced_since is None

    trio.run(main)


class Shared:
    def __init__(self) -> None:
        self.let_gone: list[int] = []
        self.is_closed = False

    async def let_go(self, file: Any) -> None:
        await trio.sleep(0.01)
        self.let_gone.append(file.inode.device)

    async def close(self) -> None:
        self.is_closed = True


def test_files_are_let_go_while_all_are_closed() -> None:
    """Regression: the daemon failed at an unmount, because both tasks go through the recent files."""
    shared = Shared()
    owner = object.__new__(OpenFiles)
    owner.descriptors, owner._shared = SimpleNamespace(handles={}), shared  # type: ignore[assignment]
    files = {number: SimpleNamespace(inode=SimpleNamespace(device=number), handles=1) for number in range(4)}
    owner._recent = OrderedDict(files)  # type: ignore[arg-type]

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(owner.close)
            nursery.start_soon(owner.let_go)

    trio.run(main)
    assert sorted(shared.let_gone) == list(files)
    assert shared.is_closed
