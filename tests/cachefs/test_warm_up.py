"""Warm-up on fakes: what a mount cannot be made to do at a given moment."""

import errno
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from cachefs.options import Options
from cachefs.prefetch.engine import PrefetchEngine
from cachefs.prefetch.scan import Scan
from cachefs.store.index.records import PINNED, Inode


def inode(number: int) -> Inode:
    return Inode(number, PINNED, *(0,) * 21)._replace(mode=0o100644, size=10, nlink=1, version=1, validated_run=1)


class Files:
    def __init__(self, failing: dict[int, int]) -> None:
        self._failing = failing

    async def make_immutable(self, number: int) -> bool:
        if number in self._failing:
            raise OSError(self._failing[number], os.strerror(self._failing[number]))
        return True


def looked_at(failing: dict[int, int], gone: set[int]) -> Scan:
    """The files 1 to 100 of a directory. `failing`: errno by number; `gone`: those that have no name any more."""

    def path_of(number: int) -> bytes:
        if number in gone:
            raise OSError(errno.ESTALE, "gone")
        return b"f%d" % number

    metadata = SimpleNamespace(index=SimpleNamespace(view=nullcontext), inode=lambda view, number: inode(number))
    filesystem: Any = SimpleNamespace(options=Options(), metadata=metadata, path_of=path_of)
    nothing: Any = None
    files: Any = Files(failing)
    engine = PrefetchEngine(nothing, nothing, filesystem, nothing, files, nothing)
    scan = Scan(engine, wants_data=True, fetches=True, pins_written=False)
    trio.run(scan._take, list(range(1, 101)), [])
    return scan


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_a_file_that_disappears_while_its_directory_is_looked_at_is_skipped_alone(number: int) -> None:
    scan = looked_at({3: number, 50: number}, gone={3, 50})
    assert scan.found.files == 98 and scan.problems.errors == 0


def test_a_file_that_cannot_be_looked_at_is_named_and_the_others_are_found() -> None:
    scan = looked_at({7: errno.EIO}, gone=set())
    assert scan.found.files == 99 and scan.problems.errors == 1
    assert scan.problems.lines == ["f7: Input/output error"]
