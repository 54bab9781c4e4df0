"""What `cachefs invalidate` walks over."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import trio

from cachefs.contract.index import ROOT_INODE
from cachefs.fs.invalidation import Invalidation
from cachefs.metadata.inode_cache import InodeCache
from cachefs.options import Options
from cachefs.store.index.index import Index
from cachefs.store.index.records import STALE, Dentry
from cachefs.system.stat import Stat
from policies.globs import Globs
from tests.cachefs.inode_caches import Kernel, inode_cache

T = TypeVar("T")

READ_ONLY = Options(read_only=True, attr_timeout_s=float("inf"))


class WaitingKernel(Kernel):
    """Another task may run while it drops names."""

    async def drop(self, entries: Sequence[tuple[int, bytes]], numbers: Sequence[int]) -> None:
        await trio.lowlevel.checkpoint()
        await super().drop(entries, numbers)


def directory(number: int) -> Stat:
    return Stat(0o040755, 2, 0, 0, 0, 4096, 10, 8, 1, number, number, number, 0, number)


def circle(index: Index, metadata: InodeCache) -> tuple[int, int]:
    """Two directories, each of which has a name of the other one; the name of the upper one is doubtful."""
    with index.update() as update:
        above = metadata.apply_stat(update, ROOT_INODE, b"above", directory(50), pin=True).number
        below = metadata.apply_stat(update, above, b"below", directory(51), pin=True).number
        metadata.put_dentry(update, below, b"above", Dentry(0, above, 0, 0))
    return above, below


def invalidation_of(metadata: InodeCache, options: Options) -> Invalidation:
    nothing = cast(Any, None)
    return Invalidation(metadata, nothing, WaitingKernel(), nothing, options)


def file(number: int) -> Stat:
    return directory(number)._replace(mode=0o100644, nlink=1)


def in_time(call: Callable[[], Awaitable[T]]) -> T:
    async def run() -> T:
        with trio.fail_after(10):
            return await call()

    return trio.run(run)


def test_names_that_form_a_circle_are_invalidated_once(index: Index) -> None:
    """Before: the command never ended. Doubtful names of directories that were moved may form a circle."""
    metadata = inode_cache(index, READ_ONLY)
    numbers = circle(index, metadata)
    assert in_time(lambda: invalidation_of(metadata, READ_ONLY).invalidate(b"above")) == 2
    with index.view() as view:
        found = [metadata.inode(view, number) for number in numbers]
    assert all(inode is not None and inode.flags & STALE for inode in found)


def test_a_rename_follows_names_that_form_a_circle_once(index: Index) -> None:
    """Before: a rename of such a directory never ended on a mount with mutable names."""
    options = Options(mutable=Globs(("**/logs/*",)))
    metadata = inode_cache(index, options)
    above, _ = circle(index, metadata)
    assert in_time(lambda: invalidation_of(metadata, options).follow_names([above])) == []


def test_a_directory_without_a_name_does_not_fail_the_change_of_a_file_in_it(index: Index) -> None:
    """Before: open(O_TRUNC) emptied the file at the source, and then failed for the path in a log line."""
    metadata = inode_cache(index, Options())
    with index.update() as update:
        above = metadata.apply_stat(update, ROOT_INODE, b"above", directory(50), pin=True).number
        number = metadata.apply_stat(update, above, b"file", file(51), pin=True).number
        metadata.apply_absence(update, ROOT_INODE, b"above", pin=True)
    in_time(lambda: invalidation_of(metadata, Options()).overwritten(number))
    with index.view() as view:
        assert metadata.is_result(view, number)
