"""What a record of an inode says after a comparison, a change of ours, a lost name and a FORGET."""

from functools import partial

import pytest

from cachefs.contract.index import ROOT_INODE, Table
from cachefs.fs.immutability import may_become_immutable_on_open
from cachefs.metadata.inode_cache import InodeCache
from cachefs.metadata.inode_paths import links_of, name_expires_ns
from cachefs.metadata.limit import InodeLimit
from cachefs.metadata.validity import FOREVER_NS, Run, Validity
from cachefs.options import Options
from cachefs.store.index.environment import Update
from cachefs.store.index.index import Index
from cachefs.store.index.records import (
    IMMUTABLE,
    IMMUTABLE_ON_OPEN,
    LISTED,
    PINNED,
    STALE,
    UNLINKED,
    UNSETTLED,
    Inode,
    inode_key,
)
from cachefs.store.runs import Numbers
from cachefs.system.clock import NANOSECONDS, Clock
from cachefs.system.stat import Stat, clamped_ns
from policies.globs import Globs
from tests.cachefs.inode_caches import Kernel

DIRECTORY, FILE = 50, 60
NOW_NS = 100 * NANOSECONDS
READ_ONLY = Options(read_only=True, attr_timeout_s=float("inf"))


def directory(number: int = DIRECTORY, time_ns: int = 2) -> Stat:
    return Stat(0o040755, 2, 0, 0, 0, 4096, 10, 8, 1, time_ns, time_ns, 1, 0, number)


def file(number: int = FILE, size: int = 10, nlink: int = 1, time_ns: int = 2) -> Stat:
    return Stat(0o100644, nlink, 0, 0, 0, 4096, size, 8, 1, time_ns, time_ns, 1, 0, number)


class Cache(InodeCache):
    """With a clock that stands still, and a kernel that notes what it was to drop."""

    def __init__(
        self,
        index: Index,
        options: Options = READ_ONLY,
        run: int = 1,
        retention: InodeLimit | None = None,
        **of_source: bool,
    ) -> None:
        """`of_source`: as of `Run`."""
        self.now_ns = NOW_NS
        self.kernel = Kernel()
        super().__init__(
            index,
            options,
            Run(run, run, **of_source),  # type: ignore[arg-type]
            Numbers(run),
            self.kernel,
            partial(may_become_immutable_on_open, options),
            retention=retention,
            clock=Clock(lambda: self.now_ns, lambda: self.now_ns),
        )
        self.pin = options.read_only

    def see(self, update: Update, name: bytes, now: Stat, parent: int = ROOT_INODE) -> Inode:
        number = self.apply_stat(update, parent, name, now, pin=self.pin).number
        return self.known(update, number)

    def known(self, update: Update, number: int) -> Inode:
        record = self.inode(update, number)
        assert record is not None
        return record


@pytest.mark.parametrize("time_ns", [-(1 << 63), -1, 0, (1 << 63) - 1])
def test_times_that_the_index_can_hold_stay_what_they_are(time_ns: int) -> None:
    assert clamped_ns(time_ns) == time_ns


@pytest.mark.parametrize("time_ns", [-(1 << 63) - 1, 1 << 63, 1 << 64])
def test_other_times_become_the_nearest_ones(time_ns: int) -> None:
    blank = Inode(7, *(0,) * 22)._replace(mtime_ns=clamped_ns(time_ns))
    assert Inode.unpack(7, blank.pack()).mtime_ns == (-(1 << 63) if time_ns < 0 else (1 << 63) - 1)


# --- comparisons -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "counts"),
    [({}, True), ({"nlink": 2}, False), ({"device": 1}, False), ({"nlink": 2, "mode": 0o040755}, True)],
    ids=["", "hard links", "another filesystem", "a directory"],
)
def test_records_that_rctime_does_not_cover_count_from_a_later_floor(changes: dict[str, int], counts: bool) -> None:
    validity = Validity(READ_ONLY, Run(9, 3, 7, 7))
    record = Inode(7, PINNED, *(0,) * 21)._replace(**{"mode": 0o100644, "nlink": 1} | changes)
    assert [validity.counts(record._replace(validated_run=validated_run)) for validated_run in (2, 3, 6, 7)] == [
        False,
        counts,
        counts,
        True,
    ]


