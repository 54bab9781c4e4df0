"""Names that another node gave to other objects, on a mount that has pinned them: pinned objects are served as they
were, and changes by this mount are made where the names lead."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from cachefs.client.client import Client
from cachefs.system.syscalls import renameat2
from tests import crowds
from tests.conftest import Mount, cachefs, raises_errno, settle, wait_for

MakeMount = Callable[..., Mount]
OLD, NEW = b"old " * 3000, b"the new one " * 500
NAME_HOLDS_S = 1.0
RENAME_EXCHANGE = 2


@pytest.fixture
def tree(source: Path) -> Path:
    for directory, content in (("first/below", OLD), ("other/below", NEW)):
        (source / directory).mkdir(parents=True)
        for place in (source / directory, source / directory.split("/")[0]):
            for name in ("read", "unread"):
                (place / name).write_bytes(content)
    settle()
    return source


def pinned(mount: MakeMount, tree: Path, *arguments: str) -> Mount:
    """A mount that has read a file in `first` and one beneath it: both are pinned, in the kernel too."""
    m = mount(tree, "--attr-timeout", "0.2", *arguments)
    for _ in range(2):
        for name in ("first/read", "first/below/read"):
            assert (m.path / name).read_bytes() == OLD
        time.sleep(0.3)  # the kernel's entries from before the pinning have expired
    return m


def swap(tree: Path) -> None:
    (tree / "first").rename(tree / "between")
    (tree / "other").rename(tree / "first")
    (tree / "between").rename(tree / "other")
    time.sleep(1.5 * NAME_HOLDS_S)


def tree_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def create(path: Path) -> None:
    (path / "made").write_bytes(b"made")


def open_for_writing(path: Path) -> None:
    with open(path / "unread", "r+b") as file:
        file.write(b"made")


def truncate(path: Path) -> None:
    os.truncate(path / "unread", 4)


def make_directory(path: Path) -> None:
    (path / "made").mkdir()
    (path / "made/made").write_bytes(b"made")


def link(path: Path) -> None:
    os.link(path / "unread", path / "made")


def symlink(path: Path) -> None:
    (path / "made").symlink_to("unread")


def unlink(path: Path) -> None:
    (path / "unread").unlink()


def rename(path: Path) -> None:
    (path / "unread").rename(path / "made")


CHANGES = [create, open_for_writing, truncate, make_directory, link, symlink, unlink, rename]


@pytest.mark.promise("CH-4")
@pytest.mark.parametrize(
    ("change", "place"),
    [*((change, "first") for change in CHANGES), (create, "first/below")],
    ids=[*(change.__name__ for change in CHANGES), "create beneath"],
)
def test_a_change_is_made_where_its_name_leads(
    mount: MakeMount, tree: Path, change: Callable[[Path], None], place: str
) -> None:
    m = pinned(mount, tree)
    swap(tree)
    before = tree_of(tree / "other")
    change(m.path / place)
    assert tree_of(tree / "other") == before
    expected = {f"{where}{name}": NEW for where in ("", "below/") for name in ("read", "unread")}
    assert tree_of(tree / "first") != expected or (tree / place / "made").is_symlink()
    assert sorted(os.listdir(m.path / place)) == sorted(os.listdir(tree / place))
    assert (m.path / place / "read").read_bytes() == NEW


@pytest.mark.promise("CH-4")
@pytest.mark.parametrize("change", [create, open_for_writing, unlink])
def test_a_change_by_a_name_that_is_gone_is_not_made(
    mount: MakeMount, tree: Path, change: Callable[[Path], None]
) -> None:
    m = pinned(mount, tree)
    (tree / "first").rename(tree / "moved")
    time.sleep(1.5 * NAME_HOLDS_S)
    before = tree_of(tree / "moved")
    raises_errno(errno.ENOENT, lambda: change(m.path / "first"))
    assert tree_of(tree / "moved") == before
    assert not (m.path / "first").exists()
    change(m.path / "moved")


@pytest.mark.promise("CH-5")
def test_who_has_it_open_makes_changes_in_the_directory_that_was_opened(mount: MakeMount, tree: Path) -> None:
    m = pinned(mount, tree)
    fds = [os.open(m.path / name, os.O_RDONLY | os.O_DIRECTORY) for name in ("first", "first/below")]
    try:
        swap(tree)
        for fd, place in zip(fds, ("other", "other/below"), strict=True):
            os.close(os.open("made", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
            os.rename("unread", "renamed", src_dir_fd=fd, dst_dir_fd=fd)
            os.unlink("renamed", dir_fd=fd)
            assert sorted(set(os.listdir(tree / place)) - {"below"}) == ["made", "read"]
    finally:
        for fd in fds:
            os.close(fd)


def change_owner(path: Path) -> None:
    os.chown(path, 4711, 4711)


def change_time(path: Path) -> None:
    os.utime(path, (1, 1))


def change_mode(path: Path) -> None:
    path.chmod(0o711)


def set_attribute(path: Path) -> None:
    os.setxattr(path, "user.made", b"made")


@pytest.mark.promise("CH-6")
@pytest.mark.parametrize("change", [change_mode, change_owner, change_time, set_attribute])
def test_attributes_are_changed_of_the_object_that_was_looked_up(
    mount: MakeMount, tree: Path, change: Callable[[Path], None]
) -> None:
    m = pinned(mount, tree)
    swap(tree)

    def attributes(name: str) -> tuple[object, ...]:
        now = (tree / name).stat()
        return now.st_mode, now.st_uid, now.st_gid, now.st_mtime_ns, os.listxattr(tree / name)

    looked_up, of_its_name = attributes("other"), attributes("first")
    change(m.path / "first")
    assert attributes("other") != looked_up
    assert attributes("first") == of_its_name


@pytest.mark.promise("CH-3")
def test_what_is_read_by_a_pinned_name_stays_until_it_is_invalidated(mount: MakeMount, tree: Path) -> None:
    """Also objects that were not looked at before come from that directory, never from the new one of its name."""
    m = pinned(mount, tree)
    swap(tree)
    for name in ("first/read", "first/unread", "first/below/unread"):
        assert (m.path / name).read_bytes() == OLD
    assert sorted(os.listdir(m.path / "first")) == ["below", "read", "unread"]
    cachefs("invalidate", m.path / "first")
    for name in ("first/read", "first/unread", "first/below/unread"):
        assert (m.path / name).read_bytes() == NEW


@pytest.mark.promise("CH-7")
@pytest.mark.parametrize("known", [True, False], ids=["known", "lost"])
def test_a_directory_that_took_the_place_of_a_pinned_one_is_renamed(mount: MakeMount, tree: Path, known: bool) -> None:
    """`lost`: the index knows already that the pinned one has another name. The kernel must know it as well."""
    m = pinned(mount, tree)
    if known:
        swap(tree)
    else:
        (tree / "first").rename(tree / "moved")
        Client(m.path).info(m.path / "moved/read")
        (tree / "other").rename(tree / "first")
    (m.path / "first").rename(m.path / "third")
    assert (tree / "third/read").read_bytes() == NEW
    for name in ("read", "unread", "below/read"):
        assert (m.path / "third" / name).read_bytes() == NEW
    create(m.path / "third")
    assert (tree / "third/made").exists()


@pytest.mark.promise("CH-7")
def test_a_file_that_took_the_place_of_a_pinned_one_is_renamed(mount: MakeMount, tree: Path) -> None:
    m = pinned(mount, tree)
    (tree / "other/read").rename(tree / "first/read")
    (m.path / "first/read").rename(m.path / "third")
    wait_for((m.path / "third").read_bytes, lambda content: content == NEW, 2)
    assert not (m.path / "first/read").exists()


@pytest.mark.promise("CH-8")
@pytest.mark.parametrize("remove", [os.unlink, lambda path: os.rename(path, path.with_name("new"))], ids=["rm", "mv"])
def test_a_pinned_name_that_the_source_does_not_have_goes_with_the_attempt(
    mount: MakeMount, tree: Path, remove: Callable[[Path], None]
) -> None:
    m = pinned(mount, tree)
    (tree / "first/read").unlink()
    raises_errno(errno.ENOENT, lambda: remove(m.path / "first/read"))
    wait_for((m.path / "first/read").exists, lambda found: not found)
    assert sorted(os.listdir(m.path / "first")) == ["below", "unread"]


@pytest.mark.promise("CH-9")
@pytest.mark.parametrize("mode", [[], ["--no-fastpath"], ["--mutable", "*.log"]], ids=["", "no-fastpath", "mutable"])
@pytest.mark.parametrize("change", [create, open_for_writing, unlink])
def test_a_directory_whose_name_was_dropped_stays_listed(
    mount: MakeMount, tree: Path, change: Callable[[Path], None], mode: list[str]
) -> None:
    """Before: listings left the name out until they expired, although the source had it all the time.

    The listing is of after the exchange: it shows the new modification time, and trusts the pinned name.
    """
    m = pinned(mount, tree, "--attr-timeout", "60", *mode)
    renameat2(-1, bytes(tree / "first/below"), -1, bytes(tree / "other/below"), RENAME_EXCHANGE)
    time.sleep(1.5 * NAME_HOLDS_S)
    names = sorted(os.listdir(m.path / "first"))
    change(m.path / "first/below")
    for _ in range(2):
        assert sorted(os.listdir(m.path / "first")) == names == ["below", "read", "unread"]
    assert (m.path / "first/below").stat().st_ino == (tree / "first/below").stat().st_ino


@pytest.mark.promise("CH-9")
@pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
@pytest.mark.parametrize("use", ["listing", "warm-up"])
def test_a_dropped_name_is_compared_before_its_directory_is_listed(
    mount: MakeMount, tree: Path, use: str, mode: list[str]
) -> None:
    """A process that has the old directory open drops its name, and does not look it up."""
    m = pinned(mount, tree, "--attr-timeout", "60", *mode)
    below = os.open(m.path / "first/below", os.O_RDONLY | os.O_DIRECTORY)
    renameat2(-1, bytes(tree / "first/below"), -1, bytes(tree / "other/below"), RENAME_EXCHANGE)
    time.sleep(1.5 * NAME_HOLDS_S)
    os.listdir(m.path / "first")
    os.mkdir("made", dir_fd=below)
    os.close(below)
    if use == "listing":
        assert sorted(os.listdir(m.path / "first")) == ["below", "read", "unread"]
    else:
        assert "4 of 4 files cached" in cachefs("warmup", m.path / "first").stdout
    assert (m.path / "first/below/read").read_bytes() == NEW


@pytest.mark.promise("CH-4")
def test_a_change_beneath_many_pinned_directories(mount: MakeMount, tree: Path) -> None:
    deep = Path(*["d"] * 500)
    (tree / deep).mkdir(parents=True)
    (tree / deep / "read").write_bytes(OLD)
    settle()
    m = pinned(mount, tree)
    assert (m.path / deep / "read").read_bytes() == OLD
    time.sleep(1.5 * NAME_HOLDS_S)
    create(m.path / deep)
    assert (tree / deep / "made").read_bytes() == b"made"


@pytest.mark.promise("CH-9")
def test_a_name_that_the_index_lost_is_not_resolved_by_the_kernel(mount: MakeMount, tree: Path) -> None:
    m = pinned(mount, tree)
    (tree / "first").rename(tree / "moved")
    Client(m.path).info(m.path / "moved/read")  # the daemon looks up by itself; the kernel is not involved
    (tree / "other").rename(tree / "first")
    wait_for((m.path / "first/read").read_bytes, lambda content: content == NEW, 10)
    assert (m.path / "moved/read").read_bytes() == OLD


@pytest.mark.promise("CH-1")
@pytest.mark.parametrize("arguments", [(), ("--read-only",)], ids=["read-write", "read-only"])
@pytest.mark.parametrize("place", ["first", "first/below"])
def test_a_listing_of_a_directory_that_was_replaced_fails_once(
    mount: MakeMount, tree: Path, place: str, arguments: tuple[str, ...]
) -> None:
    """getdents(2) has no path that the kernel could look up again. The next open of the directory finds the new one."""
    m = mount(tree, *arguments)
    assert (m.path / "first/below/read").read_bytes() == OLD
    shutil.rmtree(tree / place)
    (tree / "other").rename(tree / place)
    raises_errno(errno.ESTALE, lambda: os.listdir(m.path / place))
    assert sorted(os.listdir(m.path / place)) == ["below", "read", "unread"]
    assert (m.path / place / "read").read_bytes() == NEW


@pytest.mark.promise("CH-4")
@pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
def test_a_file_is_moved_into_the_directory_that_has_the_name_now(
    mount: MakeMount, tree: Path, mode: list[str]
) -> None:
    (tree / "d0/mine").write_bytes(b"mine")
    m = pinned(mount, tree, *mode)
    swap(tree)
    (m.path / "d0/mine").rename(m.path / "first/made")
    assert (tree / "first/made").read_bytes() == b"mine" and not (tree / "other/made").exists()


@pytest.mark.promise("CH-24")
@pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
def test_names_that_were_exchanged_are_pinned_as_before(mount: MakeMount, tree: Path, mode: list[str]) -> None:
    m = pinned(mount, tree, *mode)
    first = os.open(m.path / "first", os.O_RDONLY | os.O_DIRECTORY)
    renameat2(first, b"read", first, b"unread", RENAME_EXCHANGE)
    os.close(first)
    (m.path / "first/read").read_bytes()
    m.flush()
    time.sleep(1.5 * NAME_HOLDS_S)
    m.drop_caches()
    (m.path / "first").stat()
    (tree / "first/unread").rename(tree / "first/elsewhere")
    assert (m.path / "first/unread").read_bytes() == OLD


@pytest.mark.promise("CH-6")
@pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
def test_the_mode_of_a_file_that_took_the_place_of_another_is_not_changed(
    mount: MakeMount, source: Path, mode: list[str]
) -> None:
    """The caller has the old directory open, through a descriptor that needs no look-up."""
    m = mount(source, "--mutable", "**", "--attr-timeout", "60", *mode)
    file = source / "d0/f00000"
    os.link(file, source / "kept")  # so that its inode number is not used again
    held = os.open(m.path / "d0/f00000", os.O_PATH)
    (source / "new").write_bytes(b"new")
    (source / "new").chmod(0o644)
    (source / "new").rename(file)
    raises_errno(errno.ESTALE, lambda: os.chmod(f"/proc/self/fd/{held}", 0o600))
    os.close(held)
    assert file.stat().st_mode & 0o777 == 0o644


def twins(*paths: Path) -> None:
    """Two files of equal size, mtime and ctime: written within one step of the kernel's clock for files."""
    for _ in range(300):
        fds = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644) for path in paths]
        for fd, byte in zip(fds, (b"a", b"b"), strict=True):
            os.write(fd, byte * 5000)
        first, second = map(os.fstat, fds)
        for fd in fds:
            os.close(fd)
        if (first.st_ctime_ns, first.st_mtime_ns) == (second.st_ctime_ns, second.st_mtime_ns):
            return
        for path in paths:
            path.unlink()
    pytest.fail("no two files got equal times")


