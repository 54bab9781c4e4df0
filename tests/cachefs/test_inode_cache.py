"""Which number and which attributes an object gets, whatever was there before, and in whatever order answers come."""

import pytest

from cachefs.contract.index import ROOT_INODE
from cachefs.metadata.inode_cache import InodeCache
from cachefs.metadata.validity import ANSWERED_NS
from cachefs.options import Options
from cachefs.store.index.environment import Update
from cachefs.store.index.index import Index
from cachefs.store.index.records import Inode
from cachefs.system.clock import NANOSECONDS, Clock
from cachefs.system.stat import Stat
from tests.cachefs.inode_caches import Kernel, inode_cache

DIRECTORY, FILE = 50, 60
READ_ONLY = Options(read_only=True, attr_timeout_s=float("inf"))


def stat(number: int, mode: int, btime_ns: int) -> Stat:
    return Stat(mode, 2, 0, 0, 0, 4096, 10, 8, 1, btime_ns, btime_ns, btime_ns, 0, number)


def look_up(metadata: InodeCache, update: Update, name: bytes, btime_ns: int, *, pin: bool) -> Inode:
    return metadata.apply_stat(update, ROOT_INODE, name, stat(DIRECTORY, 0o040755, btime_ns), pin=pin)


@pytest.mark.parametrize("is_alias", [False, True], ids=["number of the source", "alias"])
@pytest.mark.parametrize("forgotten", ["by the kernel", "by the next run"])
def test_a_directory_never_gets_the_children_of_one_that_had_its_number(
    index: Index, is_alias: bool, forgotten: str
) -> None:
    metadata = inode_cache(index, READ_ONLY)
    with index.update() as update:
        if is_alias:
            look_up(metadata, update, b"before", 1, pin=True)
        first = look_up(metadata, update, b"first", 2, pin=True)
        assert (first.number != DIRECTORY) == is_alias
        metadata.apply_stat(update, first.number, b"child", stat(FILE, 0o100644, 2), pin=True)
        metadata.apply_absence(update, ROOT_INODE, b"first", pin=True)  # it was removed
        if forgotten == "by the kernel":
            metadata.forget(update, first.number, 1)
        else:
            metadata.drop_unlinked(update)
        second = look_up(metadata, update, b"second", 3, pin=True)
        assert metadata.dentry(update, second.number, b"child") is None
    assert second.number != first.number


def test_a_directory_with_pinned_children_stays_when_the_kernel_forgets_it(index: Index) -> None:
    """On a read-write mount. Its record is what another directory with its number is told from."""
    metadata = inode_cache(index, Options())
    with index.update() as update:
        first = look_up(metadata, update, b"first", 2, pin=False)
        file = metadata.apply_stat(update, first.number, b"child", stat(FILE, 0o100644, 2), pin=False)
        metadata.pin_file(update, file)
        metadata.drop(update, first.number)
        assert not metadata.forget(update, first.number, 1)
        assert look_up(metadata, update, b"first", 2, pin=False).number == first.number
        assert metadata.dentry(update, first.number, b"child") is not None
        metadata.drop(update, first.number)
        metadata.forget(update, first.number, 1)
        second = look_up(metadata, update, b"first", 3, pin=False)
        assert metadata.dentry(update, second.number, b"child") is None


def test_a_removed_inode_is_known_as_long_as_the_kernel_may_know_it(index: Index) -> None:
    """The kernel also forgets a single look-up, and goes on with the inode under another name."""
    metadata = inode_cache(index, READ_ONLY)
    with index.update() as update:
        first = look_up(metadata, update, b"first", 2, pin=True)
        metadata.apply_absence(update, ROOT_INODE, b"first", pin=True)
        assert not metadata.forget(update, first.number, 1)
        assert look_up(metadata, update, b"second", 3, pin=True).number != first.number


@pytest.mark.parametrize("removed", [False, True], ids=["forgotten", "removed and forgotten"])
def test_a_dropped_directory_is_known_as_long_as_the_kernel_may_know_it(index: Index, removed: bool) -> None:
    """While it was pinned nobody counted look-ups. The kernel would say EIO if its number became that of a file."""
    metadata = inode_cache(index, READ_ONLY)
    with index.update() as update:
        first = look_up(metadata, update, b"first", 2, pin=True)
        metadata.drop(update, first.number)
        if removed:
            metadata.apply_absence(update, ROOT_INODE, b"first", pin=True)
        metadata.forget(update, first.number, 1)
        file = stat(first.number, 0o100644, 3)
        assert metadata.apply_stat(update, ROOT_INODE, b"second", file, pin=True).number != first.number


