"""What a caller may do with a file and see of it, and what the kernel requests on its behalf: as on the source."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.system.syscalls import UTIME_NOW, utimensat
from tests.conftest import Mount, raises_errno
from tests.users import CAPABILITY, GROUP_OBJ, MASK, NOBODYS, OTHER, USER, USER_OBJ, acl, as_user, open_to_all

MakeMount = Callable[..., Mount]
ALICE, BOB = 1234, 1235
MODES = pytest.mark.parametrize(
    "mode",
    [(), ("--no-fastpath",), ("--mutable", "**"), ("--cache", "none"), ("--cache", "metadata")],
    ids=lambda mode: "".join(mode) or "read-write",
)


def mounted(mount: MakeMount, source: Path, mode: tuple[str, ...]) -> Mount:
    m = mount(source, "--allow-other", *mode)
    open_to_all(source)
    open_to_all(m.path)
    return m


# --- extended attributes -------------------------------------------------------------------------------------------


@pytest.mark.promise("WR-7")
@pytest.mark.parametrize("mode", [("--read-only",), ("--read-only", "--no-fastpath"), (), ("--mutable", "**")], ids=str)
def test_names_of_trusted_attributes_are_hidden_from_users(
    mount: MakeMount, source: Path, mode: tuple[str, ...]
) -> None:
    """The first list comes from the source, the others may come from the cache."""
    path = source / "d0/f00000"
    os.setxattr(path, "trusted.hidden", b"x")
    os.setxattr(path, "user.shown", b"x")
    os.setxattr(source / "d1/f00001", "trusted.hidden", b"x")
    m = mounted(mount, source, mode)
    for _ in range(2):
        for root in (source, m.path):
            assert as_user(ALICE, ALICE, [], lambda root=root: os.listxattr(root / "d0/f00000")) == ["user.shown"]
            assert as_user(ALICE, ALICE, [], lambda root=root: os.listxattr(root / "d1/f00001")) == []
            assert sorted(os.listxattr(root / "d0/f00000")) == ["trusted.hidden", "user.shown"]
            assert os.listxattr(root / "d1/f00001") == ["trusted.hidden"]


@MODES
def test_a_namespace_that_the_source_does_not_know_is_not_supported(
    mount: MakeMount, source: Path, mode: tuple[str, ...]
) -> None:
    m = mounted(mount, source, mode)
    for _ in range(2):
        for root in (source, m.path):
            raises_errno(errno.EOPNOTSUPP, lambda root=root: os.getxattr(root / "d0/f00000", "unknown.name"))
            raises_errno(errno.ENODATA, lambda root=root: os.getxattr(root / "d0/f00000", "user.name"))


def append(path: Path) -> None:
    with open(path, "ab", buffering=0) as file:
        file.write(b"more")


def truncate_open(path: Path) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.truncate(1)


def truncate(path: Path) -> None:
    os.truncate(path, 1)


def rewrite(path: Path) -> None:
    path.write_text("new")


@pytest.mark.promise("WR-6")
@MODES
def test_a_file_with_capabilities_is_changed_by_whoever_may_write_it_and_loses_them(
    mount: MakeMount, source: Path, mode: tuple[str, ...]
) -> None:
    """Without the fast path the kernel requests the removal of capabilities before the change, as the writer."""
    changes = (append, truncate_open, truncate, rewrite)
    for change in changes:
        path = source / change.__name__
        path.write_bytes(b"content")
        path.chmod(0o666)
        os.setxattr(path, "security.capability", CAPABILITY)
    m = mounted(mount, source, mode)
    for change in changes:
        loses_capabilities(source, m.path, change)


def loses_capabilities(source: Path, mounted: Path, change: Callable[[Path], None]) -> None:
    name, attribute = change.__name__, "security.capability"
    path = mounted / name
    assert os.getxattr(path, attribute)
    assert as_user(BOB, BOB, [], lambda: os.removexattr(path, attribute)) == errno.EPERM
    assert os.getxattr(source / name, attribute)
    assert as_user(BOB, BOB, [], lambda: change(path)) is None
    for root in (source, mounted):
        raises_errno(errno.ENODATA, lambda root=root: os.getxattr(root / name, attribute))
    os.setxattr(path, attribute, CAPABILITY)
    assert os.getxattr(source / name, attribute)
    os.removexattr(path, attribute)
    for root in (source, mounted):
        raises_errno(errno.ENODATA, lambda root=root: os.getxattr(root / name, attribute))


@pytest.mark.promise("WR-2", "WR-6")
@pytest.mark.parametrize("behind", [False, True], ids=["through the mount", "at the source"])
@MODES
def test_bits_and_capabilities_that_a_file_gets_between_two_writes_are_cleared(
    mount: MakeMount, source: Path, mode: tuple[str, ...], behind: bool
) -> None:
    """The kernel remembers that a file had none at the first write."""
    m = mounted(mount, source, mode)
    path, attribute = source / "d0/f00000", "security.capability"
    path.chmod(0o777)
    fd = as_user(BOB, BOB, [], lambda: os.open(m.path / "d0/f00000", os.O_WRONLY))
    assert isinstance(fd, int)
    try:
        assert as_user(BOB, BOB, [], lambda: os.write(fd, b"first")) == 5
        changed = path if behind else m.path / "d0/f00000"
        changed.chmod(0o6777)
        os.setxattr(changed, attribute, CAPABILITY)
        assert as_user(BOB, BOB, [], lambda: os.write(fd, b"second")) == 6
        raises_errno(errno.ENODATA, lambda: os.getxattr(path, attribute))
        assert path.stat().st_mode & 0o7777 == os.fstat(fd).st_mode & 0o7777 == 0o777
    finally:
        os.close(fd)
    assert (m.path / "d0/f00000").stat().st_mode & 0o7777 == 0o777
    raises_errno(errno.ENODATA, lambda: os.getxattr(m.path / "d0/f00000", attribute))


@pytest.mark.promise("WR-6")
@pytest.mark.fastpath
def test_a_small_write_is_one_call_to_the_source(mount: MakeMount, source: Path) -> None:
    """The kernel does not ask for the capabilities of the file before each write."""
    m = mount(source)
    with open(m.path / "log", "ab", buffering=0) as log:
        log.write(b"first\n")
        before = m.ops()
        for _ in range(100):
            log.write(b"line\n")
        assert m.ops() == before | {"write": before["write"] + 100}


# --- opening ---------------------------------------------------------------------------------------------------------


@MODES
def test_an_open_for_reading_truncates_when_it_is_told_to(
    mount: MakeMount, source: Path, mode: tuple[str, ...]
) -> None:
    for name, bits in (("free", 0o666), ("closed", 0o644)):
        (source / name).write_bytes(b"content")
        (source / name).chmod(bits)
    m = mounted(mount, source, mode)

    def truncate(name: str) -> bytes:
        fd = os.open(m.path / name, os.O_RDONLY | os.O_TRUNC)
        try:
            raises_errno(errno.EBADF, lambda: os.write(fd, b"x"))
            return os.read(fd, 100)
        finally:
            os.close(fd)

    assert as_user(BOB, BOB, [], lambda: truncate("closed")) == errno.EACCES
    assert as_user(BOB, BOB, [], lambda: truncate("free")) == b""
    assert ((source / "free").read_bytes(), (source / "closed").read_bytes()) == (b"", b"content")
    assert (m.path / "free").stat().st_size == 0
    (m.path / "free").write_bytes(b"again")
    m.drop_caches()
    assert (m.path / "free").read_bytes() == b"again" == (source / "free").read_bytes()


# --- default ACLs and the umask -------------------------------------------------------------------------------------

SHARED = acl((USER_OBJ, 7, NOBODYS), (USER, 7, BOB), (GROUP_OBJ, 5, NOBODYS), (MASK, 7, NOBODYS), (OTHER, 5, NOBODYS))


def make_everything(place: Path) -> dict[str, int]:
    """Files and a directory with a strict umask; the modes they have."""
    before = os.umask(0o077)
    try:
        os.close(os.open(place / "file", os.O_CREAT | os.O_WRONLY, 0o666))
        os.close(os.open(place / "private", os.O_CREAT | os.O_WRONLY, 0o600))
        os.mkdir(place / "directory", 0o777)
        os.mknod(place / "node", 0o100666)
        os.mkfifo(place / "fifo", 0o666)
    finally:
        os.umask(before)
    return {path.name: path.stat().st_mode & 0o7777 for path in place.iterdir()}


@pytest.mark.promise("WR-5")
@pytest.mark.fastpath
@pytest.mark.parametrize("mode", [(), ("--mutable", "**"), ("--cache", "none")], ids=lambda m: "".join(m) or "rw")
def test_the_umask_does_not_count_where_a_default_acl_does(
    mount: MakeMount, source: Path, mode: tuple[str, ...]
) -> None:
    for name in ("directly", "through", "plain"):
        (source / name).mkdir()
        os.chown(source / name, ALICE, ALICE)
    for name in ("directly", "through"):
        os.setxattr(source / name, "system.posix_acl_default", SHARED)
        os.setxattr(source / name, "system.posix_acl_access", SHARED)
    m = mounted(mount, source, mode)
    expected = as_user(ALICE, ALICE, [], lambda: make_everything(source / "directly"))
    assert expected == {"file": 0o664, "private": 0o600, "directory": 0o775, "node": 0o664, "fifo": 0o664}
    assert as_user(ALICE, ALICE, [], lambda: make_everything(m.path / "through")) == expected
    assert as_user(BOB, BOB, [], lambda: append(m.path / "through/file")) is None
    assert as_user(BOB, BOB, [], lambda: append(m.path / "through/private")) == errno.EACCES
    assert as_user(BOB, BOB, [], lambda: (m.path / "through/directory/below").touch()) is None


@pytest.mark.promise("WR-5")
@MODES
def test_the_umask_counts_everywhere_else(mount: MakeMount, source: Path, mode: tuple[str, ...]) -> None:
    (source / "plain").mkdir()
    os.chown(source / "plain", ALICE, ALICE)
    m = mounted(mount, source, mode)
    expected = {"file": 0o600, "private": 0o600, "directory": 0o700, "node": 0o600, "fifo": 0o600}
    assert as_user(ALICE, ALICE, [], lambda: make_everything(m.path / "plain")) == expected
    (m.path / "roots").mkdir()
    assert make_everything(m.path / "roots") == expected
    os.mkdir(m.path / "open", 0o777)
    assert (source / "open").stat().st_mode & 0o7777 == 0o755


@pytest.mark.promise("WR-10")
def test_one_time_is_now_and_the_other_given(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    (m.path / "d0/new").write_bytes(b"x")
    path, file = os.fsencode(m.path / "d0/new"), source / "d0/new"
    utimensat(path, (3000, 5), (0, UTIME_NOW))
    now = file.stat()
    assert now.st_atime_ns == 3000 * 10**9 + 5 and now.st_mtime > 10**9
    utimensat(path, (0, UTIME_NOW), (4000, 7))
    now = file.stat()
    assert now.st_mtime_ns == 4000 * 10**9 + 7 and now.st_atime > 10**9
