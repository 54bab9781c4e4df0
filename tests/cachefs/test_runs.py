"""Versions are never used twice: not after a lost index, and not after a snapshot was imported (hazard 26)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.contract.blob import RECORD_HEADER_BYTES
from cachefs.contract.index import Table
from cachefs.errors import CacheFsError
from cachefs.options import Revalidate
from cachefs.store import recovery, runs
from cachefs.store.blob import record
from cachefs.store.blob.blob import Blob
from cachefs.store.blob.space import place_of
from cachefs.store.cache_directory import OpenedIndex
from cachefs.store.index.environment import Environment
from cachefs.store.index.records import PINNED, Inode, inode_key, pair_key
from cachefs.store.runs import FIRST_OLD_ALIAS, RUN_BITS, Numbers, RunState, run_of, run_of_inode

SEED = 7


def header(inode: int, version: int, *, source_inode: int | None = None, offset: int = 0) -> record.Header:
    return record.Header(4, inode, offset, version, 4, 1, 2, 3, 0, source_inode or inode, 0o100644)


def in_run(run: int, n: int) -> int:
    return (run << RUN_BITS) + n


@pytest.fixture
def blob(tmp_path: Path) -> Iterator[Blob]:
    made = Blob(tmp_path / "blob", SEED)
    yield made
    made.close()


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Environment]:
    made = Environment(tmp_path / "index", sync=False)
    yield made
    made.close()


def first_run(durable: Environment, tmp_path: Path) -> RunState:
    """The state of the run that begins on this index."""
    opened = OpenedIndex(durable, tmp_path / "session", Revalidate.NEVER, b"")
    state = opened.state
    opened.index.session.close()
    return state


def test_after_a_rebuild_the_run_is_above_every_record_of_the_blob(
    blob: Blob, durable: Environment, tmp_path: Path
) -> None:
    blob.append([(header(5, in_run(3, 9)), b"abcd"), (header(6, in_run(2, 1)), b"abcd")])
    recovery.rebuild(blob, durable)
    state = first_run(durable, tmp_path)
    assert state.run == 4 and state.floor == 4  # and nothing of the blob is taken on trust


def test_after_a_rebuild_the_run_is_above_the_old_aliases_of_the_blob(
    blob: Blob, durable: Environment, tmp_path: Path
) -> None:
    blob.append([(header(FIRST_OLD_ALIAS | in_run(6, 2), in_run(1, 5), source_inode=40), b"abcd")])
    recovery.rebuild(blob, durable)
    assert first_run(durable, tmp_path).run == 7


def test_after_a_rebuild_the_run_is_above_dead_records(blob: Blob, durable: Environment, tmp_path: Path) -> None:
    live, dead = blob.append([(header(5, in_run(1, 9)), b"abcd"), (header(6, in_run(8, 1)), b"abcd")])
    start, end = place_of(dead)
    blob.mark_gap(start, end, in_run(8, 1))
    blob.punch(start + RECORD_HEADER_BYTES, end)
    recovery.rebuild(blob, durable)
    assert first_run(durable, tmp_path).run == 9
    assert [extent for _, extent in recovery.scan(blob)] == [live]


def test_a_rebuild_that_is_interrupted_has_stored_the_run(
    blob: Blob, durable: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob.append([(header(5, in_run(3, 9)), b"abcd")])
    monkeypatch.setattr(recovery, "_inode", lambda header: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recovery.rebuild(blob, durable)
    assert first_run(durable, tmp_path).run == 4


@pytest.mark.parametrize("order", [1, -1], ids=["oldest first", "newest first"])
def test_of_several_numbers_of_one_object_the_last_is_restored(blob: Blob, durable: Environment, order: int) -> None:
    """A file that was replaced twice: its aliases are in the blob, in any order."""
    numbers = [40, FIRST_OLD_ALIAS | in_run(1, 5), FIRST_OLD_ALIAS | in_run(1, 8)]
    records = [(header(number, in_run(1, 4 + n), source_inode=40), b"abcd") for n, number in enumerate(numbers)]
    blob.append(records[::order])
    recovery.rebuild(blob, durable)
    with durable.lmdb.begin() as txn:
        found = {key: value[8:16] for key, value in txn.cursor(db=durable.tables[Table.ALIASES])}
    assert found == {pair_key(0, 40): inode_key(numbers[-1])}


def test_an_index_that_lost_its_run_is_searched_for_the_highest(durable: Environment, tmp_path: Path) -> None:
    with durable.lmdb.begin(write=True) as txn:
        row = Inode(9, PINNED, *(0,) * 21)._replace(version=in_run(4, 1))
        txn.put(inode_key(9), row.pack(), db=durable.tables[Table.INODES])
        alias = PINNED.to_bytes(8, "little") + inode_key(FIRST_OLD_ALIAS | in_run(5, 2))
        txn.put(pair_key(0, 77), alias, db=durable.tables[Table.ALIASES])
    assert first_run(durable, tmp_path).run == 6


def test_an_empty_index_begins_with_run_1(durable: Environment, tmp_path: Path) -> None:
    assert first_run(durable, tmp_path).run == 1


def test_a_run_that_would_reach_the_bit_of_old_aliases_is_refused() -> None:
    assert runs.ended(runs.MAX_RUN - 1).run == runs.MAX_RUN - 1
    with pytest.raises(CacheFsError):
        runs.ended(runs.MAX_RUN)


def test_the_run_of_a_number() -> None:
    version = Numbers(3, takeovers=2).next()
    assert run_of(version) == run_of_inode(FIRST_OLD_ALIAS | version) == 3
    assert run_of_inode(1 << 41) == 0  # a number of the source, as CephFS has them


def test_a_daemon_that_used_its_numbers_up_leaves_the_next_ones_alone(tmp_path: Path) -> None:
    """2^28 of them: a busy read-write mount needs some hours for that."""
    before, session = Environment(tmp_path / "index", sync=False), tmp_path / "session"
    opened = OpenedIndex(before, session, Revalidate.LAZY, b"")
    numbers = Numbers(opened.state.run, opened.takeovers, opened.count_takeovers)
    numbers._last += (1 << 28) - 2
    given = [numbers.next() for _ in range(5)]
    assert given == list(range(given[0], given[0] + 5))
    opened.close(flushed=False)
    after = OpenedIndex(Environment(tmp_path / "index", sync=False), session, Revalidate.LAZY, b"", same_mount=True)
    assert after.state.run == opened.state.run
    assert Numbers(after.state.run, after.takeovers).next() > given[-1] + (1 << 27)
    after.close(flushed=False)


@pytest.mark.promise("FA-43")
@pytest.mark.parametrize("same_mount", [True, False])
def test_a_session_does_not_belong_to_an_index_of_another_cache(tmp_path: Path, same_mount: bool) -> None:
    """Both are in their first run. Found by exchanging the files of two caches: one mount showed the other's bytes."""
    for name in ("mine", "other"):
        durable = Environment(tmp_path / name, sync=False)
        opened = OpenedIndex(durable, tmp_path / f"session of {name}", Revalidate.NEVER, b"")
        opened.close(flushed=False)
    durable, session = Environment(tmp_path / "other", sync=False), tmp_path / "session of mine"
    after = OpenedIndex(durable, session, Revalidate.NEVER, b"", same_mount=same_mount)
    assert after.state.run > opened.state.run and after.lost_records == same_mount
    after.close(flushed=False)