@pytest.mark.parametrize("known_again", [False, True], ids=["", "known again"])
def test_a_forget_that_a_lookup_has_overtaken_takes_no_record_along(index: Index, known_again: bool) -> None:
    """The kernel sends it when it drops an inode, and may get the answer to its next look-up first."""
    metadata = inode_cache(index, Options())
    file = stat(FILE, 0o100644, 2)
    with index.update() as update:
        found = metadata.apply_stat(update, ROOT_INODE, b"file", file, pin=False)
        metadata.pin_file(update, found)
        metadata.drop(update, found.number)  # invalidated: look-ups by the fast path were not counted
        if known_again:
            assert metadata.apply_stat(update, ROOT_INODE, b"file", file, pin=False).number == found.number
        assert not metadata.forget(update, found.number, 3)
        assert metadata.forget(update, found.number, 0) != known_again
        if known_again:
            assert metadata.inode(update, found.number) is not None
            assert metadata.forget(update, found.number, 1)


def test_a_forget_during_a_lookup_takes_no_record_along(index: Index) -> None:
    """The answer to the look-up, which was not counted, has not reached the kernel yet: it says that it does not know
    the inode. It is asked again when it has the answer."""
    now_ns, kernel = 10 * ANSWERED_NS, Kernel()
    metadata = inode_cache(index, READ_ONLY, kernel=kernel, clock=Clock(lambda: now_ns, lambda: 10 * NANOSECONDS))
    with index.update() as update:
        found = metadata.apply_stat(update, ROOT_INODE, b"file", stat(FILE, 0o100644, 2), pin=True)
        metadata.drop(update, found.number)
        assert not metadata.forget(update, found.number, 1)
        assert not metadata.forgotten.take()
        now_ns += ANSWERED_NS
        kernel.known = {found.number}
        assert metadata.forgotten.take() == [found.number]
        assert not metadata.forget(update, found.number, 0)
        kernel.known = set()
        assert not metadata.forget(update, found.number, 1)
        now_ns += ANSWERED_NS
        assert metadata.forgotten.take() == [found.number]
        assert metadata.forget(update, found.number, 0)


@pytest.mark.parametrize("removed", [False, True], ids=["", "removed"])
@pytest.mark.parametrize("options", [READ_ONLY, Options()], ids=["read-only", "read-write"])
def test_a_later_version_never_gets_the_number_of_a_file_that_the_kernel_still_knows(
    index: Index, options: Options, removed: bool
) -> None:
    """A process has it open. It was dropped, and the kernel forgot a look-up of another of its names."""
    kernel = Kernel()
    metadata = inode_cache(index, options, kernel=kernel)
    with index.update() as update:
        found = metadata.apply_stat(update, ROOT_INODE, b"file", stat(FILE, 0o100644, 2), pin=options.read_only)
        metadata.pin_file(update, found)
        kernel.known = {found.number}
        metadata.drop(update, found.number)
        if removed:
            metadata.apply_absence(update, ROOT_INODE, b"file", pin=options.read_only)
        assert not metadata.forget(update, found.number, 1)
        later = stat(FILE, 0o100644, 2)._replace(ctime_ns=3)
        rewritten = metadata.apply_stat(update, ROOT_INODE, b"file", later, pin=options.read_only)
        assert rewritten.number != found.number
        kernel.known = set()
        assert not metadata.forget(update, found.number, 1)
        assert metadata.forget(update, found.number, 0)


@pytest.mark.parametrize("options", [READ_ONLY, Options()], ids=["read-only", "read-write"])
def test_an_answer_that_was_overtaken_does_not_replace_a_later_one(index: Index, options: Options) -> None:
    """A file is written under one name and renamed; the lstat of the first name is slow."""
    clock_ns = 100 * NANOSECONDS
    metadata = inode_cache(index, options, clock=Clock(lambda: clock_ns, lambda: 10 * NANOSECONDS))
    young = stat(FILE, 0o100644, 10 * NANOSECONDS - 1)._replace(nlink=1)
    partial = young._replace(size=5, began_ns=clock_ns - 30)
    whole = young._replace(size=9, ctime_ns=young.ctime_ns + 1, began_ns=clock_ns - 20)
    with index.update() as update:
        first = metadata.apply_stat(update, ROOT_INODE, b"renamed", whole, pin=options.read_only)
        again = metadata.apply_stat(update, ROOT_INODE, b"written", partial, pin=options.read_only)
        assert (again.number, again.size, again.version) == (first.number, 9, first.version)
        renamed = metadata.dentry(update, ROOT_INODE, b"renamed")
        assert renamed is not None and renamed.inode == first.number
        record = metadata.inode(update, first.number)
        assert record is not None and record.size == 9
        clock_ns += 5 * NANOSECONDS
        later = partial._replace(began_ns=clock_ns)
        assert metadata.apply_stat(update, ROOT_INODE, b"written", later, pin=options.read_only).size == 5