@pytest.mark.promise("CH-10", "TE-1")
@pytest.mark.parametrize(
    "mode",
    [["--read-only"], ["--attr-timeout", "60"], ["--read-only", "--no-fastpath"], ["--no-fastpath"]],
    ids="-".join,
)
def test_a_file_with_the_times_and_size_of_another_is_not_taken_for_it(
    mount: MakeMount, source: Path, mode: list[str]
) -> None:
    for name in "de":
        (source / name).mkdir()
    twins(source / "d/f", source / "e/f")
    settle()
    m = mount(source, *mode)
    assert (m.path / "d/f").stat().st_size == 5000
    (source / "d").rename(source / "x")
    (source / "e").rename(source / "d")
    (source / "x").rename(source / "e")
    try:
        assert (m.path / "d/f").read_bytes() == b"a" * 5000  # of what was looked up
    except OSError as error:
        assert error.errno == errno.ESTALE


@pytest.mark.promise("CH-1")
@pytest.mark.parametrize("ends", ["", "kill", "restart"])
@pytest.mark.parametrize("way", ["renamed", "exchanged"])
@pytest.mark.parametrize("mode", [[], ["--no-fastpath"], ["--cache", "none"]], ids=["", "Python alone", "changing"])
def test_an_open_directory_that_another_node_has_moved_is_never_shown_as_empty(
    mount: MakeMount, tree: Path, mode: list[str], way: str, ends: str
) -> None:
    """Before: its name had led elsewhere, so a listing took it for a directory that this mount has removed."""
    m = mount(tree, "--attr-timeout", "0.2", *mode)
    if ends and (m.no_fastpath or "--no-fastpath" in mode):
        pytest.skip("needs a fast path")
    with crowds.directory(m.path / "first") as fd:
        if way == "renamed":
            (tree / "first").rename(tree / "between")
        else:
            renameat2(-100, os.fsencode(tree / "first"), -100, os.fsencode(tree / "other"), RENAME_EXCHANGE)
        time.sleep(1.5 * NAME_HOLDS_S)
        with suppress(FileNotFoundError):
            assert (m.path / "first/read").read_bytes() == NEW
        if ends == "kill":
            m.kill()
            m.start()
        elif ends == "restart":
            cachefs("restart", m.path)
            m.pid = int(m.status()["pid"])
        for _ in range(2):
            try:
                assert sorted(os.listdir(fd)) == ["below", "read", "unread"]
            except OSError as error:
                assert error.errno == errno.ESTALE