def test_without_revalidation_other_filesystems_count_from_this_run_and_files_with_several_names_from_any() -> None:
    validity = Validity(READ_ONLY, Run(9, 3, 9, 3))
    record = Inode(7, PINNED, *(0,) * 21)._replace(mode=0o100644, nlink=2, validated_run=8)
    assert validity.counts(record)
    assert not validity.counts(record._replace(device=1))


def test_what_is_believed_no_more_is_compared(index: Index) -> None:
    cache = Cache(index)
    with index.update() as update:
        before = cache.see(update, b"d", directory(time_ns=NOW_NS))
        assert before.flags & PINNED and before.flags & UNSETTLED
        cache.now_ns += READ_ONLY.settle_ns - 1
        assert cache.see(update, b"d", directory(time_ns=NOW_NS + 1)).mtime_ns == NOW_NS
        cache.now_ns += 1
        assert cache.see(update, b"d", directory(time_ns=NOW_NS + 1)).mtime_ns == NOW_NS + 1


@pytest.mark.parametrize("changed", [False, True])
def test_that_a_file_has_changed_is_told(index: Index, changed: bool) -> None:
    cache = Cache(index, Options())
    with index.update() as update:
        cache.see(update, b"f", file())
    assert cache.kernel.attributes_of == []
    cache.now_ns += 10 * NANOSECONDS
    with index.update() as update:
        cache.see(update, b"f", file(size=11 if changed else 10))
    assert cache.kernel.attributes_of == ([FILE] if changed else [])


def test_a_changed_directory_is_not_listed_any_more(index: Index) -> None:
    cache = Cache(index)
    with index.update() as update:
        record = cache.see(update, b"d", directory())
        cache.put_inode(update, record._replace(flags=record.flags | LISTED | STALE))
        assert cache.see(update, b"d", directory()).flags & LISTED
        cache.put_inode(update, record._replace(flags=record.flags | LISTED | STALE))
        assert not cache.see(update, b"d", directory(time_ns=3)).flags & LISTED


@pytest.mark.parametrize("now", [directory(), file()], ids=["directory", "file"])
def test_what_can_have_one_name_only_has_the_new_one(index: Index, now: Stat) -> None:
    """It was renamed at the source: the kernel hears of the old name."""
    cache = Cache(index)
    with index.update() as update:
        number = cache.see(update, b"old", now).number
        assert cache.see(update, b"new", now).number == number
        assert links_of(update, number) == [(ROOT_INODE, b"new")]
        old = cache.dentry(update, ROOT_INODE, b"old")
        assert old is None or old.inode == 0
    assert cache.kernel.names == [(ROOT_INODE, b"old")]


def test_a_file_with_several_names_keeps_them(index: Index) -> None:
    cache = Cache(index)
    with index.update() as update:
        number = cache.see(update, b"a", file(nlink=2)).number
        cache.see(update, b"b", file(nlink=2))
        assert links_of(update, number) == [(ROOT_INODE, b"a"), (ROOT_INODE, b"b")]
    assert cache.kernel.names == []


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_removed_name_leaves_an_inode_without_one_until_it_has_another(index: Index) -> None:
    cache = Cache(index)
    with index.update() as update:
        cache.see(update, b"a", file())
        removed = cache.remove_name(update, ROOT_INODE, b"a")
        assert removed is not None and removed.flags & UNLINKED and cache.known(update, FILE).flags & UNLINKED
        assert links_of(update, FILE) == [] and cache.dentry(update, ROOT_INODE, b"a") is None
        assert not cache.see(update, b"b", file()).flags & UNLINKED
    with index.update() as update:
        cache.drop_unlinked(update)
        assert cache.inode(update, FILE) is not None


@pytest.mark.parametrize("inode", [0, FILE], ids=["absent", "without a record"])
def test_a_name_that_leads_to_nothing_is_removed(index: Index, inode: int) -> None:
    cache = Cache(index)
    with index.update() as update:
        cache.see(update, b"a", file())
        if inode:
            update.delete(Table.INODES, inode_key(FILE))
        else:
            cache.apply_absence(update, ROOT_INODE, b"a", pin=True)
        assert cache.remove_name(update, ROOT_INODE, b"a") is None
        assert cache.dentry(update, ROOT_INODE, b"a") is None


