"""A source without birth times that gives the inode number of a removed object to the next one."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cachefs.system.descriptors import closing
from tests.bindfs import Bindfs
from tests.conftest import Mount, cachefs, expire, raises_errno, read_after_change, settle, wait_for

ENOUGH = 200
MODES = {
    "read-only": ("--read-only",),
    "read-write": (),
    "no-fastpath": ("--no-fastpath",),
    "changing": ("--profile", "changing"),
}


@pytest.fixture
def source(tmp_path: Path, old_ext4: Path) -> Iterator[Bindfs]:
    made = Bindfs(old_ext4, tmp_path / "source")
    yield made
    made.close()


def make_with_number(path: Path, number: int) -> None:
    """Make a directory that has this inode number: ext4 gives a free number to one of the next directories."""
    for at in range(ENOUGH):
        made = path.with_name(f"spare{at}")
        made.mkdir()
        if made.stat().st_ino == number:
            made.rename(path)
            return
    raise AssertionError("the number was not used again")


@pytest.mark.promise("CH-39")
@pytest.mark.promise("CH-2")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_directory_with_the_number_of_a_removed_one_shows_its_own_names(
    mount: Callable[..., Mount], source: Bindfs, mode: tuple[str, ...]
) -> None:
    """Before: the descriptor of the removed directory was kept, and no name in the new one was ever found."""
    directory = source.path / "directory"
    directory.mkdir()
    (directory / "first").write_bytes(b"first")
    settle()
    m = mount(source.path, *mode)
    assert (m.path / "directory" / "first").stat().st_size == len(b"first")
    number = os.stat(directory).st_ino
    (directory / "first").unlink()
    directory.rmdir()
    make_with_number(directory, number)
    (directory / "second").write_bytes(b"the second")
    expire()
    assert (m.path / "directory" / "second").read_bytes() == b"the second"
    assert os.listdir(m.path / "directory") == ["second"]


@pytest.mark.fastpath
@pytest.mark.promise("CH-40")
@pytest.mark.promise("TE-1")
@pytest.mark.parametrize("killed", [False, True], ids=["restart", "kill"])
@pytest.mark.parametrize("mode", ["read-only", "read-write", "changing"])
def test_a_directory_with_the_number_of_a_removed_one_of_another_name_shows_its_own_names(
    mount: Callable[..., Mount], source: Bindfs, mode: str, killed: bool
) -> None:
    """Without a daemon nothing holds the removed directory."""
    directory = source.path / "directory"
    directory.mkdir()
    (directory / "first").write_bytes(b"old")
    (directory / "name").write_bytes(b"old")
    settle()
    m = mount(source.path, *MODES[mode])
    assert os.listdir(m.path / "directory")
    assert (m.path / "directory/name").read_bytes() == b"old"
    number = os.stat(directory).st_ino
    time.sleep(1.1)  # its times are in whole seconds
    if killed:
        m.kill()
        shutil.rmtree(directory)
        m.start()
    else:
        cachefs("restart", m.path)
        shutil.rmtree(directory)
    make_with_number(source.path / "other", number)
    (source.path / "other/name").write_bytes(b"new")
    (source.path / "other/second").write_bytes(b"new")
    expire()
    assert (m.path / "other/name").read_bytes() == b"new"
    assert sorted(os.listdir(m.path / "other")) == ["name", "second"]


def replace_with_number(path: Path, new: Path, content: bytes) -> None:
    """Remove a file, and make another one that gets its inode number."""
    number = path.stat().st_ino
    path.unlink()
    new.write_bytes(content)
    assert new.stat().st_ino == number


@pytest.mark.promise("CH-40")
@pytest.mark.promise("TE-1")
@pytest.mark.parametrize("links", [1, 2])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_the_name_of_a_removed_file_does_not_show_a_file_that_got_its_number(
    mount: Callable[..., Mount], old_ext4: Path, mode: tuple[str, ...], links: int
) -> None:
    """Before: while the kernel knew the removed file by its name, that name showed the bytes of the new file."""
    source = old_ext4 / "directory"
    source.mkdir()
    (source / "label").write_bytes(b"an old label")
    m = mount(source, "--attr-timeout", "60", *mode)
    path = m.path / "label"
    assert path.stat().st_size == len(b"an old label")
    replace_with_number(source / "label", source / "other", b"a secret")
    if links == 2:
        (source / "another").hardlink_to(source / "other")
    (source / "label").write_bytes(b"a new label")
    assert (m.path / "other").read_bytes() == b"a secret"
    assert read_after_change(path) == b"a new label"
    assert path.stat().st_ino != (m.path / "other").stat().st_ino


@pytest.mark.promise("CH-40")
@pytest.mark.parametrize("mode", [(), ("--no-fastpath",), ("--profile", "changing")])
def test_another_hard_link_has_the_number_of_the_file(
    mount: Callable[..., Mount], old_ext4: Path, mode: tuple[str, ...]
) -> None:
    """Not where the file is pinned: a change time that moved makes another inode of it there."""
    source = old_ext4 / "directory"
    source.mkdir()
    (source / "one").write_bytes(b"data")
    m = mount(source, *mode)
    number = (m.path / "one").stat().st_ino
    (source / "two").hardlink_to(source / "one")
    expire()
    assert (m.path / "two").stat().st_ino == number


@pytest.mark.full_age
@pytest.mark.promise("CH-12")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_symlink_that_was_made_again_in_the_second_in_which_it_was_read_shows_its_target(
    mount: Callable[..., Mount], source: Bindfs, mode: tuple[str, ...]
) -> None:
    """It has the same number and the same times, in whole seconds. The kernel kept the former target."""
    m = mount(source.path, *mode)
    for attempt in range(10):
        link = source.path / f"link{attempt}"
        time.sleep(1.02 - time.time() % 1)
        link.symlink_to("former")
        before = link.lstat()
        assert os.readlink(m.path / link.name) == "former"
        link.unlink()
        link.symlink_to("latter")
        after = link.lstat()
        if (before.st_ino, before.st_ctime_ns) == (after.st_ino, after.st_ctime_ns):
            break
    else:
        raise AssertionError("nothing was quick enough")
    wait_for(lambda: os.readlink(m.path / link.name), lambda target: target == "latter")
    m.umount()
    m.start()
    assert os.readlink(m.path / link.name) == "latter"


@pytest.mark.promise("CH-12", "CH-17")
@pytest.mark.parametrize("mode", [("--read-only",), ("--read-only", "--no-fastpath"), ()])
def test_a_name_that_came_in_the_second_of_the_last_listing_is_shown_by_the_next_mount(
    mount: Callable[..., Mount], old_ext4: Path, mode: tuple[str, ...]
) -> None:
    """Times in whole seconds: the directory has the same times with and without the name."""
    for attempt in range(10):
        source = old_ext4 / str(attempt)
        (source / "directory").mkdir(parents=True)
        cache = old_ext4.parent / f"cache{attempt}"
        m = mount(source, *mode, "--minimum-age", "2", name=f"mnt{attempt}", cache=cache)
        time.sleep(1.02 - time.time() % 1)
        (source / "directory/first").touch()
        assert os.listdir(m.path / "directory") == ["first"]
        before = os.stat(source / "directory")
        m.umount()
        (source / "directory/second").touch()
        after = os.stat(source / "directory")
        if (before.st_mtime_ns, before.st_ctime_ns) != (after.st_mtime_ns, after.st_ctime_ns):
            continue
        settle()
        m.start()
        assert sorted(os.listdir(m.path / "directory")) == ["first", "second"]
        return
    raise AssertionError("no unmount was quick enough")


@pytest.mark.fastpath
@pytest.mark.promise("CH-43")
@pytest.mark.parametrize("mode", [(), ("--profile", "changing")], ids=["read-write", "changing"])
def test_a_killed_daemon_leaves_no_writer_of_a_file_that_got_the_number(
    mount: Callable[..., Mount], old_ext4: Path, mode: tuple[str, ...]
) -> None:
    """No descriptor holds the removed file. Before: what was written to it came into the new file."""
    m = mount(old_ext4, *mode)
    with open(m.path / "log", "wb", buffering=0) as file:
        file.write(b"old")
        m.kill()
        replace_with_number(old_ext4 / "log", old_ext4 / "new", b"new")
        (old_ext4 / "new").rename(old_ext4 / "log")
        m.start()
        raises_errno(errno.ESTALE, lambda: file.write(b"!"))
        with suppress(OSError):
            file.close()
    assert (old_ext4 / "log").read_bytes() == b"new"
    assert read_after_change(m.path / "log") == b"new"


@pytest.mark.fastpath
@pytest.mark.promise("CH-43")
@pytest.mark.parametrize("mode", ["read-only", "read-write", "changing"])
def test_a_process_in_a_removed_directory_is_not_led_to_the_one_that_got_the_number(
    mount: Callable[..., Mount], old_ext4: Path, mode: str
) -> None:
    """No descriptor holds the removed directory. Before: the process read, made and removed files in the new one."""
    directory = old_ext4 / "directory"
    directory.mkdir()
    (directory / "file").write_bytes(b"old")
    settle()
    m = mount(old_ext4, *MODES[mode])
    with closing(os.open(m.path / "directory", os.O_RDONLY)) as fd:
        assert os.listdir(fd) == ["file"]
        number = directory.stat().st_ino
        m.kill()
        shutil.rmtree(directory)
        make_with_number(directory, number)
        (directory / "second").write_bytes(b"new")
        m.start()
        expire()
        raises_errno(errno.ESTALE, lambda: os.stat("second", dir_fd=fd))
        if mode != "read-only":
            raises_errno(errno.ESTALE, lambda: os.mkdir("made", dir_fd=fd))
    assert read_after_change(m.path / "directory/second") == b"new"
    assert os.listdir(m.path / "directory") == os.listdir(directory) == ["second"]


@pytest.mark.promise("CH-43")
@pytest.mark.fastpath  # the daemon alone would keep the number by its descriptor
@pytest.mark.parametrize("mode", ["read-only", "read-write"])
def test_an_open_file_shows_nothing_of_one_that_gets_its_number_and_its_times(
    mount: Callable[..., Mount], old_ext4: Path, mode: str
) -> None:
    """Before: the fast path compared whole seconds and the number, and read the rest from the new file."""
    source, size = old_ext4 / "directory", 6 << 20
    source.mkdir()
    m = mount(source, *MODES[mode])
    for attempt in range(20):
        path = source / f"f{attempt}"
        path.write_bytes(b"o" * size)
        before = path.stat()
        with closing(os.open(m.path / path.name, os.O_RDONLY)) as fd:
            assert os.pread(fd, 4096, 0) == b"o" * 4096
            replace_with_number(path, path, b"n" * size)
            after = path.stat()
            if (after.st_mtime_ns, after.st_ctime_ns) != (before.st_mtime_ns, before.st_ctime_ns):
                path.unlink()
                continue  # the next second has begun
            rest = None
            with suppress(OSError):
                rest = os.pread(fd, 4096, size - 4096)
        assert rest in (None, b"o" * 4096)
        assert set(read_after_change(m.path / path.name)) in ({ord("o")}, {ord("n")})
        return
    raise AssertionError("no replacement within one second")