@pytest.mark.parametrize("looked_up", [b"a", b"b", b"c"])
@pytest.mark.parametrize("pin", [True, False], ids=["read-only", "read-write"])
def test_names_that_were_invalidated_are_doubtful_until_each_is_looked_up(
    index: Index, looked_up: bytes, pin: bool
) -> None:
    metadata = inode_cache(index, READ_ONLY if pin else Options())
    names = [b"a", b"b", b"c"]
    file = stat(FILE, 0o100644, 2)._replace(nlink=3)
    with index.update() as update:
        metadata.apply_root(update, stat(2, 0o040755, 1), pin=pin)
        for name in names:
            found = metadata.apply_stat(update, ROOT_INODE, name, file, pin=pin)
        metadata.pin_file(update, found)
        metadata.drop(update, found.number)
        found = metadata.apply_stat(update, ROOT_INODE, looked_up, file, pin=pin)
        metadata.pin_file(update, found)
        dentries = {name: metadata.dentry(update, ROOT_INODE, name) for name in names}
        assert {name: dentry.validated_run for name, dentry in dentries.items() if dentry} == {
            name: 1 if name == looked_up else 0 for name in names
        }
        assert metadata.paths.name(update, found.number) == (ROOT_INODE, looked_up)


def test_a_file_is_reached_by_a_name_in_a_directory_that_has_one(index: Index) -> None:
    metadata = inode_cache(index, READ_ONLY)
    file = stat(FILE, 0o100644, 2)
    directories = {name: stat(number, 0o040755, 1) for number, name in enumerate((b"a", b"b"), DIRECTORY)}
    with index.update() as update:
        numbers = [
            metadata.apply_stat(update, ROOT_INODE, name, now, pin=True).number for name, now in directories.items()
        ]
        for number in numbers:
            found = metadata.apply_stat(update, number, b"file", file, pin=True)
        for lost, other in (numbers, numbers[::-1]):  # the other one has its name now
            name = b"a" if lost == numbers[0] else b"b"
            metadata.apply_stat(update, ROOT_INODE, name, directories[b"b" if name == b"a" else b"a"], pin=True)
            assert metadata.paths.name(update, found.number) == (other, b"file")
            metadata.apply_stat(update, ROOT_INODE, name, directories[name], pin=True)
            metadata.apply_stat(
                update,
                ROOT_INODE,
                b"b" if name == b"a" else b"a",
                directories[b"b" if name == b"a" else b"a"],
                pin=True,
            )


def test_a_directory_that_has_a_name_again_is_reached_by_it(index: Index) -> None:
    """On a read-write mount. That it had none was remembered."""
    metadata = inode_cache(index, Options())
    with index.update() as update:
        number = look_up(metadata, update, b"before", 1, pin=False).number
        metadata.apply_absence(update, ROOT_INODE, b"before", pin=False)
        assert metadata.paths.directory(update, number).path is None
        look_up(metadata, update, b"after", 1, pin=False)
        assert metadata.paths.directory(update, number).path == b"after"


@pytest.mark.parametrize("is_moved", [False, True], ids=["directory renamed", "file moved"])
def test_a_file_loses_no_name_when_its_directory_gets_another_number(index: Index, is_moved: bool) -> None:
    """A process has the directory open, and another one comes by its new name (overlayfs, which has no birth times).
    Each look-up cost the other process the name, and its open for writing failed with ESTALE."""
    metadata = inode_cache(index, Options())
    file = stat(FILE, 0o100644, 1)._replace(nlink=1, btime_ns=0)
    before, after = (stat(DIRECTORY, 0o040755, at)._replace(btime_ns=0) for at in (1, 2))
    if is_moved:
        after = after._replace(inode=DIRECTORY + 1)
    with index.update() as update:
        first = metadata.apply_stat(update, ROOT_INODE, b"before", before, pin=False).number
        number = metadata.apply_stat(update, first, b"file", file, pin=False).number
        second = metadata.apply_stat(update, ROOT_INODE, b"after", after, pin=False).number
        assert first != second
        for directory in (second, first, second):
            assert metadata.apply_stat(update, directory, b"file", file, pin=False).number == number
            assert metadata.paths.links(update, number) == [(directory, b"file")]
    assert bool(metadata.last_loss_ns(number)) == is_moved


@pytest.mark.promise("CH-11")
@pytest.mark.parametrize("field", ["size", "mtime_ns"])
def test_a_change_of_ours_that_comes_with_one_of_another_node_drops_the_file(index: Index, field: str) -> None:
    """Size and mtime are looked at each for itself: either may have been set back."""
    metadata = inode_cache(index, READ_ONLY)
    with index.update() as update:
        before = metadata.apply_stat(update, ROOT_INODE, b"file", stat(FILE, 0o100644, 2), pin=True)
        ours = stat(FILE, 0o100644, 2)._replace(ctime_ns=9)
        kept, dropped = metadata.apply_own_change(update, before.number, ours)
        assert kept is not None and kept.version == before.version and not dropped
        theirs = ours._replace(ctime_ns=10, **{field: getattr(ours, field) + 1})
        assert metadata.apply_own_change(update, before.number, theirs) == (None, [(ROOT_INODE, b"file")])


@pytest.mark.promise("CH-22", "FA-19")
def test_a_number_of_which_something_may_be_forgotten_is_not_given_out(index: Index) -> None:
    """The kernel may know an inode by it, with pages, of which no record is left."""
    metadata = inode_cache(index, READ_ONLY, forgot=True)
    with index.update() as update:
        assert metadata.apply_stat(update, ROOT_INODE, b"file", stat(FILE, 0o100644, 2), pin=True).number != FILE