@pytest.mark.promise("CH-4")
@pytest.mark.parametrize("truncates", [False, True], ids=["open", "truncate"])
@pytest.mark.parametrize("mode", [(), ("--no-fastpath",), ("--profile", "changing"), ("--mutable", "**")])
@pytest.mark.parametrize("replaced", ["file", "directory/other"])
def test_a_write_by_one_of_two_names_goes_to_the_file_that_has_that_name(
    mount: Callable[..., Mount], tmp_path: Path, mode: tuple[str, ...], replaced: str, truncates: bool
) -> None:
    """The kernel does not say by which name it opens a file, and caches where the name led."""
    source = tmp_path / "source"
    (source / "directory").mkdir(parents=True)
    m = mount(source, *mode, "--attr-timeout", "60")
    (m.path / "file").write_text("first")
    os.link(m.path / "file", m.path / "directory/other")
    for name in ("file", "directory/other"):
        (m.path / name).stat()
    (source / "new").write_text("second")
    (source / "new").rename(source / replaced)
    if truncates:
        os.truncate(m.path / replaced, 3)
    else:
        with (m.path / replaced).open("r+") as file:
            file.write("SECOND")
    old = {"file": "directory/other", "directory/other": "file"}[replaced]
    assert (source / old).read_text() == "first"
    assert (source / replaced).read_text() == ("sec" if truncates else "SECOND")
