"""Whose cache it is, and how far it is trusted after a restart, a crash of the daemon, and one of the machine."""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from cachefs.contract.index import Table
from cachefs.errors import CacheFsError
from cachefs.options import DEFAULT_NAME, Revalidate
from cachefs.source import rctime
from cachefs.store import cache_directory
from cachefs.store.cache_directory import CacheDirectory, OpenedIndex
from cachefs.store.index.environment import Environment
from cachefs.store.index.records import PINNED
from cachefs.store.runs import RunState

AUTO, LAZY, NEVER = Revalidate.AUTO, Revalidate.LAZY, Revalidate.NEVER
RCTIME = b"1000000000.09123"


def stored(opened: OpenedIndex) -> bytes:
    """What is durable of the run."""
    return opened.index.durable.get(Table.META, b"run") or b""


class Runs:
    """Runs on one cache, one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, kind: Revalidate, rctime: bytes = b"") -> OpenedIndex:
        return OpenedIndex(Environment(self.path / "index", sync=True), self.path / "session", kind, rctime)

    def run(self, kind: Revalidate, end: str, rctime: bytes = b"") -> RunState:
        """`end`: clean, killed (the session survives) or crashed (the machine: it does not)."""
        opened = self.begin(kind, rctime)
        with opened.index.update() as update:
            update.put(Table.XATTRS, b"key", PINNED.to_bytes(4, "little") + b"%d" % opened.state.run)
        state = opened.state
        opened.close(flushed=end == "clean")
        if end == "crashed":
            shutil.rmtree(self.path / "session")
        return state

    def trusts(self, *arguments: bytes, kind: Revalidate) -> bool:
        """Does a run believe what earlier runs compared?"""
        state = self.run(kind, "clean", *arguments)
        return state.floor < state.run


@pytest.mark.promise("CH-17")
def test_lazy_compares_and_never_trusts(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    assert runs.run(NEVER, "clean").run == 1
    assert runs.trusts(kind=NEVER)
    assert not runs.trusts(kind=LAZY)
    assert runs.trusts(kind=NEVER)


def test_12_after_a_kill_never_still_trusts_and_finds_what_was_not_yet_durable(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.run(NEVER, "killed")
    opened = OpenedIndex(Environment(tmp_path / "index", sync=True), tmp_path / "session", NEVER, b"")
    assert opened.state.floor < opened.state.run
    with opened.index.view() as view:
        assert view.get(Table.XATTRS, b"key") == PINNED.to_bytes(4, "little") + b"1"
    assert (Table.XATTRS, b"key") in opened.index.dirty
    opened.close(flushed=True)


@pytest.mark.promise("CH-19")
def test_12_after_a_crash_of_the_machine_never_behaves_as_lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(tmp_path)
    runs.run(NEVER, "crashed")
    assert not runs.trusts(kind=NEVER)
    # /run may be on a disk: a session of another boot does not count either.
    runs.run(NEVER, "killed")
    monkeypatch.setattr(cache_directory, "boot_id", lambda: b"another boot id!")
    assert not runs.trusts(kind=NEVER)


@pytest.mark.promise("EX-7")
def test_never_trusts_only_what_the_same_patterns_of_mutable_let_be_pinned(tmp_path: Path) -> None:
    def trusts(*mutable: str) -> bool:
        durable = Environment(tmp_path / "index", sync=True)
        opened = OpenedIndex(durable, tmp_path / "session", NEVER, b"", mutable=mutable)
        opened.close(flushed=True)
        return opened.state.floor < opened.state.run

    assert not trusts()
    assert trusts()
    assert not trusts("runs/**", "*.log")
    assert trusts("*.log", "runs/**")
    assert not trusts("*.log", "runs/**", f"{DEFAULT_NAME}*.lock")
    assert trusts("*.log", "runs/**")  # a read-only mount has no default names
    assert not trusts("*.log", "runs/**", f"{DEFAULT_NAME}*.lock")
    assert not trusts()
    assert trusts()


@pytest.mark.promise("CH-18")
def test_what_was_recorded_before_is_believed_when_the_rctime_has_stood_still(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    first = runs.run(LAZY, "clean", RCTIME)  # whatever --revalidate says, it is recorded
    for _ in range(2):  # also if a run in between has ended before it was certain
        again = runs.begin(AUTO, RCTIME)
        assert again.state.floor == again.state.run and again.may_be_unmoved
        again.close(flushed=True)
    again = runs.begin(AUTO, RCTIME)
    assert not again.revalidate_earlier_runs(b"1000000001.5") and not again.revalidate_earlier_runs(b"")
    assert again.state.floor == again.state.run
    assert again.revalidate_earlier_runs(RCTIME)
    assert again.state.floor == first.run == RunState.unpack(stored(again)).floor
    assert not again.may_be_unmoved
    again.close(flushed=True)
    assert runs.run(NEVER, "clean", RCTIME).floor == first.run


@pytest.mark.promise("CH-18")
@pytest.mark.parametrize(
    ("end", "before", "now"),
    [
        ("clean", RCTIME, b"1000000001.5"),
        ("clean", RCTIME, b""),
        ("clean", b"", RCTIME),
        ("crashed", RCTIME, RCTIME),
    ],
    ids=["moved", "not told", "not known before", "crash of the machine"],
)
def test_nothing_is_believed_of_before_where_the_rctime_tells_nothing(
    tmp_path: Path, end: str, before: bytes, now: bytes
) -> None:
    runs = Runs(tmp_path)
    runs.run(AUTO, end, before)
    again = runs.begin(AUTO, now)
    assert not again.may_be_unmoved and not again.revalidate_earlier_runs(now)
    assert again.state.floor == again.state.run
    again.close(flushed=True)


@pytest.mark.promise("CH-18")
def test_no_rctime_vouches_for_a_run_that_took_something_on_trust(tmp_path: Path) -> None:
    """What is opened in it gets its number, and need not have been compared."""
    later = b"1000000001.5"
    runs = Runs(tmp_path)
    runs.run(LAZY, "clean", RCTIME)
    for _ in range(2):
        kept = runs.run(NEVER, "clean", later)
        assert kept.floor < kept.run
    first = runs.begin(AUTO, later)
    assert not first.revalidate_earlier_runs(later)
    first.close(flushed=True)
    again = runs.begin(AUTO, later)
    assert again.revalidate_earlier_runs(later) and again.state.floor == first.state.run
    again.close(flushed=True)


@pytest.mark.promise("CH-18")
def test_an_rctime_that_is_too_young_tells_nothing() -> None:
    assert rctime.recordable(b"1000.5", 1061.0, 60.0) == b"1000.5"
    assert rctime.recordable(b"1000.5", 1060.0, 60.0) == b""
    assert rctime.recordable(b"", 1060.0, 60.0) == b""


def test_a_run_that_was_recorded_by_a_version_without_rctimes_floor_is_compared() -> None:
    old = RunState(7, 3, True, bytes(16), RCTIME, 3).pack()[:-8]
    assert RunState.unpack(old).unmoved_floor == 8


def test_a_source_without_rctime_and_one_that_says_nonsense() -> None:
    def says(answer: bytes | OSError) -> Callable[[bytes], bytes]:
        def getxattr(name: bytes) -> bytes:
            if isinstance(answer, OSError):
                raise answer
            return answer

        return getxattr

    assert rctime.ask(says(b"1000.5\0")) == b"1000.5"
    assert rctime.ask(says(b"yesterday")) == b""
    assert rctime.ask(says(OSError(errno.ENODATA, ""))) == b""
    with pytest.raises(OSError):
        rctime.ask(says(OSError(errno.EIO, "")))


def test_a_cache_directory_is_locked_and_belongs_to_one_source(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    first = CacheDirectory(path, "/a")
    with pytest.raises(CacheFsError, match="in use by another"):
        CacheDirectory(path, "/a")
    first.close()
    with pytest.raises(CacheFsError, match="was made for /a, not for /b"):
        CacheDirectory(path, "/b")
    CacheDirectory(path, "/a").close()
    assert path.stat().st_mode & 0o777 == 0o700
    (path / "cache.json").write_text("{")
    CacheDirectory(path, "/b").close()  # whose it was is not known
    assert (path / "cache.json.broken").read_text() == "{"
    with pytest.raises(CacheFsError, match="was made for /b, not for /a"):
        CacheDirectory(path, "/a")


@pytest.mark.promise("FA-43")
def test_an_index_and_a_blob_of_another_cache_are_not_used(tmp_path: Path) -> None:
    """Found by putting them into the cache of a clone of the source: files had the bytes of the other one."""

    def opened(name: str) -> tuple[bytes | None, int]:
        """What is left of the last run, and the size of the blob. Leaves a record, and data."""
        with ExitStack() as stack:
            directory = stack.enter_context(closing(CacheDirectory(tmp_path / name, f"/{name}")))
            blob = stack.enter_context(closing(directory.open_blob()))
            durable = stack.enter_context(closing(directory.open_durable(blob)))
            found = durable.get(Table.META, b"test"), blob.size()
            with durable.write() as txn:
                txn.put(b"test", name.encode(), db=durable.tables[Table.META])
            os.pwrite(blob.fd, b"data", 0)
            return found

    assert opened("mine") == (None, 0) == opened("other")
    assert opened("mine") == (b"mine", 4)
    for name in ("index", "blob", "secret"):
        here, there = tmp_path / "mine" / name, tmp_path / "other" / name
        shutil.rmtree(here) if here.is_dir() else here.unlink()
        there.rename(here)
    assert opened("mine") == (None, 0)
    assert opened("mine") == (b"mine", 4)
    with closing(Environment(tmp_path / "mine/index", sync=True)) as durable, durable.write() as txn:
        txn.delete(b"cache", db=durable.tables[Table.META])
    (tmp_path / "mine/cache.json").write_text('{"format": 1, "source": "/mine"}')  # as of an earlier version
    assert opened("mine") == (b"mine", 4)
