"""Until when the permissions of a directory are known to have held (cachefs/permissions.py)."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.attributes import ROOT_INODE, Stat
from cachefs.index import Index
from cachefs.metadata_cache import MetadataCache
from cachefs.options import Options
from cachefs.permissions import Look, Permissions, PermissionsChanged
from cachefs.source import Source
from cachefs.source_directories import ROOT

CHANGED_NS, LOOKED_NS = 10**15, 2 * 10**15
NOW = Stat(0o040755, 2, 0, 0, 0, 4096, 10, 8, 1, CHANGED_NS, CHANGED_NS, 1, 0, 99)


class Kernel:
    def attributes(self, number: int) -> bool:
        return True


@pytest.fixture
def permissions(index: Index, source: Source) -> Permissions:
    """Of a pinned root."""
    options = Options()
    metadata = MetadataCache(index, options, run=1, floor=1)
    with index.update() as update:
        metadata.apply_root(update, NOW, pin=True)
    return Permissions(metadata, source, None, Kernel(), options)  # type: ignore[arg-type]


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield Source(fd)
    os.close(fd)


def held_ns(index: Index, permissions: Permissions) -> int:
    with index.view() as view:
        (guard,) = permissions.guards(view, ROOT)
    return guard.held_ns


@pytest.mark.promise("PE-6")
def test_the_clock_of_the_source_may_be_behind_ours(index: Index, permissions: Permissions) -> None:
    """An object that changed after the look may have an earlier time than the look: it vouches for two seconds less."""
    settle_ns = Options().settle_ns
    assert held_ns(index, permissions) == CHANGED_NS, "nobody has looked: they held when they were changed last"
    with index.view() as view:
        record = permissions._metadata.inode(view, ROOT_INODE)
    assert record is not None
    permissions.recorded(record, NOW, LOOKED_NS)
    assert held_ns(index, permissions) == LOOKED_NS - settle_ns
    look = Look(ROOT_INODE, NOW, None, CHANGED_NS, LOOKED_NS + 5)
    permissions.judge((), [look])
    assert held_ns(index, permissions) == LOOKED_NS + 5 - settle_ns
    # Of the object for whose sake it was looked at it is certain.
    permissions.judge((), [look._replace(asked_ns=LOOKED_NS + 7)])
    assert held_ns(index, permissions) == LOOKED_NS + 7


@pytest.mark.promise("PE-6")
def test_other_permissions_are_not_known_to_have_held(index: Index, permissions: Permissions) -> None:
    before = held_ns(index, permissions)
    for field, value in {"mode": 0o040700, "uid": 1, "gid": 1}.items():
        look = Look(ROOT_INODE, NOW._replace(**{field: value}), None, CHANGED_NS, LOOKED_NS)
        with pytest.raises(PermissionsChanged):
            permissions.judge((), [look])
        assert held_ns(index, permissions) == before
