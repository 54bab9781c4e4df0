"""Sources that give an object another inode number once the kernel has forgotten it: sshfs, and others on libfuse."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import cycle, permutations
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.bindfs import take_over
from tests.conftest import REPOSITORY, Mount, cachefs, drop_caches_of, expire, mounted_on, settle, wait_for
from tests.sshfs import sshfs
from tests.users import as_user, open_to_all

MakeMount = Callable[..., Mount]

MIB = 1 << 20
SIZE = 9 * MIB
LONG_AGO = 1577836800
USER = 1234
MODES = {"read-only": ["--read-only"], "read-write": [], "mutable": ["--mutable", "**"], "none": ["--cache", "none"]}
SMALL = ("d/a", "d/b", "d/c")
"""They have the same size, and get the same time."""


class Volatile(NamedTuple):
    root: Path
    path: Path
    faults: Path

    def renumber(self) -> None:
        """Have the kernel forget what is not in use, until one of `SMALL` has a number that another one had."""
        before = {name: (self.path / name).stat().st_ino for name in SMALL}
        orders = cycle(permutations(SMALL))

        def look() -> dict[str, int]:
            drop_caches_of(self.path)
            return {name: (self.path / name).stat().st_ino for name in next(orders)}

        # A FORGET has no answer, so that the source may get it later.
        wait_for(look, lambda now: any(now[name] in before.values() and now[name] != before[name] for name in SMALL))

    def forgotten(self) -> list[int]:
        """Have the kernel forget what is not in use. Returns the numbers of `SMALL` after that."""
        before = [(self.path / name).stat().st_ino for name in SMALL]

        def look() -> list[int]:
            drop_caches_of(self.path)
            return [(self.path / name).stat().st_ino for name in SMALL]

        return list(wait_for(look, lambda now: now != before))


def content(name: str) -> bytes:
    return name.encode() * 1000


@pytest.fixture
def fstype() -> str:
    return "volatilefs"


@pytest.fixture
def volatile(tmp_path: Path, fstype: str) -> Iterator[Volatile]:
    made = Volatile(tmp_path / "root", tmp_path / "volatile", tmp_path / "faults")
    made.path.mkdir()
    made.faults.mkdir()
    (made.root / "d").mkdir(parents=True)
    for name in SMALL:
        (made.root / name).write_bytes(content(name))
    (made.root / "d/large").write_bytes(b"a" * SIZE)
    for name in (*SMALL, "d/large"):
        os.utime(made.root / name, (LONG_AGO, LONG_AGO))
    settle()
    command = [sys.executable, "-m", "tests.volatilefs", *made, fstype]
    process = subprocess.Popen(command, cwd=REPOSITORY)
    wait_for(lambda: mounted_on(made.path), bool)
    assert mounted_on(made.path) == ["fuse." + fstype]
    yield made
    process.kill()
    process.wait(20)
    subprocess.run(["umount", "-l", made.path], check=True)


def look_around(path: Path) -> dict[str, int]:
    """The inode numbers of all files."""
    return {str(each.relative_to(path)): each.stat().st_ino for each in sorted(path.rglob("*"))}


def check(m: Mount) -> None:
    for name in SMALL:
        assert (m.path / name).read_bytes() == content(name)


@pytest.mark.promise("CH-36")
@pytest.mark.parametrize("more", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
@pytest.mark.parametrize("mode", MODES)
def test_files_are_read_after_the_source_has_given_them_other_numbers(
    mount: MakeMount, volatile: Volatile, mode: str, more: list[str]
) -> None:
    """Before: the first read of each file, and each fetch of an open file, failed with ESTALE."""
    m = mount(volatile.path, *MODES[mode], *more)
    numbers = look_around(m.path)
    with open(m.path / "d/large", "rb", buffering=0) as opened:
        assert os.pread(opened.fileno(), 10, 0) == b"a" * 10
        volatile.renumber()
        check(m)
        for offset in range(0, SIZE, 2 * MIB):
            assert os.pread(opened.fileno(), 10, offset) == b"a" * 10
    volatile.renumber()
    check(m)
    assert look_around(m.path) == numbers
    assert len(set(numbers.values())) == len(numbers)


@pytest.mark.promise("PE-1")
@pytest.mark.parametrize("fstype", ["rclone"])
@pytest.mark.parametrize("more", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
@pytest.mark.parametrize("mode", MODES)
def test_users_read_files_of_rclone_which_fails_for_extended_attributes(
    mount: MakeMount, volatile: Volatile, mode: str, more: list[str]
) -> None:
    """Before: every user but root got EIO, because the kernel asks for the ACL of a file."""
    m = mount(volatile.path, "--allow-other", *MODES[mode], *more)
    for directory in (m.path, volatile.path):
        open_to_all(directory)
        content_of = partial(directory.joinpath("d/a").read_bytes)
        assert as_user(USER, USER, [], content_of) == content("d/a"), directory
    assert os.listxattr(m.path / "d/a") == []
    with pytest.raises(OSError, match=r"not supported|No data"):
        os.getxattr(m.path / "d/a", "user.x")


@pytest.mark.promise("CH-36")
@pytest.mark.promise("TE-1")
@pytest.mark.parametrize("mode", MODES)
def test_files_that_take_each_others_numbers_are_not_confused(mount: MakeMount, volatile: Volatile, mode: str) -> None:
    """They have one size, and the source has one time for everything: nothing but the name tells them apart."""
    (volatile.faults / "tick").write_text(f"{LONG_AGO}000000000")
    m = mount(volatile.path, *MODES[mode])
    look_around(m.path)
    assert (m.path / SMALL[0]).read_bytes() == content(SMALL[0])
    for _ in range(2):
        volatile.renumber()
        check(m)
        drop_caches_of(m.path)
    m.flush()
    m.umount()
    volatile.renumber()
    m.start()
    check(m)


@pytest.mark.promise("CH-36")
@pytest.mark.promise("CH-17")
@pytest.mark.parametrize("how", ["restart", "kill", "remount"])
@pytest.mark.parametrize("mode", ["read-only", "read-write"])
def test_what_is_cached_stays_cached(mount: MakeMount, volatile: Volatile, mode: str, how: str) -> None:
    """Before: a new mount recognized nothing that had another number."""
    m = mount(volatile.path, *MODES[mode])
    check(m)
    numbers = look_around(m.path)
    assert m.flush()["cached_files"] == len(SMALL)
    if how == "remount":
        m.umount()
        volatile.renumber()
        m.start()
    elif m.no_fastpath:
        pytest.skip("the mount ends with its daemon")
    else:
        take_over(m, how)
        volatile.renumber()
    m.drop_caches()
    (volatile.faults / "fails").write_text("read EIO d/a\nread EIO d/b\nread EIO d/c\n")
    check(m)
    for name in SMALL:
        assert (m.path / name).stat().st_ino == numbers[name]
    (volatile.faults / "fails").unlink()
    assert (m.path / "d/large").read_bytes() == b"a" * SIZE


@pytest.mark.promise("CH-36")
@pytest.mark.promise("CH-10")
@pytest.mark.parametrize("more", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
@pytest.mark.parametrize("mode", ["read-only", "read-write"])
@pytest.mark.parametrize("size", [SIZE, SIZE - 1], ids=["other-time", "other-size-and-time"])
def test_a_file_that_was_replaced_is_noticed(
    mount: MakeMount, volatile: Volatile, mode: str, more: list[str], size: int
) -> None:
    m = mount(volatile.path, *MODES[mode], *more)
    path = m.path / "d/large"
    with open(path, "rb", buffering=0) as opened:
        assert os.pread(opened.fileno(), 1, 0) == b"a"
        (volatile.root / "new").write_bytes(b"b" * size)
        (volatile.root / "new").rename(volatile.root / "d/large")
        volatile.renumber()
        for offset in range(MIB, size, MIB):
            try:
                assert os.pread(opened.fileno(), 1, offset) == b"a"
            except OSError:
                continue
    settle()

    def is_new() -> bool:
        try:
            found = path.read_bytes()
        except OSError:
            return False
        assert set(found) in ({ord("a")}, {ord("b")}), "a mix"
        return found == b"b" * size

    wait_for(is_new, bool)
    volatile.renumber()
    assert is_new()


@pytest.mark.promise("CH-37")
@pytest.mark.parametrize("mode", ["read-write", "mutable", "none"])
def test_own_changes_are_made_to_the_right_objects(mount: MakeMount, volatile: Volatile, mode: str) -> None:
    m = mount(volatile.path, *MODES[mode])
    look_around(m.path)
    with open(m.path / "d/new", "wb", buffering=0) as written:
        written.write(b"one")
        number = os.fstat(written.fileno()).st_ino
        volatile.renumber()
        (m.path / "d/new").rename(m.path / "renamed")
        volatile.renumber()
        written.write(b"two")
        assert os.fstat(written.fileno()).st_ino == (m.path / "renamed").stat().st_ino == number
    (m.path / "d/a").rename(m.path / "d/b")
    volatile.root.joinpath("d/a").write_bytes(content("d/b"))
    volatile.renumber()
    assert wait_for((m.path / "d/a").read_bytes, lambda found: found == content("d/b"))
    assert (m.path / "d/b").read_bytes() == content("d/a")
    assert (volatile.root / "renamed").read_bytes() == b"onetwo" == (m.path / "renamed").read_bytes()
    (m.path / "made").mkdir()
    (m.path / "made/file").write_bytes(b"file")
    volatile.renumber()
    (m.path / "made").rename(m.path / "moved")
    assert (volatile.root / "moved/file").read_bytes() == b"file" == (m.path / "moved/file").read_bytes()
    (m.path / "d/c").unlink()
    assert sorted(os.listdir(volatile.root / "d")) == ["a", "b", "large"] == sorted(os.listdir(m.path / "d"))


@pytest.mark.promise("CH-38")
@pytest.mark.promise("EX-13")
@pytest.mark.promise("EX-22")
def test_a_file_that_was_written_stays_mutable_after_a_new_mount(mount: MakeMount, volatile: Volatile) -> None:
    """By its path: its number may belong to another file by then."""
    m = mount(volatile.path)
    (m.path / "checkpoint.tmp2").write_bytes(b"one")
    (m.path / "checkpoint.tmp2").rename(m.path / "checkpoint")
    (m.path / "results").mkdir()
    for shard in (b"first", b"second"):
        (m.path / "results/shard").write_bytes(shard)
    m.flush()
    m.umount()
    volatile.renumber()
    settle()
    m.start()
    assert (m.path / "checkpoint").read_bytes() == b"one"
    (m.path / "checkpoint").write_bytes(b"two")
    assert (m.path / SMALL[0]).read_bytes() == content(SMALL[0])
    with pytest.raises(PermissionError):
        (m.path / SMALL[0]).write_bytes(b"immutable")
    assert (m.path / "checkpoint").read_bytes() == b"two"
    (volatile.root / "results/other").write_bytes(b"other")
    assert (m.path / "results/other").read_bytes() == b"other"
    (m.path / "results/other").write_bytes(b"overwritten")
    assert (m.path / "results/other").read_bytes() == b"overwritten"


@pytest.mark.promise("CH-37")
def test_each_name_of_a_file_is_a_file_of_its_own(mount: MakeMount, volatile: Volatile) -> None:
    os.link(volatile.root / "d/a", volatile.root / "d/other")
    settle()
    m = mount(volatile.path)
    assert (m.path / "d/a").read_bytes() == (m.path / "d/other").read_bytes() == content("d/a")
    assert (m.path / "d/a").stat().st_ino != (m.path / "d/other").stat().st_ino
    volatile.renumber()
    (m.path / "linked").hardlink_to(m.path / "d/b")
    (volatile.root / "new").write_bytes(b"replaced")
    (volatile.root / "new").rename(volatile.root / "linked")
    expire()
    volatile.renumber()
    assert (m.path / "linked").read_bytes() == b"replaced"
    assert (m.path / "d/b").read_bytes() == content("d/b")
    assert (m.path / "d/b").stat().st_ino != (m.path / "linked").stat().st_ino


@pytest.mark.promise("CH-36")
@pytest.mark.promise("CH-38")
def test_a_snapshot_and_a_lost_index_go_by_names(mount: MakeMount, volatile: Volatile, tmp_path: Path) -> None:
    m = mount(volatile.path, "--read-only")
    check(m)
    numbers = look_around(m.path)
    m.flush()
    cachefs("snapshot", "export", m.path, tmp_path / "snapshot")
    m.umount()
    shutil.rmtree(m.cache / "index")
    volatile.renumber()
    m.start()
    assert m.status()["cached_files"] == 0
    check(m)
    assert m.flush()["cached_files"] == len(SMALL)
    m.umount()
    volatile.renumber()
    arguments = "--read-only", "--metadata-snapshot", tmp_path / "snapshot"
    other = mount(volatile.path, *arguments, name="other", cache=tmp_path / "other-cache")
    assert look_around(other.path) == numbers
    check(other)


@pytest.mark.promise("CH-36")
@pytest.mark.parametrize("mode", ["read-only", "read-write"])
def test_a_source_with_numbers_may_have_such_a_filesystem_beneath(
    mount: MakeMount, volatile: Volatile, tmp_path: Path, mode: str
) -> None:
    above = tmp_path / "above"
    (above / "here").mkdir(parents=True)
    (above / "file").write_bytes(b"file")
    settle()
    subprocess.run(["mount", "--bind", volatile.path, above / "here"], check=True)
    try:
        m = mount(above, *MODES[mode])
        look_around(m.path)
        with open(m.path / "here/d/large", "rb", buffering=0) as opened:
            assert os.pread(opened.fileno(), 1, 0) == b"a"
            volatile.renumber()
            assert os.pread(opened.fileno(), 1, SIZE - 1) == b"a"
            for name in SMALL:
                assert (m.path / "here" / name).read_bytes() == content(name)
        assert (m.path / "file").stat().st_ino == (above / "file").stat().st_ino
        m.umount()
    finally:
        subprocess.run(["umount", "-l", above / "here"], check=True)


@pytest.mark.promise("CH-36")
@pytest.mark.parametrize("more", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
@pytest.mark.parametrize("mode", ["read-only", "read-write"])
def test_sshfs(mount: MakeMount, tmp_path: Path, mode: str, more: list[str]) -> None:
    root, path = tmp_path / "root", tmp_path / "source"
    (root / "d").mkdir(parents=True)
    for name in SMALL:
        (root / name).write_bytes(content(name))
    (root / "d/large").write_bytes(b"a" * SIZE)
    for name in (*SMALL, "d/large"):
        os.utime(root / name, (LONG_AGO, LONG_AGO))
    with sshfs(root, path, "-o", "dir_cache=no"):
        source = Volatile(root, path, tmp_path)
        m = mount(path, *MODES[mode], *more)
        numbers = look_around(m.path)
        with open(m.path / "d/large", "rb", buffering=0) as opened:
            assert os.pread(opened.fileno(), 10, 0) == b"a" * 10
            forgotten = source.forgotten()
            check(m)
            assert os.pread(opened.fileno(), 10, SIZE - 10) == b"a" * 10
        assert source.forgotten() != forgotten
        if not (m.no_fastpath or more):
            take_over(m, "restart")
        check(m)
        assert look_around(m.path) == numbers
        (root / "new").write_bytes(b"replaced")
        (root / "new").rename(root / "d/a")
        source.forgotten()
        m.umount()
        m.start()
        assert (m.path / "d/a").read_bytes() == b"replaced"
        assert (m.path / "d/b").read_bytes() == content("d/b")
        m.umount()


@pytest.mark.promise("CH-36")
@pytest.mark.parametrize("more", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
@pytest.mark.parametrize("mode", ["read-only", "read-write"])
def test_exfat(mount: MakeMount, tmp_path: Path, beneath: ExitStack, mode: str, more: list[str]) -> None:
    """Before: open files, and most others on a read-only mount, failed with ESTALE once the kernel forgot them."""
    image, path = tmp_path / "image", tmp_path / "source"
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.exfat", image], check=True, capture_output=True)
    path.mkdir()
    made = subprocess.run(["losetup", "-f", "--show", image], check=True, capture_output=True, text=True)
    device = made.stdout.strip()
    beneath.callback(subprocess.run, ["losetup", "-d", device], check=True)
    subprocess.run(["mount.exfat-fuse", device, path], check=True, capture_output=True)
    beneath.callback(subprocess.run, ["umount", "-l", path], check=True)
    (path / "d").mkdir()
    for name in SMALL:
        (path / name).write_bytes(content(name))
    (path / "d/large").write_bytes(b"a" * SIZE)
    for name in (*SMALL, "d/large"):
        os.utime(path / name, (LONG_AGO, LONG_AGO))
    source = Volatile(path, path, tmp_path)
    m = mount(path, *MODES[mode], *more)
    numbers = look_around(m.path)
    with open(m.path / "d/large", "rb", buffering=0) as opened:
        assert os.pread(opened.fileno(), 10, 0) == b"a" * 10
        source.forgotten()
        check(m)
        assert os.pread(opened.fileno(), 10, SIZE - 10) == b"a" * 10
    assert look_around(m.path) == numbers
    source.forgotten()
    m.remount(*MODES[mode], *more)
    check(m)


@pytest.mark.promise("CH-37")
@pytest.mark.parametrize("mode", ["read-write", "none"])
def test_what_another_node_renames_is_read_by_its_new_name(mount: MakeMount, volatile: Volatile, mode: str) -> None:
    m = mount(volatile.path, *MODES[mode])
    check(m)
    number = (m.path / "d/a").stat().st_ino
    (volatile.root / "d/a").rename(volatile.root / "d/z")
    (volatile.root / "d/b").rename(volatile.root / "d/a")
    drop_caches_of(volatile.path)
    assert (m.path / "d/z").read_bytes() == content("d/a")
    assert (m.path / "d/z").stat().st_ino != number
    (volatile.root / "d").rename(volatile.root / "moved")
    drop_caches_of(volatile.path)
    assert wait_for((m.path / "moved/c").read_bytes, lambda found: found == content("d/c"))


@pytest.mark.promise("CH-36")
@pytest.mark.promise("FA-28")
@pytest.mark.fastpath
@pytest.mark.parametrize("mode", ["read-only", "read-write"])
def test_a_successor_knows_it_of_a_source_that_was_detached(mount: MakeMount, volatile: Volatile, mode: str) -> None:
    """The mount table has no type of such a source."""
    aside = volatile.path.with_name("aside")
    aside.mkdir()
    subprocess.run(["mount", "--bind", volatile.path, aside], check=True)  # the test reaches it by another way
    try:
        m = mount(volatile.path, *MODES[mode])
        numbers = look_around(m.path)
        with open(m.path / "d/large", "rb", buffering=0) as opened:
            assert os.pread(opened.fileno(), 10, 0) == b"a" * 10
            subprocess.run(["umount", "-l", volatile.path], check=True)
            take_over(m, "restart")
            expire()
            volatile._replace(path=aside).renumber()
            assert os.pread(opened.fileno(), 10, SIZE - 10) == b"a" * 10
            check(m)
            assert look_around(m.path) == numbers
    finally:
        subprocess.run(["mount", "--bind", aside, volatile.path], check=False)
        subprocess.run(["umount", "-l", aside], check=True)


@pytest.mark.promise("CH-36")
@pytest.mark.parametrize("mode", ["read-only", "read-write"])
def test_directories_whose_descriptors_do_not_follow_their_paths_exchange_their_names(
    tmp_path: Path, mount: MakeMount, mode: str
) -> None:
    """Another cachefs beneath the source stands for a FUSE filesystem on libfuse's low-level interface.

    Before: the descriptor of the first directory led to what had been the second, for ever.
    """
    inner, top = tmp_path / "inner", tmp_path / "top"
    for name in "ab":
        (inner / name).mkdir(parents=True)
        (inner / name / f"of {name}").write_text(name)
    (top / "beneath").mkdir(parents=True)
    mount(inner, "--profile", "changing", name="top/beneath")
    m = mount(top, *MODES[mode])
    for name in "ab":
        assert os.listdir(m.path / "beneath" / name) == [f"of {name}"]
    for name, new in ("a.", "ba", ".b"):
        (inner / name.replace(".", "moved")).rename(inner / new.replace(".", "moved"))
    end = time.monotonic() + 3
    while time.monotonic() < end:  # descriptors that nobody uses would be closed
        for name in "ab":
            with suppress(OSError):
                os.listdir(m.path / "beneath" / name)
        time.sleep(0.1)
    cachefs("invalidate", m.path)
    expire()
    for name, other in ("ab", "ba"):
        assert os.listdir(m.path / "beneath" / name) == [f"of {other}"]
        assert (m.path / "beneath" / name / f"of {other}").read_text() == other
        if mode == "read-write":
            (m.path / "beneath" / name / "new").touch()
            assert (inner / name / "new").exists()


@pytest.mark.promise("CH-36")
@pytest.mark.parametrize("mode", [(), ("--no-fastpath",)], ids=["fastpath", "no-fastpath"])
def test_a_symlink_that_another_node_replaces_on_sshfs_leads_to_its_new_target(
    mount: MakeMount, tmp_path: Path, mode: tuple[str, ...]
) -> None:
    """Before: it kept its number, and the kernel the former target."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to("former")
    with sshfs(root, tmp_path / "sshfs", "-o", "dir_cache=no"):
        m = mount(tmp_path / "sshfs", *mode)
        assert os.readlink(m.path / "link") == "former"
        (root / "new").symlink_to("the next one")
        (root / "new").replace(root / "link")
        wait_for(lambda: (m.path / "link").lstat().st_size, lambda size: size == len("the next one"))
        assert os.readlink(m.path / "link") == "the next one"
