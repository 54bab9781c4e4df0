"""POSIX ACLs: the kernel combines an ACL with the mode, so both must be from the same moment."""

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from cachefs.system.descriptors import closing
from tests.bindfs import Bindfs
from tests.conftest import Mount, expire, settle, wait_for
from tests.mount.test_listings import exchange
from tests.users import GROUP_OBJ, MASK, NOBODYS, OTHER, USER, USER_OBJ, acl, as_user, open_to_all

MakeMount = Callable[..., Mount]
ALICE, BOB, STAFF = 4321, 1234, 5555
ACL = "system.posix_acl_access"
MODES = [
    ("--read-only",),
    ("--read-only", "--no-fastpath"),
    (),
    ("--no-fastpath",),
    ("--mutable", "**"),
    ("--cache", "none"),
]
READ_WRITE = [mode for mode in MODES if "--read-only" not in mode]


def modes(arguments: list[tuple[str, ...]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("arguments", arguments, ids=lambda a: "-".join(a))


def allows(user: int, permissions: int, *, others: int) -> bytes:
    """rwx for the owner, nothing for the group, something for one user and for others."""
    user_entry = USER, permissions, user
    mask = MASK, permissions, NOBODYS
    return acl((USER_OBJ, 7, NOBODYS), user_entry, (GROUP_OBJ, 0, NOBODYS), mask, (OTHER, others, NOBODYS))


def give(path: Path, value: bytes, user: int) -> None:
    """An extended attribute, and an ACL that admits a user."""
    os.setxattr(path, "user.a", value)
    os.setxattr(path, ACL, allows(user, 7, others=0))


def bob(function: Callable[[], object], *groups: int) -> object:
    return as_user(BOB, BOB, groups, function)


@pytest.fixture
def directory(source: Path) -> Path:
    """With one file, which everyone may read."""
    directory = source / "dir"
    directory.mkdir()
    (directory / "file").write_bytes(b"secret")
    (directory / "file").chmod(0o644)
    directory.chmod(0o755)
    return directory


@pytest.mark.promise("PE-4")
@modes(MODES)
@pytest.mark.parametrize("which", [".", "file"])
def test_the_mode_of_one_version_does_not_meet_the_acl_of_another(
    mount: MakeMount, source: Path, directory: Path, which: str, arguments: tuple[str, ...]
) -> None:
    """With an ACL, the group bits of the mode are its mask: the group never had these permissions."""
    target = directory / which
    os.chown(target, 0, STAFF)
    os.setxattr(target, ACL, allows(ALICE, 5, others=0))
    settle()
    m = mount(source, "--allow-other", *arguments)
    open_to_all(directory)
    open_to_all(m.path)
    assert (m.path / "dir/file").read_bytes() == b"secret"  # root owns both: the kernel asks for no ACL
    assert os.listdir(m.path / "dir") == ["file"]
    assert bob((directory / "file").read_bytes, STAFF) == errno.EACCES
    os.removexattr(target, ACL)
    target.chmod(0o700)
    assert bob((directory / "file").read_bytes, STAFF) == errno.EACCES
    assert bob((m.path / "dir/file").read_bytes, STAFF) in (errno.EACCES, errno.ESTALE)
    if which == ".":
        assert bob(lambda: os.listdir(m.path / "dir"), STAFF) in (errno.EACCES, errno.ESTALE)


@pytest.mark.promise("PE-4")
@modes([(), ("--no-fastpath",)])
@pytest.mark.parametrize("is_directory", [True, False], ids=["directory", "file"])
def test_a_mode_that_expires_in_the_kernel_does_not_meet_the_acl_of_the_next_version(
    mount: MakeMount, source: Path, is_directory: bool, arguments: tuple[str, ...]
) -> None:
    """The kernel counts in jiffies. Before: for some milliseconds it checked one request in twenty by the former mode
    and the present ACL."""
    full = 7 if is_directory else 6
    no_group = acl((USER_OBJ, full, NOBODYS), (GROUP_OBJ, 0, NOBODYS), (MASK, full, NOBODYS), (OTHER, 0, NOBODYS))
    targets = [source / f"{number}" for number in range(200)]
    for target in targets:
        if is_directory:
            target.mkdir(0o700)
        else:
            target.write_bytes(b"secret")
            target.chmod(0o600)
        os.chown(target, 0, STAFF)
        os.setxattr(target, ACL, no_group)
    settle()
    m = mount(source, "--allow-other", "--attr-timeout", "1", *arguments)
    open_to_all(source)
    open_to_all(m.path)
    looked_up, has_looked_up = os.pipe()

    def look_and_read() -> object:
        began = []
        for target in targets:
            began.append(time.monotonic())
            (m.path / target.name).lstat()
            time.sleep(0.001)
        os.write(has_looked_up, b"1")
        found = []
        for number, target in enumerate(targets):
            expires = began[number] + 1 + number % 20 * 0.0002
            while time.monotonic() < expires:
                pass
            try:
                path = m.path / target.name
                found.append(os.listdir(path) if is_directory else path.read_bytes())
            except OSError as error:
                found.append(error.errno)
        return [each for each in found if each != errno.EACCES]

    changer = threading.Thread(target=lambda: (os.read(looked_up, 1), [close(target) for target in targets]))

    def close(target: Path) -> None:
        target.chmod(0o700)
        os.removexattr(target, ACL)

    changer.start()
    assert bob(look_and_read, STAFF) == []
    changer.join()
    os.close(looked_up)
    os.close(has_looked_up)


@pytest.mark.promise("PE-5")
@modes(READ_WRITE)
@pytest.mark.parametrize(("user", "mode"), [(BOB, 0o710), (ALICE, 0o750)], ids=["named", "others"])
def test_a_chmod_through_the_mount_changes_the_acl_as_well(
    mount: MakeMount, source: Path, directory: Path, user: int, mode: int, arguments: tuple[str, ...]
) -> None:
    os.setxattr(directory, ACL, allows(user, 5, others=5))
    settle()
    m = mount(source, "--allow-other", *arguments)
    open_to_all(directory)
    open_to_all(m.path)
    for _ in range(2):
        assert bob((m.path / "dir/file").read_bytes) == b"secret"
        m.drop_caches()  # the directory is pinned now, and the ACL when the kernel asks for it again
    (m.path / "dir").chmod(mode)

    def found(root: Path) -> list[object]:
        return [bob(lambda: os.listdir(root / "dir")), bob((root / "dir/file").read_bytes)]

    assert found(source)[0] == errno.EACCES
    assert found(m.path) == found(source)
    assert os.getxattr(m.path / "dir", ACL) == os.getxattr(directory, ACL)


def started_together(
    function: Callable[[], object], delays: Sequence[float] = (0, 0.0008, 0.0016, 0.0024)
) -> list[object]:
    """What several processes of Bob's get that call a function within milliseconds."""
    begins = time.monotonic() + 0.03
    children = []
    for delay in delays:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            found = "failed before the call"
            try:
                os.setgroups([STAFF])
                os.setresgid(BOB, BOB, BOB)
                os.setresuid(BOB, BOB, BOB)
                time.sleep(max(0.0, begins + delay - time.monotonic()))
                found = repr(function())
            except OSError as error:
                found = errno.errorcode[error.errno]
            finally:
                os.write(writing, found.encode())
                os._exit(0)
        os.close(writing)
        children.append((child, reading))
    seen = []
    for child, reading in children:
        with open(reading) as answer:
            seen.append(answer.read())
        os.waitpid(child, 0)
    return seen


@pytest.mark.promise("PE-4")
@modes([(), ("--no-fastpath",), ("--read-only",)])
@pytest.mark.parametrize("by", ["another node", "this mount"])
@pytest.mark.parametrize("is_directory", [True, False], ids=["directory", "file"])
def test_processes_that_come_together_meet_no_mode_and_acl_of_two_versions(
    mount: MakeMount, source: Path, is_directory: bool, by: str, arguments: tuple[str, ...]
) -> None:
    """The first of them finds other permissions. Before: the others, which the kernel had admitted by the former mode,
    got the present ACL."""
    if by == "this mount" and arguments == ("--read-only",):
        pytest.skip("it changes nothing")
    full = 7 if is_directory else 6
    no_group = acl((USER_OBJ, full, NOBODYS), (GROUP_OBJ, 0, NOBODYS), (MASK, full, NOBODYS), (OTHER, 0, NOBODYS))
    names = [f"{number}" for number in range(40)]
    for name in names:
        if is_directory:
            (source / name).mkdir(0o700)
            (source / name / "file").touch()
        else:
            (source / name).write_bytes(b"secret")
            (source / name).chmod(0o600)
        os.chown(source / name, 0, STAFF)
        os.setxattr(source / name, ACL, no_group)
    settle()
    m = mount(source, "--allow-other", *arguments)
    open_to_all(source)
    open_to_all(m.path)
    for name in names:
        if is_directory:
            assert (m.path / name / "file").read_bytes() == b""
    expire()
    for name in names:
        path, changed = m.path / name, (m.path if by == "this mount" else source) / name
        assert path.stat()
        assert bob(partial(os.listdir if is_directory else Path.read_bytes, path), STAFF) == errno.EACCES
        os.removexattr(changed, ACL)
        changed.chmod(0o700 if is_directory else 0o600)
        if is_directory:
            (source / name / "new").touch()
        found = started_together(partial(os.listdir if is_directory else Path.read_bytes, path))
        assert set(found) <= {"EACCES", "ESTALE"}


@pytest.mark.promise("PE-4")
@modes(READ_WRITE)
@pytest.mark.parametrize("by", ["another node", "this mount"])
def test_a_mode_that_has_just_lost_its_acl_is_given_as_an_acl(
    mount: MakeMount, source: Path, by: str, arguments: tuple[str, ...]
) -> None:
    """The kernel keeps it, also for processes that have read the former mode. Before: it kept that there was none, once
    the caller had seen the present mode."""
    file = source / "file"
    file.write_bytes(b"secret")
    os.setxattr(
        file, ACL, acl((USER_OBJ, 6, NOBODYS), (GROUP_OBJ, 0, NOBODYS), (MASK, 6, NOBODYS), (OTHER, 0, NOBODYS))
    )
    settle()
    m = mount(source, *arguments)
    assert (m.path / "file").stat().st_mode & 0o777 == 0o660
    changed = m.path / "file" if by == "this mount" else file
    os.removexattr(changed, ACL)
    changed.chmod(0o600)
    wait_for(lambda: (m.path / "file").stat().st_mode & 0o777, lambda mode: mode == 0o600)
    without = (USER_OBJ, 6, NOBODYS), (GROUP_OBJ, 0, NOBODYS), (OTHER, 0, NOBODYS)
    assert os.getxattr(m.path / "file", ACL) == acl(*without)


@pytest.mark.promise("PE-3")
@modes(READ_WRITE)
def test_processes_that_come_together_read_nothing_by_a_former_mode(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    """The first of them finds another mode. Before: the others, which the kernel had admitted, read new contents."""
    names = [f"{number}" for number in range(40)]
    for name in names:
        (source / name).write_bytes(b"public")
        (source / name).chmod(0o604)  # the kernel asks for no ACL, which would show the change
    settle()
    m = mount(source, "--allow-other", *arguments)
    open_to_all(source)
    open_to_all(m.path)
    for name in names:
        path, changed = m.path / name, source / name
        assert path.stat()
        changed.chmod(0o600)
        with changed.open("r+b") as file:
            file.write(b"secret")
        found = started_together(path.read_bytes, [number * 0.0003 for number in range(6)])
        assert set(found) <= {"EACCES", "ESTALE"}


@pytest.mark.promise("PE-4")
@modes(READ_WRITE)
def test_the_group_of_a_renamed_directory_does_not_meet_its_former_acl(
    mount: MakeMount, source: Path, directory: Path, arguments: tuple[str, ...]
) -> None:
    """Before: the kernel took over the attributes of a look-up by the new name, and kept the ACL."""
    group = (USER_OBJ, 7, NOBODYS), (MASK, 7, NOBODYS), (OTHER, 0, NOBODYS)
    os.chown(directory, 0, ALICE)
    os.setxattr(directory, ACL, acl(group[0], (GROUP_OBJ, 7, NOBODYS), *group[1:]))
    settle()
    m = mount(source, "--allow-other", *arguments)
    open_to_all(source)
    open_to_all(m.path)
    assert bob(lambda: os.listdir(m.path / "dir"), STAFF) == errno.EACCES
    os.setxattr(directory, ACL, acl(group[0], (GROUP_OBJ, 0, NOBODYS), *group[1:]))
    os.chown(directory, 0, STAFF)
    directory.rename(source / "new")
    assert bob(lambda: os.listdir(m.path / "new"), STAFF) in (errno.EACCES, errno.ESTALE)


@pytest.mark.promise("PE-4")
@modes([(), ("--no-fastpath",)])
def test_a_directory_that_has_got_its_name_back_does_not_meet_its_former_acl(
    mount: MakeMount, bindfs: Bindfs, arguments: tuple[str, ...]
) -> None:
    """Before: the kernel had dropped the name, and kept the inode of a directory that was open, with its ACL."""
    group = (USER_OBJ, 7, NOBODYS), (MASK, 7, NOBODYS), (OTHER, 0, NOBODYS)
    directory, other = bindfs.root / "dir", bindfs.root / "other"
    for made in (directory, other):
        made.mkdir()
    (directory / "file").touch()
    os.chown(directory, 0, ALICE)
    os.setxattr(directory, ACL, acl(group[0], (GROUP_OBJ, 7, NOBODYS), *group[1:]))
    settle()
    m = mount(bindfs.path, "--allow-other", *arguments)
    for path in (bindfs.root, bindfs.path, m.path):
        open_to_all(path)
    assert bob(lambda: os.listdir(m.path / "dir"), STAFF) == errno.EACCES
    with closing(os.open(m.path / "dir", os.O_RDONLY)):
        exchange(directory, other)
        with suppress(OSError):
            os.listdir(m.path / "dir")
        exchange(directory, other)
        os.setxattr(directory, ACL, acl(group[0], (GROUP_OBJ, 0, NOBODYS), *group[1:]))
        os.chown(directory, 0, STAFF)
        assert bob(lambda: os.listdir(m.path / "dir"), STAFF) in (errno.EACCES, errno.ESTALE)


@pytest.mark.promise("PE-4")
@modes([(), ("--no-fastpath",)])
def test_an_attribute_that_was_set_after_the_mode_had_been_closed_is_not_given_by_the_former_mode(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    (source / "file").touch(0o705)
    (source / "file").chmod(0o705)
    os.setxattr(source / "file", "user.key", b"public")
    m = mount(source, "--allow-other", *arguments)
    open_to_all(source)
    open_to_all(m.path)
    assert bob(lambda: os.getxattr(m.path / "file", "user.key")) == b"public"
    (source / "file").chmod(0o700)
    os.setxattr(source / "file", "user.key", b"secret")
    assert bob(lambda: os.getxattr(m.path / "file", "user.key")) == errno.EACCES


@pytest.mark.full_age
@pytest.mark.promise("PE-4", "CH-10")
@modes(MODES)
@pytest.mark.parametrize("remounted", [False, True])
def test_attributes_that_change_in_the_second_in_which_they_were_read_are_read_again(
    mount: MakeMount, old_ext4: Path, arguments: tuple[str, ...], remounted: bool
) -> None:
    """Times in whole seconds do not show the change. Before: a new mount, or the same one, admitted the former user."""
    m = mount(old_ext4, "--allow-other", *arguments)
    open_to_all(old_ext4)
    open_to_all(m.path)
    for attempt in range(20):
        names = [f"{kind}{attempt}" for kind in ("file", "directory")]
        file, directory = (old_ext4 / name for name in names)
        while time.time() % 1 > 0.1:  # the machine may be busy
            time.sleep(0.01)
        directory.mkdir()
        file.write_bytes(b"secret")
        for path in (file, directory):
            give(path, b"old", BOB)
        before = [path.stat().st_ctime_ns for path in (file, directory)]
        for name in names:
            assert os.getxattr(m.path / name, "user.a") == b"old" and ACL in os.listxattr(m.path / name)
        assert bob((m.path / names[0]).read_bytes) == b"secret" and bob(partial(os.listdir, m.path / names[1])) == []
        for path in (file, directory):
            give(path, b"new", ALICE)
        if before == [path.stat().st_ctime_ns for path in (file, directory)]:
            break
    else:
        raise AssertionError("nothing changed in the second in which it was read")
    expire()
    if remounted:
        m.remount("--allow-other", *arguments)
    for name in names:
        assert os.getxattr(m.path / name, "user.a") == b"new"
    assert bob((m.path / names[0]).read_bytes) == bob(partial(os.listdir, m.path / names[1])) == errno.EACCES


@pytest.mark.promise("PE-6")
@modes(MODES[:4])
@pytest.mark.parametrize("error", ["EIO", "EACCES"])
def test_a_directory_whose_acl_cannot_be_read_is_open_to_its_owner(
    mount: MakeMount, source: Path, faulty: tuple[Path, Path], arguments: tuple[str, ...], error: str
) -> None:
    """Before: once another node had changed the directory, all beneath it failed for good."""
    mountpoint, faults = faulty
    (faults / "fails").write_text(f"getxattr {error} ")
    m = mount(mountpoint, *arguments)
    names = sorted(path.name for path in (source / "d0").iterdir())
    (m.path / "d0" / names[0]).read_bytes()
    (source / "d0/new").write_bytes(b"new")
    expire()
    for name in names:
        assert (m.path / "d0" / name).read_bytes() == (source / "d0" / name).read_bytes()
    if "--read-only" not in arguments:
        assert (m.path / "d0/new").read_bytes() == b"new"
        assert "new" in os.listdir(m.path / "d0")
