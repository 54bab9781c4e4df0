"""Which directories are LISTED in a snapshot: those of which no row of the listing is left out."""

from pathlib import Path

import pytest

from cachefs.contract.index import Table
from cachefs.store import snapshot
from cachefs.store.index.environment import Environment
from cachefs.store.index.records import LISTED, PINNED, Dentry, Inode, inode_key, pair_key
from cachefs.store.runs import RunState

RUN, ROOT, FILE = 5, 1, 10
BLANK = Inode(0, PINNED, *(0,) * 21)._replace(validated_run=RUN, entries_valid_from=RUN, version=1)


@pytest.mark.promise("CH-31")
@pytest.mark.parametrize(
    ("other", "is_listed"),
    [
        (Dentry(PINNED, 0, RUN, 0), True),
        (Dentry(PINNED, FILE, 0, 0), True),
        (Dentry(0, 0, 0, 4), False),
    ],
    ids=["an absence", "a doubtful name that is not listed", "a row without an inode"],
)
def test_a_listing_is_complete_only_with_all_of_its_rows(tmp_path: Path, other: Dentry, is_listed: bool) -> None:
    records = [
        BLANK._replace(number=ROOT, flags=PINNED | LISTED, mode=0o040755, source_inode=ROOT),
        BLANK._replace(number=FILE, mode=0o100644, nlink=1, source_inode=FILE),
    ]
    index = Environment(tmp_path / "exported", sync=False)
    with index.lmdb.begin(write=True) as txn:
        txn.put(b"run", RunState(RUN, RUN).pack(), db=index.tables[Table.META])
        for record in records:
            txn.put(inode_key(record.number), record.pack(), db=index.tables[Table.INODES])
        for name, dentry in ((b"name", Dentry(PINNED, FILE, RUN, 3)), (b"other", other)):
            txn.put(inode_key(ROOT) + name, dentry.pack(), db=index.tables[Table.DENTRIES])
            if dentry.position:
                row = PINNED.to_bytes(4, "little") + name
                txn.put(pair_key(ROOT, dentry.position), row, db=index.tables[Table.LISTING])
    index.close()
    snapshot.export(tmp_path / "exported", tmp_path / "file", "/source")
    assert snapshot.load(tmp_path / "file", tmp_path / "index", snapshot.RootIdentity(ROOT, 0), ()) == 1
    index = Environment(tmp_path / "index", sync=False)
    with index.lmdb.begin() as txn:
        root = Inode.unpack(ROOT, txn.get(inode_key(ROOT), db=index.tables[Table.INODES]))
    index.close()
    assert bool(root.flags & LISTED) == is_listed
