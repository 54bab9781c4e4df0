"""Directories held by descriptors, on real directories."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cachefs.client import mount_table
from cachefs.source.directories import ROOT, Directory
from cachefs.source.identity import Changed, is_same
from cachefs.source.opening import component
from cachefs.source.source import Look, Object, Source
from cachefs.store import runs
from cachefs.store.filesystem import identify, numbers_stay
from cachefs.store.index.records import Identity
from cachefs.system.stat import NO_CONNECTION, NO_NUMBER, USED_ONCE
from cachefs.system.syscalls import statx
from daemon.kernel.source_connection import Root


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    made = Source(fd)
    yield made
    made.directories.clear()
    os.close(fd)


def identity(path: Path) -> Identity:
    now = statx(-100, os.fsencode(path))
    return Identity(now.inode, now.mode & 0o170000, 0, now.btime_ns, now.ctime_ns, 0)


def below(parent: Directory, path: Path) -> Directory:
    number = path.stat().st_ino
    return Directory(number, identity(path), parent, os.fsencode(path.name))


def test_a_directory_is_opened_and_compared_once(source: Source, tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    a = below(ROOT, tmp_path / "a")
    b = below(a, tmp_path / "a/b")
    for name in ("one", "two"):
        (tmp_path / "a/b" / name).touch()
        assert source.lstat(b, name.encode()).size == 0
    assert source.counters.snapshot() == {"lstat": 2, "fstat": 2}


def test_a_renamed_directory_keeps_its_children_and_another_of_its_name_is_refused(
    source: Source, tmp_path: Path
) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/inside").touch()
    a = below(ROOT, tmp_path / "a")
    b = below(a, tmp_path / "a/b")
    assert source.readdir(b) == [b"inside"]
    (tmp_path / "a").rename(tmp_path / "elsewhere")
    (tmp_path / "a/b").mkdir(parents=True)
    assert source.readdir(b) == [b"inside"]
    source.directories.clear()
    with pytest.raises(Changed) as caught:
        source.readdir(b)
    assert caught.value.directory == a.number
    # The directory above is known again: the name below it still leads to the right one.
    assert source.readdir(below(below(ROOT, tmp_path / "elsewhere"), tmp_path / "elsewhere/b")) == [b"inside"]


def test_a_number_that_is_another_directorys_now_is_opened_again(source: Source, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"in-{name}").touch()
    assert source.readdir(Directory(7, identity(tmp_path / "a"), ROOT, b"a")) == [b"in-a"]
    assert source.readdir(Directory(7, identity(tmp_path / "b"), ROOT, b"b")) == [b"in-b"]


def test_descriptors_are_limited_and_never_closed_while_in_use(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    source = Source(fd)
    source.directories.limit = 3
    directories = []
    for index in range(10):
        (tmp_path / f"d{index}").mkdir()
        (tmp_path / f"d{index}/f{index}").touch()
        directories.append(below(ROOT, tmp_path / f"d{index}"))
    before = len(os.listdir("/proc/self/fd"))
    errors: list[BaseException] = []

    def use(start: int) -> None:
        try:
            for turn in range(200):
                index = (start + turn * 7) % 10
                assert source.readdir(directories[index]) == [b"f%d" % index]
        except BaseException as error:
            errors.append(error)

    with source.directories.hold(directories[0]) as held:
        threads = [threading.Thread(target=use, args=(start,)) for start in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert os.listdir(f"/proc/self/fd/{held}") == ["f0"]
    assert not errors
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    source.directories.clear()
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)


def test_names_are_compared_before_a_change_however_few_directories_are_held(source: Source, tmp_path: Path) -> None:
    source.directories.limit = 1
    (tmp_path / "a/b/c").mkdir(parents=True)
    path, directory = tmp_path, ROOT
    for name in ("a", "b", "c"):
        path /= name
        directory = replace(below(directory, path), has_pinned_name=True)
    with source.directories.hold(directory, to_change=True) as fd:
        assert os.fstat(fd).st_ino == directory.number
    (tmp_path / "a/b").rename(tmp_path / "a/elsewhere")
    source.directories.clear()
    with pytest.raises(Changed), source.directories.hold(directory, to_change=True):
        pass


def test_a_directory_without_a_name_is_reached_while_it_is_held(source: Source, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    a = below(ROOT, tmp_path / "a")
    nameless = Directory(a.number, a.identity, None)
    with pytest.raises(Changed):
        source.readdir(nameless)
    assert source.readdir(a) == []
    assert source.readdir(nameless) == []


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"/etc"])
def test_a_name_leads_nowhere_but_to_an_entry_of_its_directory(source: Source, name: bytes) -> None:
    with pytest.raises(FileNotFoundError):
        component(name)
    if name:
        with pytest.raises(FileNotFoundError):
            source.lstat(ROOT, name)
        assert Look(source, ROOT, [name])() == [None]


def test_a_symlink_in_place_of_a_directory_is_not_followed(source: Source, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    a = below(ROOT, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").symlink_to("b")
    with pytest.raises(Changed):
        source.readdir(a)


def test_what_is_opened_is_compared(source: Source, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    at = Object(ROOT, b"file", identity(tmp_path / "file"))
    assert source.read_file(at, 10, 0) == b"old"
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "new").rename(tmp_path / "file")
    for use in (
        lambda: source.read_file(at, 10, 0),
        lambda: source.getxattr(at, b"user.x"),
        lambda: source.listxattr(at),
        lambda: source.readlink(at),
    ):
        with pytest.raises(Changed):
            use()
    (tmp_path / "file").unlink()
    with pytest.raises(Changed):
        source.open_file(at)
    os.mkfifo(tmp_path / "file")
    with pytest.raises(Changed):
        source.open_file(at)
    with pytest.raises(Changed):
        source.open_file(at, os.O_WRONLY)


def test_identity_does_without_birth_times_where_one_side_has_none() -> None:
    now = statx(-100, b"/proc")
    expected = Identity(now.inode, now.mode & 0o170000, now.device, 0, now.ctime_ns, 0)
    assert is_same(expected, now._replace(btime_ns=5))
    assert is_same(expected._replace(btime_ns=5), now._replace(btime_ns=0))
    assert not is_same(expected._replace(btime_ns=5), now._replace(btime_ns=5, device=99))
    assert not is_same(expected._replace(btime_ns=5), now._replace(btime_ns=6))
    assert not is_same(expected, now._replace(inode=now.inode + 1))
    assert not is_same(expected, now._replace(mode=0o100644))


@pytest.mark.promise("FA-10")
def test_the_root_of_a_source_is_told_from_others() -> None:
    root = Root(7, 11, "fuse.ceph-fuse")
    same = [root, Root(7, 0, "fuse.ceph-fuse"), Root(7, 11, "")]  # not every source, nor every table, says everything
    others = [Root(8, 11, "fuse.ceph-fuse"), Root(7, 12, "fuse.ceph-fuse"), Root(7, 11, "ext4")]
    assert all(root.is_same(each) and each.is_same(root) for each in same)
    assert not any(root.is_same(each) or each.is_same(root) for each in others)


@pytest.mark.promise("CH-25")
def test_numbers_last_except_in_fuse_filesystems_without_birth_times() -> None:
    lasting = [Root(1, 0, "fuse.ceph"), Root(1, 0, "fuse.ceph-fuse"), Root(1, 7, "fuse.any"), Root(1, 0, "nfs")]
    assert all(root.numbers_last for root in lasting)
    assert not any(root.numbers_last for root in (Root(1, 0, "fuse.any"), Root(1, 0, "fuse"), Root(1, 0, "")))


@pytest.mark.promise("CH-36")
def test_numbers_stay_except_on_filesystems_that_have_none_of_their_own() -> None:
    staying = (
        "ext4",
        "ceph",
        "nfs",
        "virtiofs",
        "fuse",
        "fuse.ceph-fuse",
        "fuse.bindfs",
        "fuse.mergerfs",
        "",
    )
    assert all(map(numbers_stay, staying))
    assert not any(map(numbers_stay, ("fuse.sshfs", "fuse.rclone", "fuse.anything", "fuseblk", "exfat", "vfat")))


@pytest.mark.promise("CH-36")
def test_without_a_number_type_and_volume_tell_objects_apart() -> None:
    now = statx(-100, b"/proc")
    expected = Identity(NO_NUMBER, now.mode & 0o170000, now.device, 0, now.ctime_ns, 0)
    assert is_same(expected, now) and is_same(expected, now._replace(inode=NO_NUMBER))
    assert not is_same(expected, now._replace(mode=0o100644))
    assert not is_same(expected, now._replace(device=99))


@pytest.mark.promise("CH-25")
def test_every_connection_has_a_number_of_its_own() -> None:
    last = runs.first_connection(runs.MAX_RUN + 1) - 1
    assert last < NO_CONNECTION == runs.next_connection(last) == runs.next_connection(NO_CONNECTION)
    assert runs.next_connection(runs.first_connection(5)) < runs.first_connection(6)


@pytest.mark.promise("CH-46")
def test_clients_that_show_births_and_that_show_none_know_one_object(tmp_path: Path) -> None:
    """A metadata snapshot of a CephFS may come from a node with another client."""
    now = statx(-100, os.fsencode(tmp_path))._replace(device=0)
    once = now._replace(btime_ns=USED_ONCE)
    recorded = identity(tmp_path)
    for one, other in ((recorded, once), (recorded._replace(btime_ns=USED_ONCE), now)):
        assert one.is_of(other, by_name=False)
    assert not recorded.is_of(now._replace(btime_ns=now.btime_ns + 1), by_name=True)
    assert not recorded.is_of(once._replace(inode=now.inode + 1), by_name=True)


@pytest.mark.parametrize("option", ["uid=1000", "file_mode=0640", "iocharset=utf8", "noacl"])
def test_options_that_decide_on_owners_modes_or_names_make_another_filesystem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """No time shows that they have changed."""
    fd = os.open(tmp_path, os.O_RDONLY)
    mount = mount_table.mount_of(fd)
    assert mount is not None

    def identity(options: str) -> bytes:
        given = replace(mount, fstype="cifs", source="//server/share", device="0:99", options=options)
        monkeypatch.setattr(mount_table, "mount_of", lambda _: given)
        return identify(fd).identity

    assert identity("rw,vers=3.1") == identity("rw,vers=3.0") != b""
    assert identity(f"rw,{option}") == identity(f"rw,vers=3.0,{option}") != identity("rw")
    os.close(fd)
