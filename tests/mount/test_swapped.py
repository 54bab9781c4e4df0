"""Permissions are those of the opened object, also when it has just taken the place of another (B2)."""

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, settle, wait_for
from tests.users import as_user, open_to_all

pytestmark = pytest.mark.promise("PE-3")

MakeMount = Callable[..., Mount]
USER, VICTIM, GROUP = 1234, 4321, 5555
READ_WRITE = pytest.mark.parametrize(
    "arguments", [(), ("--mutable", "**"), ("--cache", "none"), ("--attr-timeout", "60")], ids=lambda a: "-".join(a)
)
REFUSED = (errno.EACCES, errno.ESTALE, errno.ENOENT)


def owned(path: Path, owner: int, mode: int) -> Path:
    os.chown(path, owner, owner)
    path.chmod(mode)
    return path


@pytest.fixture
def shared(source: Path) -> Path:
    """A directory of the source that both users may write to: a file and a directory of each."""
    shared = source / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for owner, name, private in ((USER, "mine", False), (VICTIM, "victim", True)):
        file, directory = shared / f"{name}.txt", shared / name
        file.write_bytes(name.encode() * 100)
        directory.mkdir()
        (directory / f"in-{name}").write_bytes(name.encode())
        owned(directory / f"in-{name}", owner, 0o644)
        owned(file, owner, 0o600 if private else 0o644)
        owned(directory, owner, 0o700 if private else 0o755)
    settle()
    return shared


def swap(shared: Path) -> None:
    """The victim's file and directory take the names of the user's."""
    (shared / "victim.txt").rename(shared / "mine.txt")
    (shared / "mine").rename(shared / "elsewhere")
    (shared / "victim").rename(shared / "mine")


@READ_WRITE
def test_a_file_that_takes_the_place_of_mine_is_not_mine(
    mount: MakeMount, source: Path, shared: Path, arguments: tuple[str, ...]
) -> None:
    m = mount(source, "--allow-other", *arguments)
    open_to_all(source)
    open_to_all(m.path)
    path = m.path / "shared/mine.txt"
    assert as_user(USER, USER, [], lambda: path.stat().st_uid) == USER
    swap(shared)
    for _ in range(20):
        found = as_user(USER, USER, [], path.read_bytes)
        assert found in REFUSED, found
    if "60" not in arguments:
        wait_for(lambda: as_user(USER, USER, [], path.read_bytes), lambda answer: answer == errno.EACCES)
        assert as_user(VICTIM, VICTIM, [], path.read_bytes) == b"victim" * 100


@READ_WRITE
def test_a_directory_that_takes_the_place_of_mine_is_not_mine(
    mount: MakeMount, source: Path, shared: Path, arguments: tuple[str, ...]
) -> None:
    m = mount(source, "--allow-other", *arguments)
    open_to_all(source)
    open_to_all(m.path)
    path = m.path / "shared/mine"
    assert as_user(USER, USER, [], lambda: os.listdir(path)) == ["in-mine"]
    assert as_user(USER, USER, [], (path / "in-mine").read_bytes) == b"mine"  # the directory is pinned now
    swap(shared)
    for _ in range(20):
        listed = as_user(USER, USER, [], lambda: os.listdir(path))
        assert "in-victim" not in listed if isinstance(listed, list) else listed in REFUSED, listed
        read = as_user(USER, USER, [], (path / "in-victim").read_bytes)
        assert read in REFUSED, read
        made = as_user(USER, USER, [], (path / "new").touch)
        assert not (shared / "mine/new").exists(), made


def test_a_read_only_mount_does_not_show_what_took_the_place_of_mine(
    mount: MakeMount, source: Path, shared: Path
) -> None:
    m = mount(source, "--allow-other", "--read-only")
    open_to_all(source)
    open_to_all(m.path)
    file, directory = m.path / "shared/mine.txt", m.path / "shared/mine"
    assert as_user(USER, USER, [], lambda: (file.stat().st_uid, directory.stat().st_uid)) == (USER, USER)
    swap(shared)
    for _ in range(5):
        assert as_user(USER, USER, [], file.read_bytes) in REFUSED
        listed = as_user(USER, USER, [], lambda: os.listdir(directory))
        assert "in-victim" not in listed if isinstance(listed, list) else listed in REFUSED, listed
        assert as_user(USER, USER, [], (directory / "in-victim").read_bytes) in REFUSED


@pytest.mark.parametrize("arguments", [("--mutable", "**"), ("--cache", "none"), ()], ids=lambda a: "-".join(a))
@pytest.mark.parametrize("more", [(), ("--no-fastpath",)], ids=["", "no-fastpath"])
def test_who_may_not_read_a_mutable_file_any_more_does_not_open_it(
    mount: MakeMount, source: Path, arguments: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """An opened file stays readable, whatever is written to it later."""
    log = source / "log"
    log.write_bytes(b"public")
    owned(log, VICTIM, 0o640)
    os.chown(log, VICTIM, GROUP)
    settle()
    m = mount(source, "--allow-other", "--attr-timeout", "30", *arguments, *more)
    open_to_all(log)
    open_to_all(m.path)
    path = m.path / "log"
    os.close(os.open(path, os.O_WRONLY))  # written here: mutable in any mode
    assert as_user(USER, USER, [GROUP], path.read_bytes) == b"public"
    assert as_user(USER, USER, [GROUP], lambda: path.stat().st_gid) == GROUP
    os.chown(log, VICTIM, VICTIM)
    log.write_bytes(b"secret")
    for _ in range(3):
        assert as_user(USER, USER, [GROUP], path.read_bytes) in REFUSED
    assert as_user(VICTIM, VICTIM, [], path.read_bytes) == b"secret"


@pytest.mark.parametrize("arguments", [("--mutable", "**"), ("--cache", "none")], ids=lambda a: "-".join(a))
@pytest.mark.parametrize("more", [(), ("--no-fastpath",)], ids=["", "no-fastpath"])
def test_a_program_that_may_be_run_and_not_read(
    mount: MakeMount, source: Path, arguments: tuple[str, ...], more: tuple[str, ...]
) -> None:
    program = source / "program"
    program.write_bytes(Path("/bin/true").read_bytes())
    owned(program, VICTIM, 0o711)
    settle()
    m = mount(source, "--allow-other", *arguments, *more)
    open_to_all(program)
    open_to_all(m.path)
    path = m.path / "program"
    assert as_user(USER, USER, [], path.read_bytes) == errno.EACCES

    def runs() -> int:
        return subprocess.run([path], user=USER, group=USER, extra_groups=[]).returncode

    assert runs() == 0
    path.stat()
    program.chmod(0o700)
    with pytest.raises(PermissionError):
        runs()