def test_a_directory_whose_name_was_removed_is_reached_by_no_path(index: Index) -> None:
    cache = Cache(index)
    with index.update() as update:
        number = cache.see(update, b"d", directory()).number
        child = cache.see(update, b"e", directory(DIRECTORY + 1), parent=number).number
        assert cache.paths.directory(update, child).path == b"d/e"
        cache.remove_name(update, ROOT_INODE, b"d")
        assert cache.paths.directory(update, child).path is None


@pytest.mark.parametrize(("now", "nlink"), [(directory(), 0), (file(nlink=3), 2), (file(), 0)])
def test_links_are_counted_down_where_this_mount_removes_names(index: Index, now: Stat, nlink: int) -> None:
    cache = Cache(index)
    with index.update() as update:
        number = cache.see(update, b"a", now).number
        cache.lost_name(update, number)
        assert cache.known(update, number).nlink == now.nlink, "it has a name"
        cache.remove_name(update, ROOT_INODE, b"a")
        cache.lost_name(update, number)
        assert cache.known(update, number).nlink == nlink


def test_the_names_of_an_opened_file_are_pinned_with_the_directories_above(index: Index) -> None:
    cache = Cache(index, Options())
    with index.update() as update:
        above = cache.see(update, b"d", directory()).number
        record = cache.see(update, b"f", file(), parent=above)
        assert not (record.flags | cache.known(update, above).flags) & PINNED
        cache.pin_file(update, record)
        assert name_expires_ns(update, FILE, (above, b"f")) == FOREVER_NS
        assert cache.known(update, above).flags & (PINNED | STALE) == PINNED


def test_a_directory_that_had_expired_when_it_was_pinned_is_compared_once_more(index: Index) -> None:
    cache = Cache(index, Options())
    with index.update() as update:
        above = cache.see(update, b"d", directory()).number
        cache.now_ns += 60 * NANOSECONDS
        record = cache.see(update, b"f", file(), parent=above)
        cache.pin_file(update, record)
        assert cache.known(update, above).flags & (PINNED | STALE) == PINNED | STALE


def test_a_name_of_an_earlier_run_is_pinned_when_it_has_been_looked_up_again(index: Index) -> None:
    first = Cache(index)
    with index.update() as update:
        for name in (b"a", b"b"):
            first.see(update, name, file(nlink=2))
    second = Cache(index, Options(), run=2)
    with index.update() as update:
        second.pin_file(update, second.see(update, b"b", file(nlink=2)))
        dentries = [second.dentry(update, ROOT_INODE, name) for name in (b"a", b"b")]
        assert [each.validated_run for each in dentries if each] == [1, 2]


# --- changes of ours -------------------------------------------------------------------------------------------------


def test_a_file_is_not_freezable_while_it_is_written(index: Index) -> None:
    cache = Cache(index, Options())
    with index.update() as update:
        assert cache.see(update, b"f", file()).flags & IMMUTABLE_ON_OPEN
    cache.withdraw_immutable_on_open(FILE)
    with index.update() as update:
        assert not cache.known(update, FILE).flags & IMMUTABLE_ON_OPEN
    cache.withdraw_immutable_on_open(FILE + 1)  # of which nothing is known


def test_an_immutable_file_that_was_dropped_is_dropped_again_when_another_node_changes_it(index: Index) -> None:
    cache = Cache(index, Options())
    with index.update() as update:
        cache.pin_file(update, cache.see(update, b"f", file()))
        cache.drop(update, FILE)
        assert cache.known(update, FILE).flags & (IMMUTABLE | PINNED) == IMMUTABLE
        assert cache.apply_own_change(update, FILE, file(size=11)) == (None, [(ROOT_INODE, b"f")])


