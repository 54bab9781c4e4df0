"""What the source is told when a mount changes something."""

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cachefs.fs.attributes import Changes
from cachefs.source.credentials import Caller
from cachefs.system import syscalls
from cachefs.system.syscalls import UTIME_NOW, UTIME_OMIT
from tests.model.clocks import Clocks
from tests.model.modes import OPTIONS
from tests.model.node import Node, TrioThread

GIVEN_NS = 3_000_000_000_005
GIVEN, NOW, OMITTED = (3000, 5), (0, UTIME_NOW), (0, UTIME_OMIT)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[Node, Callable[..., Any]]]:
    clocks = Clocks()
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_bytes(b"content")
    with TrioThread(clocks).running() as call:
        made = Node(tmp_path / "source", tmp_path, OPTIONS["read-write"], clocks, random.Random(0))
        call(made.start)
        yield made, call
        call(made.end)


@pytest.mark.promise("WR-10")
@pytest.mark.parametrize(
    ("atime_ns", "mtime_ns", "now", "told"),
    [
        (GIVEN_NS, GIVEN_NS, (False, False), (GIVEN, GIVEN)),
        (GIVEN_NS, GIVEN_NS, (True, True), (NOW, NOW)),
        (GIVEN_NS, GIVEN_NS, (False, True), (GIVEN, NOW)),
        (GIVEN_NS, GIVEN_NS, (True, False), (NOW, GIVEN)),
        (None, GIVEN_NS, (False, True), (OMITTED, NOW)),
        (GIVEN_NS, None, (True, False), (NOW, OMITTED)),
        (GIVEN_NS, GIVEN_NS, None, (GIVEN, GIVEN)),  # the owner, without the fast path
    ],
)
def test_now_is_the_time_of_the_source(
    node: tuple[Node, Callable[..., Any]],
    monkeypatch: pytest.MonkeyPatch,
    atime_ns: int | None,
    mtime_ns: int | None,
    now: tuple[bool, bool] | None,
    told: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    made, call = node
    seen: list[tuple[Any, ...]] = []
    really = syscalls.utimensat
    monkeypatch.setattr(syscalls, "utimensat", lambda path, *times: (seen.append(times), really(path, *times)))
    file = call(partial(made.open, "file", os.O_RDWR))
    changes = Changes(atime_ns=atime_ns, mtime_ns=mtime_ns, now=now)
    caller = Caller(os.geteuid(), os.getegid(), os.getpid())
    call(partial(made._parts.mutations.setattr, file.inode.number, changes, None, caller))
    call(partial(made.close, file))
    assert seen == [told]


@pytest.mark.promise("WR-8")
@pytest.mark.parametrize(("data_only", "called"), [(False, "fsync"), (True, "fdatasync")])
def test_what_was_to_be_synced_is_synced(
    node: tuple[Node, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch, data_only: bool, called: str
) -> None:
    made, call = node
    seen: list[str] = []
    file = call(partial(made.open, "file", os.O_RDWR))
    call(partial(made.write, file, 0, b"new"))
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd, name=name: seen.append(name))
    call(partial(made._parts.mutations.fsync, file.handle, data_only))
    monkeypatch.undo()
    call(partial(made.close, file))
    assert seen == [called]
