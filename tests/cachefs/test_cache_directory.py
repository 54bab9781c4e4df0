"""Whose cache it is, and how far it is trusted after a restart, a crash of the daemon, and one of the machine."""

import shutil
from pathlib import Path

import pytest

from cachefs import cache_directory
from cachefs.attributes import PINNED
from cachefs.cache_directory import CacheDirectory, OpenedIndex, rctime_unmoved
from cachefs.environment import Environment, Table
from cachefs.errors import CacheFsError
from cachefs.options import Revalidate
from cachefs.runs import RunState

LAZY, NEVER, RCTIME = Revalidate.LAZY, Revalidate.NEVER, Revalidate.RCTIME
OLD_RCTIME = b"1000000000.09123"


class Runs:
    """Runs on one cache, one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, kind: Revalidate, end: str, rctime: bytes = b"") -> RunState:
        """`end`: clean, killed (the session survives) or crashed (the machine: it does not)."""
        opened = OpenedIndex(Environment(self.path / "index", sync=True), self.path / "session", kind, rctime)
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
    assert not trusts()
    assert trusts()


@pytest.mark.promise("CH-18")
def test_rctime_trusts_what_stands_still(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.run(RCTIME, "clean", OLD_RCTIME)
    assert runs.trusts(OLD_RCTIME, kind=RCTIME)
    assert not runs.trusts(b"1000000001.09", kind=RCTIME)
    assert not runs.trusts(b"", kind=RCTIME)
    runs.run(RCTIME, "crashed", OLD_RCTIME)
    assert not runs.trusts(OLD_RCTIME, kind=RCTIME)


@pytest.mark.promise("CH-18")
def test_rctime_needs_a_grace_period() -> None:
    assert rctime_unmoved(b"1000.5", b"1000.5", 1061.0)
    assert not rctime_unmoved(b"1000.5", b"1000.5", 1059.0)
    assert not rctime_unmoved(b"1000.5", b"1000.6", 9999.0)
    assert not rctime_unmoved(b"", b"", 9999.0)


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
    with pytest.raises(CacheFsError, match="cannot be read"):
        CacheDirectory(path, "/a")
