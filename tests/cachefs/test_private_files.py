"""Files of the daemon: closed to others whatever the umask, and nothing that another user planted is used (B1)."""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.errors import CacheFsError
from cachefs.system import private_files
from tests.users import as_user, open_to_all

OTHER = 1234
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(autouse=True, params=[0o000, 0o077, 0o777], ids=lambda u: f"umask-{u:03o}")
def umask(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.promise("PE-14")
def test_directories_are_closed_and_their_parents_are_not_writable(tmp_path: Path) -> None:
    path = tmp_path / "a/b/cache"
    private_files.make_directory(path)
    assert (mode(path), mode(path.parent), mode(path.parent.parent)) == (0o700, 0o755, 0o755)
    path.chmod(0o755)
    private_files.make_directory(path)
    assert mode(path) == 0o700


@pytest.mark.promise("PE-14")
def test_files_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    os.close(private_files.open_file(path, os.O_RDWR | os.O_CREAT))
    assert mode(path) == 0o600
    path.chmod(0o666)
    os.close(private_files.open_file(path, os.O_RDWR))
    assert mode(path) == 0o600
    private_files.write_file(path, b"content")
    private_files.write_file(path, b"other")
    assert (mode(path), path.read_bytes(), os.listdir(tmp_path)) == (0o600, b"other", ["file"])


def test_a_file_of_ours_is_emptied_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"older and longer")
    with open(tmp_path / "file", "wb", opener=private_files.opener) as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def test_sockets_are_closed(tmp_path: Path) -> None:
    for name, wanted in (("control", 0o600), ("metrics", 0o660)):
        with socket.socket(socket.AF_UNIX) as listener:
            private_files.bind_socket(listener, tmp_path / name, wanted)
            assert mode(tmp_path / name) == wanted


def test_a_socket_replaces_only_a_socket_of_ours(tmp_path: Path) -> None:
    """Before: `--metrics FILE` removed the file."""
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "link").symlink_to("file")
    with socket.socket(socket.AF_UNIX) as other:
        private_files.bind_socket(other, tmp_path / "theirs")
        os.chown(tmp_path / "theirs", 12345, 12345)
    for name in ("file", "link", "theirs"):
        with socket.socket(socket.AF_UNIX) as listener, pytest.raises(CacheFsError, match="not a socket of your own"):
            private_files.bind_socket(listener, tmp_path / name)
    assert (tmp_path / "file").read_bytes() == b"precious"
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as listener:
            private_files.bind_socket(listener, tmp_path / "ours")


@pytest.mark.parametrize(("owner", "bits"), [(12345, 0o755), (0, 0o777)])
def test_a_socket_lies_where_nobody_else_can_replace_it(tmp_path: Path, owner: int, bits: int) -> None:
    """Before: its owner could put a link in its place, and root changed the mode of the link's target."""
    place = tmp_path / "place"
    place.mkdir()
    os.chown(place, owner, owner)
    place.chmod(bits)
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(CacheFsError, match="who could replace"):
        private_files.bind_socket(listener, place / "metrics")
    assert os.listdir(place) == []


def test_symlinks_and_second_names_are_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "symlink").symlink_to(victim)
    (tmp_path / "link").hardlink_to(victim)
    os.mkfifo(tmp_path / "fifo")
    for name in ("symlink", "link", "fifo"):
        for flags in (os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC):
            with pytest.raises((CacheFsError, OSError), match=name):
                private_files.open_file(tmp_path / name, flags)
    for name, kind in (("fifo", "named pipe"), ("symlink", "symbolic link")):
        (tmp_path / f"of-{name}").mkdir()
        (tmp_path / name).rename(tmp_path / f"of-{name}" / name)
        with pytest.raises(CacheFsError, match=f"{name} is a {kind}"):
            private_files.check_contents(tmp_path / f"of-{name}")
    assert victim.read_bytes() == b"precious"