@pytest.mark.parametrize("same_mount", [True, False])
def test_a_session_that_is_not_complete_begins_another_run(tmp_path: Path, same_mount: bool) -> None:
    """Nothing that its daemon recorded is taken on trust; and that stays so for those who take over from there."""
    session = tmp_path / "session"

    def opened(*, same_mount: bool) -> OpenedIndex:
        durable = Environment(tmp_path / "index", sync=False)
        return OpenedIndex(durable, session, Revalidate.NEVER, b"", same_mount=same_mount)

    first = opened(same_mount=False)
    first.index.session.overflow.put(Table.META, b"more", b"than fits")
    first.index.session.overflow.update_mark()
    first.close(flushed=False)
    second = opened(same_mount=same_mount)
    run = first.state.run + 1
    assert (second.state.run, second.state.floor, second.names_floor) == (run, run, run)
    assert second.forgot == same_mount
    second.close(flushed=False)
    third = opened(same_mount=True)
    assert (third.state.run, third.forgot, third.names_floor) == (run, same_mount, run)
    third.close(flushed=False)


@pytest.mark.promise("CH-22")
@pytest.mark.parametrize("where", ["version", "old alias", "validated_run"])
def test_without_a_record_of_the_run_it_is_above_every_number_of_the_index(
    durable: Environment, tmp_path: Path, where: str
) -> None:
    number = FIRST_OLD_ALIAS + in_run(9, 1) if where == "old alias" else 5
    record_ = Inode(number, PINNED, *(0,) * 21)._replace(mode=0o100644, version=in_run(2, 1), validated_run=2)
    if where != "old alias":
        record_ = record_._replace(**{where: in_run(9, 1) if where == "version" else 9})
    with durable.write() as txn:
        txn.put(inode_key(number), record_.pack(), db=durable.tables[Table.INODES])
    assert first_run(durable, tmp_path).run == 10
