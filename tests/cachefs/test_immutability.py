"""Which version becomes immutable when the fast path reports that it has answered an OPEN."""

import pytest

from cachefs.contract.index import ROOT_INODE
from cachefs.contract.messages import OPEN_HAS_VERSION, OPEN_REPORT, OPEN_VERSION_BIT, OPEN_VERSION_MASK
from cachefs.fs.immutability import Immutability
from cachefs.options import Options
from cachefs.store.index.index import Index
from cachefs.store.index.records import IMMUTABLE, IMMUTABLE_ON_OPEN, Inode
from cachefs.system.clock import NANOSECONDS, Clock
from cachefs.system.stat import Stat
from tests.cachefs.inode_caches import inode_cache


def report(inode: Inode) -> int:
    return OPEN_REPORT | OPEN_HAS_VERSION | (inode.version & OPEN_VERSION_MASK) << OPEN_VERSION_BIT


@pytest.mark.parametrize("change", ["none", "expired", "other version", "writer", "earlier fast path"])
def test_the_version_that_the_fast_path_had_becomes_immutable(index: Index, change: str) -> None:
    now_ns = 10**12
    metadata = inode_cache(index, Options(), clock=Clock(lambda: now_ns))
    immutability = Immutability(metadata, Options())
    now = Stat(0o100644, 1, 0, 0, 0, 4096, 10, 8, 1, 5, 5, 5, 0, 60)
    with index.update() as update:
        inode = metadata.apply_stat(update, ROOT_INODE, b"file", now, pin=False)
    assert inode.flags & IMMUTABLE_ON_OPEN
    flags = report(inode)
    if change != "none":
        now_ns += 10 * NANOSECONDS
    if change in ("other version", "earlier fast path"):
        with index.update() as update:
            other = metadata.apply_stat(update, ROOT_INODE, b"file", now._replace(mtime_ns=6, ctime_ns=6), pin=False)
        assert other.number == inode.number and other.version != inode.version
    if change == "earlier fast path":
        flags = OPEN_REPORT | 0o100000
    if change == "writer":
        with immutability.opening_for_writing(inode.number):
            immutability.add_writer(inode.number)
    assert immutability.opened_unseen(inode.number, flags) == (change != "other version")
    if change == "other version":
        with index.update() as update:
            metadata.drop(update, inode.number)
            again = metadata.apply_stat(update, ROOT_INODE, b"file", now._replace(mtime_ns=6, ctime_ns=6), pin=False)
        assert again.number != inode.number, "its reader may have pages of another version"
    found = metadata.current(inode.number)
    assert found is not None and bool(found.flags & IMMUTABLE) == (change != "writer")