@pytest.mark.promise("PE-15")
@pytest.mark.parametrize("bits", [0o777, 0o757])
def test_a_parent_that_others_may_write_to_is_refused_unless_it_is_sticky(tmp_path: Path, bits: int) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(bits)
    with pytest.raises(CacheFsError, match="may be written to by everybody") as caught:
        private_files.make_directory(open_to_all / "x/cache")
    assert "\n" not in str(caught.value)
    assert not (open_to_all / "x").exists()
    open_to_all.chmod(bits | stat.S_ISVTX)
    private_files.make_directory(open_to_all / "x/cache")


def test_our_own_symlinks_are_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(0o755)
    (tmp_path / "relative").symlink_to("disk")
    (tmp_path / "absolute").symlink_to(tmp_path / "relative/../relative")
    private_files.make_directory(tmp_path / "absolute/cache")
    private_files.make_directory(tmp_path / "absolute/cache")
    assert mode(tmp_path / "disk/cache") == 0o700
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CacheFsError, match="symbolic link"):
        private_files.make_directory(tmp_path / "loop/cache")
    with pytest.raises(NotADirectoryError):
        (tmp_path / "file").touch()
        private_files.make_directory(tmp_path / "file")


@pytest.mark.promise("PE-15")
@root_only
def test_what_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    theirs.chmod(0o700)
    os.chown(theirs, OTHER, OTHER)
    for path in (theirs, theirs / "cache"):
        with pytest.raises(CacheFsError, match=f"{theirs} belongs to user {OTHER}"):
            private_files.make_directory(path)
    assert not (theirs / "cache").exists()
    ours = tmp_path / "ours"
    private_files.make_directory(ours)
    (ours / "file").touch()
    (ours / "file").chmod(0o600)
    private_files.check_contents(ours)
    os.chown(ours / "file", OTHER, OTHER)
    with pytest.raises(CacheFsError, match=f"belongs to user {OTHER}"):
        private_files.check_contents(ours)
    with pytest.raises(CacheFsError, match="not a regular file of your own"):
        private_files.open_file(ours / "file", os.O_RDWR)
    sticky = tmp_path / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    (sticky / "symlink").symlink_to(ours)
    os.lchown(sticky / "symlink", OTHER, OTHER)
    with pytest.raises(CacheFsError, match="symbolic link of user"):
        private_files.make_directory(sticky / "symlink/cache")


@root_only
def test_a_group_of_other_users_may_not_write_to_a_parent(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, 0, OTHER)
    shared.chmod(0o775)
    with pytest.raises(CacheFsError, match=f"by group {OTHER}"):
        private_files.make_directory(shared / "cache")


@pytest.mark.promise("PI-17")
@root_only
def test_a_given_file_is_believed_where_nobody_but_root_and_the_user_may_write_it(tmp_path: Path) -> None:
    path = tmp_path / "given"
    path.write_bytes(b"content")
    open_to_all(path)

    def read_by(user: int) -> object:
        def read() -> object:
            try:
                with open(private_files.open_given(path), "rb") as file:
                    return file.read()
            except CacheFsError as error:
                return str(error)

        return as_user(user, user, [], read)

    for owner, mode in ((0, 0o644), (OTHER, 0o600), (OTHER, 0o444)):
        os.chown(path, owner, owner)
        path.chmod(mode)
        assert read_by(OTHER) == b"content"
    assert f"belongs to user {OTHER}" in str(read_by(OTHER + 1))
    assert f"belongs to user {OTHER}" in str(read_by(0))
    for owner, mode in ((0, 0o646), (OTHER, 0o664)):
        os.chown(path, owner, owner)
        path.chmod(mode)
        assert "may be written to by others" in str(read_by(OTHER))
    path.unlink()
    os.mkfifo(path)
    path.chmod(0o600)
    assert "is not a regular file" in str(read_by(0))
    assert read_by(OTHER) == errno.EACCES
