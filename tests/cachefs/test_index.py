"""The two environments as one, against a plain dict; commits, crashes and their order."""

import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cachefs.contract.index import MAP_BYTES, Table
from cachefs.errors import IndexDamaged, IndexUnavailable
from cachefs.metadata.listings import Listings
from cachefs.options import Options
from cachefs.store.index import pages
from cachefs.store.index.dirty import Batch
from cachefs.store.index.environment import DATA, MAX_READERS, Environment, View
from cachefs.store.index.index import Index
from cachefs.store.index.overflow import is_complete
from cachefs.store.index.records import PINNED, Extent, Inode, inode_key
from cachefs.system.stat import Stat
from tests.cachefs.inode_caches import inode_cache

PINNED_VALUE, PLAIN_VALUE = PINNED.to_bytes(4, "little"), bytes(4)


class IndexMachine(RuleBasedStateMachine):
    """Puts, deletes, commits in their three steps, and crashes of the daemon, in any order."""

    @initialize()
    def start(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        base = Path(self.directory.name)
        self.index = Index(Environment(base / "durable", sync=False), Environment(base / "session", sync=False))
        self.model: dict[bytes, bytes] = {}
        self.taken: Batch | None = None

    @rule(key=st.integers(0, 5), pinned=st.booleans(), content=st.binary(max_size=3))
    def put(self, key: int, pinned: bool, content: bytes) -> None:
        value = (PINNED_VALUE if pinned else PLAIN_VALUE) + content
        with self.index.update() as update:
            update.put(Table.XATTRS, b"%d" % key, value)
        self.model[b"%d" % key] = value

    @rule(key=st.integers(0, 5))
    def delete(self, key: int) -> None:
        with self.index.update() as update:
            update.delete(Table.XATTRS, b"%d" % key)
        self.model.pop(b"%d" % key, None)

    @rule(fails=st.booleans())
    def abandoned_update(self, fails: bool) -> None:
        with pytest.raises(RuntimeError), self.index.update() as update:
            update.delete(Table.XATTRS, b"1")
            update.put(Table.XATTRS, b"2", PLAIN_VALUE)
            raise RuntimeError

    @rule()
    def session_is_full(self) -> None:
        """Until there is room: whatever is written goes where this key is."""
        self.index.session.overflow.put(Table.META, b"it is full", None)

    @rule()
    def there_is_room(self) -> None:
        while self.index.drain():
            pass
        assert not self.index.session.overflow

    @rule(limit=st.integers(1, 4))
    def take(self, limit: int) -> None:
        if not self.taken:
            self.taken = self.index.take_dirty(limit)

    @rule(fails=st.booleans())
    def commit(self, fails: bool) -> None:
        if fails and self.taken:
            self.index.restore_dirty(self.taken)
        else:
            self.index.forget_committed(self.index.commit(self.taken or self.index.take_dirty(0), []).flushed)
        self.taken = None

    @rule()
    def commit_without_the_last_step_then_crash(self) -> None:
        if self.taken:
            self.index.commit(self.taken, [])
            self.taken = None
        self.crash()

    @rule()
    def crash(self) -> None:
        """A kill of the daemon: what was pinned or deleted stays so, the rest was of a kernel that is gone."""
        self.there_is_room()
        if self.taken:
            self.taken.end()
        self.index.close()
        self.taken = None
        base = Path(self.directory.name)
        self.index = Index(Environment(base / "durable", sync=False), Environment(base / "session", sync=False))
        self.index.recover_session(same_mount=False)
        self.model = {key: value for key, value in self.model.items() if value[0] & PINNED}

    @rule()
    def flush_and_lose_the_session(self) -> None:
        """A clean end: the durable index alone says the same of what is pinned."""
        if self.taken:
            return
        while keys := self.index.take_dirty(3):
            self.index.forget_committed(self.index.commit(keys, []).flushed)
        self.index.close()
        base = Path(self.directory.name)
        shutil.rmtree(base / "session")
        self.index = Index(Environment(base / "durable", sync=False), Environment(base / "session", sync=False))
        self.model = {key: value for key, value in self.model.items() if value[0] & PINNED}

    @invariant()
    def reads_are_the_models(self) -> None:
        if not hasattr(self, "index"):
            return
        with self.index.view() as view:
            assert dict(view.scan(Table.XATTRS, b"")) == self.model
            assert [k for k, _ in view.scan(Table.XATTRS, b"")] == sorted(self.model)
            for key in (b"%d" % number for number in range(6)):
                assert view.get(Table.XATTRS, key) == self.model.get(key)
                assert view.first_key(Table.XATTRS, key) == (key if key in self.model else None)
                tail = dict(view.scan(Table.XATTRS, b"", key))
                assert tail == {each: value for each, value in self.model.items() if each >= key}

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.index.close()
            self.directory.cleanup()


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class Refusing:
    """An LMDB environment on a disk without room."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def begin(self, *, write: bool = False) -> Any:
        return RefusingTransaction(self._real.begin(write=write)) if write else self._real.begin()


class RefusingTransaction(Refusing):
    def commit(self) -> None:
        self._real.abort()
        raise lmdb.DiskError("No space left on device")

    def __enter__(self) -> "RefusingTransaction":
        return self

    def __exit__(self, *_: object) -> None:
        self.commit()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = Index(Environment(tmp_path / "durable", sync=True), Environment(tmp_path / "session", sync=False))
    yield made
    made.close()


def inode(number: int, version: int) -> Inode:
    return Inode(number, PINNED, *(0,) * 21)._replace(version=version)


def put(index: Index, record: Inode) -> None:
    with index.update() as update:
        update.put(Table.INODES, inode_key(record.number), record.pack())


def commit(index: Index, *extents: tuple[int, int, Extent]) -> list[Extent]:
    result = index.commit(index.take_dirty(100), extents)
    index.forget_committed(result.flushed)
    return [*result.rejected, *result.freed]


def extent(version: int, offset: int = 1000, length: int = 10) -> Extent:
    return Extent(PINNED, length, offset, version, 200, (1,))


def test_an_extent_counts_only_with_its_inode_in_that_version(index: Index) -> None:
    assert commit(index, (7, 0, extent(1))) == [extent(1)]  # no inode
    put(index, inode(7, 2))
    assert commit(index, (7, 0, extent(1))) == [extent(1)]  # another version
    assert commit(index, (7, 0, extent(2))) == []
    assert (index.totals.cached_files, index.totals.cached_bytes, index.totals.blob_bytes) == (1, 10, 200)
    assert commit(index, (7, 4096, extent(2))) == []
    assert (index.totals.cached_files, index.totals.cached_bytes) == (1, 20)
    put(index, inode(7, 3))  # a new version frees what the old one had
    assert sorted(commit(index)) == [extent(2), extent(2)]
    assert (index.totals.cached_files, index.totals.cached_bytes, index.totals.blob_bytes) == (0, 0, 0)


def test_an_inode_that_is_not_pinned_any_more_frees_its_extents(index: Index) -> None:
    put(index, inode(7, 1))
    commit(index, (7, 0, extent(1)))
    put(index, inode(7, 1)._replace(flags=0))
    assert commit(index) == [extent(1)]
    assert index.durable.entries(Table.INODES) == 0
    with index.view() as view:
        assert view.get(Table.INODES, inode_key(7))  # the session still has it


def test_pinned_inodes_are_counted_on_their_way_to_the_disk_and_there(index: Index) -> None:
    def check(count: int) -> None:
        assert index.pinned_inodes() == count
        taken = index.take_dirty(100)
        assert index.pinned_inodes() == count
        flushed = index.commit(taken, []).flushed
        assert index.pinned_inodes() == count
        index.forget_committed(flushed)
        assert index.pinned_inodes() == count

    for number in range(3):
        put(index, inode(number, 1))
    put(index, inode(3, 1)._replace(flags=0))
    check(3)
    put(index, inode(0, 2))
    put(index, inode(1, 1)._replace(flags=0))
    put(index, inode(3, 1))
    put(index, inode(4, 1))
    check(4)


def test_a_corrupt_extent_is_dropped_unless_it_was_replaced_meanwhile(index: Index) -> None:
    put(index, inode(7, 1))
    commit(index, (7, 0, extent(1, 1000)))
    assert index.commit(index.take_dirty(0), [], [(7, 0, 999)]).freed == []
    assert index.commit(index.take_dirty(0), [], [(7, 0, 1000)]).freed == [extent(1, 1000)]
    assert index.totals.cached_files == 0


def test_14_a_reader_holds_back_punching(index: Index) -> None:
    put(index, inode(7, 1))
    commit(index, (7, 0, extent(1)))
    reader = index.extent_reader()
    assert index.extents(reader).at(7, 0) == (0, extent(1))
    put(index, inode(7, 2))
    dropped = index.commit(index.take_dirty(10), [])
    assert dropped.freed == [extent(1)]
    oldest = index.durable.oldest_reader()
    assert oldest is not None and oldest < dropped.transaction
    reader.abort()
    assert index.durable.oldest_reader() is None
    with index.durable.lmdb.begin():
        assert index.durable.oldest_reader() == dropped.transaction


def test_what_a_full_session_refuses_is_there_all_the_same(index: Index) -> None:
    said: list[str] = []
    changes: list[bool] = []
    index.on_refused.add(said.append)
    index.session.overflow.on_change.add(changes.append)
    data = index.session.path / "data.mdb"
    put(index, inode(7, 1))
    real, index.session.lmdb = index.session.lmdb, Refusing(index.session.lmdb)
    put(index, inode(7, 2))
    put(index, inode(8, 1))
    assert len(said) == 1 and "No space left" in said[0] and str(index.session.path) in said[0]
    assert changes == [True] and not is_complete(data)
    assert not index.drain() and len(said) == 2
    with index.view() as view:
        assert Inode.unpack(7, view.get(Table.INODES, inode_key(7)) or b"").version == 2
        assert [key for key, _ in view.scan(Table.INODES, b"")] == [inode_key(7), inode_key(8)]
    assert commit(index, (7, 0, extent(2)), (8, 0, extent(1, 5000))) == []  # what is pinned is cached
    index.session.lmdb = real
    while index.drain():
        pass
    assert changes == [True, False] and is_complete(data)
    assert index.session.entries(Table.INODES) == 0 and index.durable.entries(Table.INODES) == 2


def test_16_a_full_index_refuses_and_the_session_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAP_BYTES == 1 << 40
    monkeypatch.setattr("cachefs.store.index.environment.MAP_BYTES", 200 << 10)
    durable = Environment(tmp_path / "durable", sync=True)
    monkeypatch.undo()
    index = Index(durable, Environment(tmp_path / "session", sync=False))
    for number in range(2, 3000):
        put(index, inode(number, 1))
    keys = index.take_dirty(5000)
    with pytest.raises(IndexUnavailable):
        index.commit(keys, [])
    index.restore_dirty(keys)
    assert len(index.dirty) == 2998
    put(index, inode(5, 9))
    with index.view() as view:
        assert Inode.unpack(5, view.get(Table.INODES, inode_key(5)) or b"").version == 9
    index.close()


def test_16_a_reader_that_was_killed_is_cleared(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "durable", sync=False)
    script = (
        "import lmdb,sys,time; e = lmdb.open(sys.argv[1], max_dbs=20); t = e.begin(); print(flush=True); time.sleep(60)"
    )
    reader = subprocess.Popen([sys.executable, "-c", script, tmp_path / "durable"], stdout=subprocess.PIPE)
    assert reader.stdout is not None and reader.stdout.read(1)
    reader.kill()
    reader.wait()
    reader.stdout.close()
    assert environment.oldest_reader() is None  # else it would keep old pages, and space of the blob, for ever
    environment.close()


def test_a_name_that_leads_to_another_inode_keeps_its_place_in_the_listing(index: Index) -> None:
    """Without birth times (CephFS by FUSE) a changed file is another inode, while its directory has not changed."""
    options = Options(read_only=True, attr_timeout_s=float("inf"))
    metadata = inode_cache(index, options)
    listings = Listings(metadata)
    directory = Stat(0o40755, 2, 0, 0, 0, 4096, 0, 0, 1, 1, 1, 0, 0, 10)
    file = Stat(0o100644, 1, 0, 0, 0, 4096, 5, 1, 1, 1, 1, 0, 0, 11)
    with index.update() as update:
        root = metadata.apply_root(update, directory, pin=True)
        metadata.apply_stat(update, 1, b"name", file, pin=True)
        listings.add_rows(update, root, [b"name"], pin=True)
        before = list(listings.rows(update, 1, 0))
        changed = metadata.apply_stat(update, 1, b"name", file._replace(inode=12), pin=True)
        assert changed.number == 12
        assert list(listings.rows(update, 1, 0)) == before == [(3, b"name")]


def test_a_dropped_inode_leads_nobody_to_another_that_has_its_number_later(index: Index) -> None:
    options = Options(read_only=True, attr_timeout_s=float("inf"))
    metadata = inode_cache(index, options)
    file = Stat(0o100644, 1, 0, 0, 0, 4096, 5, 1, 1, 1, 1, 0, 0, 11)
    with index.update() as update:
        root = metadata.apply_root(update, Stat(0o40755, 2, 0, 0, 0, 4096, 0, 0, 1, 1, 1, 0, 0, 10), pin=True)
        assert metadata.apply_stat(update, 1, b"a", file, pin=True).number == 11
        assert metadata.drop(update, 11) == [(1, b"a")]
        assert metadata.paths.path(update, 11) == b"a"  # for who has it open
    index.commit(index.take_dirty(100), [])
    with index.update() as update:
        assert not metadata.forget(update, 11, 1)
        assert metadata.forget(update, 11, 0)
        assert metadata.apply_stat(update, 1, b"b", file._replace(ctime_ns=99), pin=True).number == 11
        assert metadata.paths.path(update, 11) == b"b"
        old = metadata.dentry(update, 1, b"a")
        assert old is not None and not metadata.entry_holds(root, old)


def test_a_view_that_has_ended_takes_no_readers_slot(index: Index) -> None:
    """A thousand requests may wait for the source with such a view in a variable."""
    kept: list[View] = []
    for number in range(2 * MAX_READERS):
        with index.view() as view:
            view.get(Table.META, b"absent")
        with index.update() as update:
            update.put(Table.META, b"%d" % number, bytes(4))
        kept += (view, update)
    assert index.durable.oldest_reader() is None


def test_a_directory_is_found_however_deep_it_lies(index: Index) -> None:
    """Before: ESTALE beneath 4,096 levels, when what had been remembered of them was forgotten."""
    depth = 6000
    metadata = inode_cache(index, Options(read_only=True, attr_timeout_s=float("inf")))
    directory = Stat(0o40755, 2, 0, 0, 0, 4096, 0, 0, 1, 1, 1, 0, 0, 10)
    with index.update() as update:
        metadata.apply_root(update, directory, pin=True)
        parent = 1
        for level in range(depth):
            parent = metadata.apply_stat(update, parent, b"d", directory._replace(inode=100 + level), pin=True).number
        metadata.paths.forget()
        found = metadata.paths.directory(update, parent)
        assert found.number == parent and found.path == b"/".join([b"d"] * depth)
        assert metadata.paths.path(update, parent) == found.path


@pytest.mark.promise("FA-33")
def test_no_commit_leaves_a_file_that_looks_cut_off(tmp_path: Path) -> None:
    """LMDB does not write the last page of the file if a transaction took it and gave it back."""
    draw = random.Random(3)
    environment = Environment(tmp_path / "index", sync=True)
    table = environment.tables[Table.META]
    for _ in range(150):
        with environment.write() as txn:
            for _ in range(draw.randrange(60)):
                txn.put(b"%04d" % draw.randrange(400), bytes(draw.randrange(1500)), db=table)
            for _ in range(draw.randrange(120)):
                txn.delete(b"%04d" % draw.randrange(400), db=table)
        pages.check_length(environment.path / DATA)
    environment.close()
    pages.check_length(environment.path / DATA)


@pytest.mark.promise("FA-37")
def test_pages_that_exchanged_their_places_are_noticed(tmp_path: Path) -> None:
    """Before: LMDB found nothing there, or read beyond the page, and the daemon could end when it started."""
    environment = Environment(tmp_path / "index", sync=True)
    for number in range(400):
        with environment.write() as txn:
            txn.put(b"%06d" % number, bytes(300), db=environment.tables[Table.META])
    environment.close()
    path = environment.path / DATA
    pages.check_pages(path)
    whole = path.read_bytes()
    used = [at for at in range(2 * 4096, len(whole), 4096) if whole[at : at + 8] == (at // 4096).to_bytes(8, "little")]
    noticed = 0
    for one, other in itertools.pairwise(used):
        data = bytearray(whole)
        data[one : one + 4096], data[other : other + 4096] = whole[other : other + 4096], whole[one : one + 4096]
        path.write_bytes(data)
        try:
            pages.check_pages(path)
        except IndexDamaged:
            noticed += 1
    assert noticed > len(used) // 2  # the others are not in use


@pytest.mark.promise("FA-37")
def test_the_pages_of_the_last_transaction_are_checked(tmp_path: Path) -> None:
    """Before: always those that the first of the two meta pages leads to, which may be those of the last but one."""
    environment = Environment(tmp_path / "index", sync=True)
    path = environment.path / DATA
    for _ in range(4):
        before = path.read_bytes()
        environment.try_to_write()
        whole = path.read_bytes()
        written = [at for at in range(2 * 4096, len(whole), 4096) if whole[at : at + 4096] != before[at : at + 4096]]
        path_of_copy = tmp_path / "copy"
        for at in written:
            path_of_copy.write_bytes(whole[:at] + bytes(4096) + whole[at + 4096 :])
            with pytest.raises(IndexDamaged):
                pages.check_pages(path_of_copy)
    environment.close()


@pytest.mark.promise("FA-40")
def test_each_flipped_bit_of_an_index_that_nobody_uses_is_noticed(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "index", sync=True)
    environment.try_to_write()
    environment.close()
    path = environment.path / DATA
    pages.write_checksum(path)
    pages.check_checksum(path)
    whole = path.read_bytes()
    for at in {*range(200), *range(4096, 4296), *range(0, len(whole), 97)}:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(IndexDamaged):
            pages.check_length(path)
            pages.check_checksum(path)
    path.write_bytes(whole + b"appended")
    pages.check_checksum(path)


@pytest.mark.promise("FA-40")
def test_each_flipped_bit_of_the_checksum_is_noticed(tmp_path: Path) -> None:
    """Found by random damages: a mount read on for ever, because the length was enormous."""
    environment = Environment(tmp_path / "index", sync=True)
    environment.try_to_write()
    environment.close()
    pages.write_checksum(environment.path / DATA)
    checksum = environment.path / "checksum"
    whole = checksum.read_bytes()
    for bit in range(64, 8 * len(whole)):  # those before are the transaction: a lower one may have been the last
        flipped = int.from_bytes(whole, "little") ^ 1 << bit
        checksum.write_bytes(flipped.to_bytes(len(whole), "little"))
        with pytest.raises(IndexDamaged):
            pages.check_checksum(environment.path / DATA)


@pytest.mark.promise("FA-40")
def test_a_checksum_says_nothing_about_later_transactions(tmp_path: Path) -> None:
    """A daemon that was killed, or an earlier version of cachefs, leaves such transactions."""
    environment = Environment(tmp_path / "index", sync=True)
    path = environment.path / DATA
    environment.try_to_write()
    old = path.read_bytes()
    environment.try_to_write()
    environment.close()
    pages.write_checksum(path)
    now = path.read_bytes()
    environment = Environment(tmp_path / "index", sync=True)
    pages.check_checksum(path)  # opened and not written to
    environment.try_to_write()
    environment.close()
    assert path.read_bytes() != now
    pages.check_checksum(path)
    path.write_bytes(old)
    with pytest.raises(IndexDamaged):
        pages.check_checksum(path)
    for content in (b"", b"damaged"):
        (environment.path / "checksum").write_bytes(content)
        pages.check_checksum(path)


@pytest.mark.promise("FA-33")
def test_a_file_that_was_cut_off_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "index"
    Environment(path, sync=True).close()
    size = (path / DATA).stat().st_size
    for length in (size - 1, 4096, 1):
        os.truncate(path / DATA, length)
        with pytest.raises(IndexDamaged):
            Environment(path, sync=True)
