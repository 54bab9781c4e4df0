"""Until when the permissions of a directory are known to have held (cachefs/fs/permissions.py)."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from cachefs.contract.index import ROOT_INODE
from cachefs.errors import PermissionsChanged
from cachefs.fs import permissions as permissions_module
from cachefs.fs.permissions import Look, Permissions
from cachefs.metadata import inode_values
from cachefs.options import Options
from cachefs.source.directories import ROOT
from cachefs.source.source import Source
from cachefs.store.index.index import Index
from cachefs.store.index.records import Inode
from cachefs.system.clock import NANOSECONDS, Clock
from cachefs.system.stat import Stat
from tests.cachefs.inode_caches import Kernel, inode_cache

CHANGED_NS, LOOKED_NS = 10**15, 2 * 10**15
NOW = Stat(0o040755, 2, 0, 0, 0, 4096, 10, 8, 1, CHANGED_NS, CHANGED_NS, 1, 0, 99)


@pytest.fixture
def permissions(index: Index, source: Source) -> Permissions:
    """Of a pinned root."""
    options = Options()
    metadata = inode_cache(index, options)
    with index.update() as update:
        metadata.apply_root(update, NOW, pin=True)
    words = {"pass_names_until_ns": 0}
    return Permissions(metadata, source, None, Kernel(), options, words, lambda _: None)  # type: ignore[arg-type]


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield Source(fd)
    os.close(fd)


def vouched_ns(index: Index, permissions: Permissions) -> int:
    with index.view() as view:
        (guard,) = permissions.guards(view, ROOT)
    return guard.vouched_ns


@pytest.mark.promise("PE-6")
def test_the_clock_of_the_source_may_be_behind_ours(index: Index, permissions: Permissions) -> None:
    """An object that changed after the look may have an earlier time than the look: it vouches for two seconds less."""
    settle_ns = Options().settle_ns
    assert vouched_ns(index, permissions) == CHANGED_NS, "nobody has looked: they held when they were changed last"
    with index.view() as view:
        record = permissions._metadata.inode(view, ROOT_INODE)
    assert record is not None
    with index.update() as update:
        permissions.recorded(update, record, NOW, LOOKED_NS)
    assert vouched_ns(index, permissions) == LOOKED_NS - settle_ns
    look = Look(ROOT_INODE, NOW, None, CHANGED_NS, LOOKED_NS + 5)
    permissions.judge((), [look])
    assert vouched_ns(index, permissions) == LOOKED_NS + 5 - settle_ns
    # Of the object for whose sake it was looked at it is certain.
    permissions.judge((), [look._replace(asked_ns=LOOKED_NS + 7)])
    assert vouched_ns(index, permissions) == LOOKED_NS + 7


@pytest.mark.promise("PE-6")
def test_other_permissions_are_not_known_to_have_held(index: Index, permissions: Permissions) -> None:
    before = vouched_ns(index, permissions)
    for field, value in {"mode": 0o040700, "uid": 1, "gid": 1}.items():
        look = Look(ROOT_INODE, NOW._replace(**{field: value}), None, CHANGED_NS, LOOKED_NS)
        with pytest.raises(PermissionsChanged):
            permissions.judge((), [look])
        assert vouched_ns(index, permissions) == before


def adopted(index: Index, permissions: Permissions, now: Stat) -> Inode:
    with index.update() as update:
        record = permissions._metadata.inode(update, ROOT_INODE)
        assert record is not None
        permissions.adopt(update, record, now)
    with index.view() as view:
        record = permissions._metadata.inode(view, ROOT_INODE)
    assert record is not None
    return record


NEWER = NOW._replace(nlink=3, size=20, mtime_ns=CHANGED_NS + 5, ctime_ns=CHANGED_NS + 5, began_ns=2 * 10**18)


@pytest.mark.promise("EX-24")
def test_newer_attributes_leave_the_names_doubtful(index: Index, permissions: Permissions) -> None:
    record = adopted(index, permissions, NEWER)
    assert (record.nlink, record.size, record.mtime_ns, record.ctime_ns) == (3, 20, NEWER.mtime_ns, CHANGED_NS)
    assert not record.same_version(NEWER)
    assert permissions._notifier.attributes_of == [ROOT_INODE]  # type: ignore[attr-defined]
    adopted(index, permissions, NEWER._replace(began_ns=NEWER.began_ns + 1))
    assert permissions._notifier.attributes_of == [ROOT_INODE], "nothing is new"  # type: ignore[attr-defined]


@pytest.mark.promise("EX-24")
def test_names_stay_doubtful_on_a_source_whose_change_times_do_not_move(index: Index, permissions: Permissions) -> None:
    record = adopted(index, permissions, NEWER._replace(ctime_ns=CHANGED_NS))
    assert (record.nlink, record.mtime_ns) == (3, CHANGED_NS)
    assert not record.same_version(NEWER)


@pytest.mark.promise("EX-24")
def test_answers_that_were_overtaken_are_not_adopted(index: Index, permissions: Permissions) -> None:
    adopted(index, permissions, NEWER)
    older = NEWER._replace(nlink=9, began_ns=NEWER.began_ns - 1)
    assert adopted(index, permissions, older).nlink == 3
    permissions._metadata.changes._when_ns[ROOT_INODE] = NEWER.began_ns + 1
    before_own_change = NEWER._replace(nlink=9, began_ns=NEWER.began_ns + 1)
    assert adopted(index, permissions, before_own_change).nlink == 3


class Slots:
    """Calls at once, and counts."""

    calls = 0

    async def run(self, function: Callable[[], Any]) -> Any:
        self.calls += 1
        return function()


CLOSED = Look(ROOT_INODE, NOW._replace(mode=0o040700, uid=7), None, CHANGED_NS, LOOKED_NS)


def test_a_change_counts_until_the_kernel_has_been_told(index: Index, permissions: Permissions) -> None:
    with index.view() as view:
        guards = permissions.guards(view, ROOT)
    permissions.judge(guards, [])
    with pytest.raises(PermissionsChanged) as changed:
        permissions.judge(guards, [CLOSED])
    with pytest.raises(PermissionsChanged):
        permissions.judge(guards, [])
    permissions.tell(changed.value)
    assert permissions._notifier.attributes_of == [ROOT_INODE]  # type: ignore[attr-defined]
    permissions.judge(guards, [])
    permissions.tell(changed.value)
    assert permissions._notifier.attributes_of == [ROOT_INODE], "once for each change"  # type: ignore[attr-defined]


@pytest.mark.parametrize("uid", [None, 0, 7, 8], ids=["daemon", "root", "owner", "another"])
@pytest.mark.parametrize("admitted", [True, False])
def test_who_was_let_in_by_permissions_of_before_must_have_the_new_ones(
    permissions: Permissions, monkeypatch: pytest.MonkeyPatch, uid: int | None, admitted: bool
) -> None:
    """The source is asked for those of whom that is not known."""
    slots = Slots()
    monkeypatch.setattr(permissions, "_call_pool", slots)

    def walk(*arguments: object) -> None:
        if not admitted:
            raise PermissionError

    monkeypatch.setattr(permissions_module, "_walk", walk)
    caller: Any = None if uid is None else SimpleNamespace(uid=uid, pid=1)

    async def main() -> None:
        assert permissions.closed_lately(ROOT, b"f", time.monotonic()) == [], "nothing has changed"
        with pytest.raises(PermissionsChanged):
            permissions.judge((), [CLOSED])
        steps = permissions.closed_lately(ROOT, b"f", time.monotonic())
        assert steps == [(ROOT, b"f")]
        if uid == 8 and not admitted:
            with pytest.raises(PermissionsChanged):
                await permissions.let_in(steps, caller, time.monotonic())
        else:
            await permissions.let_in(steps, caller, time.monotonic())
        assert slots.calls == (uid == 8)

    trio.run(main)


@pytest.mark.promise("PE-6")
@pytest.mark.parametrize("field", ["mode", "uid"])
def test_a_comparison_that_shows_other_permissions_counts_as_a_look(
    index: Index, permissions: Permissions, field: str
) -> None:
    """Before: only a look at a directory above an object did. A comparison of the directory recorded the new ones, and
    requests that the former ones had admitted were answered."""
    metadata = permissions._metadata
    now = NOW._replace(ctime_ns=CHANGED_NS + 5, **{field: CLOSED.now.permissions[field == "uid"]})
    with index.update() as update:
        permissions.recorded(update, metadata.apply_root(update, now, pin=True), now, LOOKED_NS)
    assert permissions.closed_lately(ROOT, b"f", time.monotonic()) == [(ROOT, b"f")]
    assert permissions._words["pass_names_until_ns"] > time.monotonic_ns()
    assert not permissions._notifier.attributes_of, "the kernel ignores answers under way then"  # type: ignore[attr-defined]
    permissions.tell()
    assert permissions._notifier.attributes_of == [ROOT_INODE]  # type: ignore[attr-defined]


def test_the_queue_lasts_while_threads_are_refused_that_have_waited_for_each_other(
    permissions: Permissions, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that is alone, or that asks now and then, looks names up in a directory that it has open (PE-9)."""
    now_s = 1000.0
    monkeypatch.setattr(source, "clock", Clock(monotonic_ns=lambda: int(now_s * NANOSECONDS)))

    def is_closed(after_s: float) -> bool:
        return bool(permissions.closed_lately(ROOT, b"f", now_s + after_s))

    with pytest.raises(PermissionsChanged):
        permissions.judge((), [CLOSED])
    assert is_closed(4.9) and not is_closed(5.1)
    assert permissions.closed_lately(ROOT, b"f", -100.0), "it came before, and has waited in the daemon"
    for pid, pause_s, lasts in ((1, 0.0, False), (1, 0.0, False), (2, 1.0, False), (3, 0.0, True)):
        arrival_s = now_s + pause_s
        now_s += 1.5
        permissions._refused([ROOT_INODE], pid, arrival_s)
        assert is_closed(4.9) == lasts
    for pid in range(4, 100):
        now_s += 1.0
        permissions._refused([ROOT_INODE], pid, now_s - 1.0)
    assert not is_closed(0.0)