def test_where_a_name_that_is_mutable_now_leads_to_is_not_pinned(index: Index) -> None:
    cache = Cache(index, Options(mutable=Globs(("m*",))))
    with index.update() as update:
        cache.apply_root(update, directory(2), pin=False)
        cache.pin_file(update, cache.see(update, b"f", file(nlink=2)))
        assert cache.follow_names(update, FILE) == ([], False)
        cache._put_name(update, ROOT_INODE, b"m", FILE, pinned=False)
        assert cache.follow_names(update, FILE) == ([(ROOT_INODE, b"m")], False)
        assert cache.known(update, FILE).flags & (PINNED | IMMUTABLE) == PINNED | IMMUTABLE
        cache.remove_name(update, ROOT_INODE, b"f")
        assert cache.follow_names(update, FILE) == ([(ROOT_INODE, b"m")], True)
        assert not cache.known(update, FILE).flags & (PINNED | IMMUTABLE)
        assert cache.follow_names(update, FILE) == ([], False)
        assert cache.follow_names(update, FILE + 1) == ([], False)


def test_absences_are_forgotten_with_what_the_kernel_knows_of_them(index: Index) -> None:
    cache = Cache(index)
    with index.update() as update:
        number = cache.see(update, b"d", directory()).number
        cache.see(update, b"f", file(), parent=number)
        for name in (b"x", b"y"):
            cache.apply_absence(update, number, name, pin=True)
        assert cache.drop_children(update, number) == ([FILE], [b"x", b"y"])
        assert cache.drop_children(update, number) == ([FILE], [])


@pytest.mark.promise("CH-31")
def test_no_more_absences_are_pinned_than_the_limit(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachefs.metadata.inode_table.MOST_ABSENCES", 2)
    monkeypatch.setattr("cachefs.metadata.inode_table.ABSENCES_PER_NAME", 1)
    cache = Cache(index)

    def commit_absence(name: bytes) -> bool:
        """Returns whether it was pinned."""
        with index.update() as update:
            cache.apply_absence(update, ROOT_INODE, name, pin=True)
            pinned = cache.dentry(update, ROOT_INODE, name) is not None
        batch = index.take_dirty(100)
        index.commit(batch, ())
        batch.end()
        return pinned

    with index.update() as update:
        cache.see(update, b"f", file())
    assert [commit_absence(b"%d" % number) for number in range(5)] == [True, True, True, False, False]
    with index.update() as update:
        cache.drop_absence(update, ROOT_INODE, b"0")
    assert not commit_absence(b"5")  # the durable index still has it
    assert commit_absence(b"5")


def test_a_directory_with_a_forgotten_absence_is_listed_anew(index: Index) -> None:
    cache = Cache(index)
    with index.update() as update:
        record = cache.see(update, b"d", directory())
        cache.put_inode(update, record._replace(flags=record.flags | LISTED))
        cache.apply_absence(update, DIRECTORY, b"x", pin=True)
        cache.drop_absence(update, DIRECTORY, b"x")
        assert cache.known(update, DIRECTORY).flags == record.flags & ~LISTED
        assert cache.dentry(update, DIRECTORY, b"x") is None


# --- FORGET ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_pinned_child", [True, False])
def test_a_forgotten_directory_stays_where_pinned_names_lead_on(index: Index, has_pinned_child: bool) -> None:
    """As another version that is not listed: callers that noted the old one would list what is left."""
    cache = Cache(index, Options())
    with index.update() as update:
        before = cache.see(update, b"d", directory())
        child = cache.see(update, b"f", file(), parent=DIRECTORY)
        if has_pinned_child:
            cache._put_name(update, DIRECTORY, b"f", child.number, pinned=True)
        cache.put_inode(update, before._replace(flags=before.flags | LISTED))
        assert cache.forget(update, DIRECTORY, before.lookups) != has_pinned_child
        after = cache.inode(update, DIRECTORY)
        if has_pinned_child:
            assert after is not None and after.version > before.version and not after.flags & LISTED
        else:
            assert after is None


def test_a_record_that_goes_does_not_count_as_pinned(index: Index) -> None:
    retention = InodeLimit(index, 10, "no-replacement")
    cache = Cache(index, retention=retention)
    with index.update() as update:
        cache.see(update, b"f", file())
        assert retention._pinned == {FILE}
        cache.remove_name(update, ROOT_INODE, b"f")
        cache.drop_unlinked(update)
    assert retention._pinned == set()
