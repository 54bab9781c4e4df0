"""Checks what a power cut has left: it is mounted over the same source, in process or as a user would."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cachefs.options import Options
from tests.conftest import Mount, contents
from tests.model.clocks import Clocks
from tests.model.node import Node, TrioThread

FRESH = Path("fresh", "file")
"""Where a survivor writes."""


class Survivor(Node):
    """A node that says what it has counted."""

    @property
    def corrupt_records(self) -> int:
        return self._parts.metrics.corrupt_records

    @property
    def hits(self) -> int:
        return self._parts.metrics.hits


class InProcess:
    """Mounts what is left with the filesystem's objects, without FUSE. Its session is missing, as after a boot."""

    def __init__(self, source: Path, call: Callable[..., Any], clocks: Clocks) -> None:
        self._source, self._call, self._clocks = source, call, clocks
        self._expected = contents(source)
        self._directories = [source, *(p for p in source.rglob("*") if p.is_dir())]
        self.hits = 0
        """Reads that what was left could answer."""

    def check(self, place: Path, options: Options, *, lost_index: bool) -> None:
        """`place`/cache is what is left. Fails on a wrong byte or name, and where the index led to bad payload."""
        if lost_index:
            shutil.rmtree(place / "cache" / "index", ignore_errors=True)
        self._call(partial(self._check, place, options, lost_index=lost_index))

    async def _check(self, place: Path, options: Options, *, lost_index: bool) -> None:
        node = Survivor(self._source, place, options, self._clocks, random.Random(0))
        await node.start()
        try:
            await self._compare(node)
            self.hits += node.hits
            if not lost_index:
                assert node.corrupt_records == 0, "the index pointed at payload that was not on disk"
            if not options.read_only:
                await self._write(node)
            await node.remount()
            await self._compare(node)
            assert node.corrupt_records == 0, "the second mount found corrupt records"
        finally:
            await node.end()

    async def _compare(self, node: Survivor) -> None:
        for directory in self._directories:
            there = str(directory.relative_to(self._source)).removeprefix(".")
            listed = await node.listdir(there)
            assert sorted(listed) == sorted(os.listdir(directory)), f"{directory} lists {listed}"
        for path, content in self._expected.items():
            file = await node.open(str(path), os.O_RDONLY)
            data = await node.read(file, 0, len(content) + 1)
            await node.close(file)
            assert data == content, f"{path}: {len(data)} bytes, not the {len(content)} of the source"

    async def _write(self, node: Survivor) -> None:
        data = os.urandom(10_000)
        file = await node.open(str(FRESH), os.O_RDWR | os.O_CREAT)
        assert await node.write(file, 0, data) == len(data)
        assert await node.read(file, 0, len(data)) == data
        await node.close(file)
        assert (self._source / FRESH).read_bytes() == data
        await node.unlink(str(FRESH))


@contextmanager
def in_process(source: Path) -> Iterator[InProcess]:
    clocks = Clocks()
    with TrioThread(clocks).running() as call:
        yield InProcess(source, call, clocks)


def check_mounted(m: Mount, *, lost_index: bool) -> None:
    """The same on a real mount; the mount is gone afterwards."""
    expected = contents(m.source)
    assert contents(m.path) == expected
    assert lost_index or m.status()["corrupt_records"] == 0
    if "--read-only" not in m.arguments:
        data = os.urandom(10_000)
        (m.path / FRESH).write_bytes(data)
        assert (m.source / FRESH).read_bytes() == data
        (m.path / FRESH).unlink()
    m.umount()
    m.start()
    assert contents(m.path) == expected
    assert m.status()["corrupt_records"] == 0
    m.umount()