@pytest.mark.promise("PE-6")
def test_another_daemon_may_have_found_other_permissions(
    index: Index, source: Source, permissions: Permissions
) -> None:
    """Its successor does not know of which directories."""
    for until_ns, steps in ((0, []), (time.monotonic_ns() + 5 * 10**9, [(ROOT, b"f")])):
        words = {"pass_names_until_ns": until_ns}
        successor = Permissions(permissions._metadata, source, None, Kernel(), Options(), words, lambda _: None)  # type: ignore[arg-type]
        assert successor.closed_lately(ROOT, b"f", time.monotonic()) == steps


@pytest.mark.promise("PE-6")
@pytest.mark.parametrize(
    ("mode", "acl", "is_public"),
    [
        (0o755, inode_values.ABSENT, True),
        (0o705, inode_values.ABSENT, False),
        (0o055, inode_values.ABSENT, False),
        (0o755, inode_values.KNOWN + b"user:8:---", False),
        (0o755, None, False),
    ],
    ids=["everyone", "not the group", "not the owner", "not a user of its ACL", "an ACL that is not known"],
)
def test_whom_a_directory_excludes_is_not_let_in_because_others_may_enter(
    index: Index, permissions: Permissions, mode: int, acl: bytes | None, is_public: bool
) -> None:
    """Before: a queued look-up of a member of its group showed what was new in a directory of mode 0705."""
    now = NOW._replace(mode=0o040000 | mode, gid=2000)
    with pytest.raises(PermissionsChanged) as changed:
        permissions.judge((), [Look(ROOT_INODE, now, acl, CHANGED_NS, LOOKED_NS)])
    assert changed.value.admits(8) == is_public


def test_directories_are_looked_at_once_for_changes_that_follow_each_other(
    permissions: Permissions, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = Slots()
    monkeypatch.setattr(permissions, "_call_pool", slots)
    looks: list[int] = []

    def look(_source: Source, guards: Sequence[Any], _ctime_ns: int) -> list[Look]:
        looks.append(len(guards))
        return [Look(ROOT_INODE, NOW, None, LOOKED_NS, LOOKED_NS)]

    monkeypatch.setattr(permissions_module, "look", look)
    caller: Any = SimpleNamespace(uid=8)
    for _ in range(3):
        trio.run(permissions.before_change, caller, ROOT)
    assert looks == [1]


def test_of_so_many_directories_is_remembered_until_when_their_permissions_held(
    index: Index, permissions: Permissions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permissions_module, "MAX_REMEMBERED", 3)
    for number in range(10, 20):
        permissions._vouch(number, LOOKED_NS, CHANGED_NS)
        assert len(permissions._vouched) <= 3 and number in permissions._vouched
