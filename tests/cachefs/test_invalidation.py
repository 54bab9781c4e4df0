"""What `cachefs invalidate` walks over."""

from collections.abc import Sequence
from typing import Any, cast

import trio

from cachefs.contract.index import ROOT_INODE
from cachefs.fs.invalidation import Invalidation
from cachefs.options import Options
from cachefs.store.index.index import Index
from cachefs.store.index.records import STALE, Dentry
from cachefs.system.stat import Stat
from tests.cachefs.inode_caches import Kernel, inode_cache

READ_ONLY = Options(read_only=True, attr_timeout_s=float("inf"))


class WaitingKernel(Kernel):
    """Another task may run while it drops names."""

    async def drop(self, entries: Sequence[tuple[int, bytes]], numbers: Sequence[int]) -> None:
        await trio.lowlevel.checkpoint()
        await super().drop(entries, numbers)


def directory(number: int) -> Stat:
    return Stat(0o040755, 2, 0, 0, 0, 4096, 10, 8, 1, number, number, number, 0, number)


def test_names_that_form_a_circle_are_invalidated_once(index: Index) -> None:
    """Before: the command never ended. Doubtful names of directories that were moved may form a circle."""
    metadata = inode_cache(index, READ_ONLY)
    with index.update() as update:
        above = metadata.apply_stat(update, ROOT_INODE, b"above", directory(50), pin=True)
        below = metadata.apply_stat(update, above.number, b"below", directory(51), pin=True)
        metadata.put_dentry(update, below.number, b"above", Dentry(0, above.number, 0, 0))
    nothing = cast(Any, None)
    invalidation = Invalidation(metadata, nothing, WaitingKernel(), nothing, READ_ONLY)

    async def invalidate() -> int:
        with trio.fail_after(10):
            return await invalidation.invalidate(b"above")

    assert trio.run(invalidate) == 2
    with index.view() as view:
        found = [metadata.inode(view, number) for number in (above.number, below.number)]
    assert all(inode is not None and inode.flags & STALE for inode in found)
