"""Sources whose descriptors follow paths (hazard 57): another node exchanges directories, and a descriptor of one leads
to the other."""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from cachefs.source.source import Source
from cachefs.system.descriptors import closing
from cachefs.system.syscalls import renameat2
from tests.bindfs import Bindfs
from tests.conftest import Mount, expire, settle, start_fault_fs, wait_for
from tests.users import as_user, open_to_all

MakeMount = Callable[..., Mount]
USER = 1234
RENAME_EXCHANGE = 2
MODES = pytest.mark.parametrize(
    "mode",
    [
        ("--read-only",),
        ("--read-only", "--cache", "metadata"),
        ("--read-only", "--no-fastpath"),
        (),
        ("--no-fastpath",),
    ],
    ids=["read-only", "metadata", "read-only-no-fastpath", "read-write", "read-write-no-fastpath"],
)


@pytest.fixture
def tree(bindfs: Bindfs) -> Path:
    """Beneath the bindfs: `open`, with a file, and `closed`, which only root may list, with two files."""
    open_to_all(bindfs.root)
    open_to_all(bindfs.path)
    for name in ("open/public", "closed/secret", "closed/unread"):
        (bindfs.root / name).parent.mkdir(exist_ok=True)
        (bindfs.root / name).write_text(name)
    (bindfs.root / "closed").chmod(0o700)
    settle()
    return bindfs.root


def exchange(bindfs: Bindfs) -> None:
    """By another node. Returns when the kernel has dropped what it cached of the bindfs."""
    names = ("open", "closed")
    before = [(bindfs.path / name).stat().st_ino for name in names]
    renameat2(-100, os.fsencode(bindfs.root / "open"), -100, os.fsencode(bindfs.root / "closed"), RENAME_EXCHANGE)
    wait_for(lambda: [(bindfs.path / name).stat().st_ino for name in names], lambda now: now == before[::-1])


@pytest.mark.promise("CH-2")
@pytest.mark.promise("PE-6")
@MODES
def test_nothing_of_a_closed_directory_is_shown_under_the_name_of_an_open_one(
    mount: MakeMount, bindfs: Bindfs, tree: Path, mode: tuple[str, ...]
) -> None:
    """Regression: another user got the names and the bytes of the closed directory."""
    m = mount(bindfs.path, *mode)
    open_to_all(m.path)
    assert as_user(USER, USER, [], (m.path / "open/public").read_text) == "open/public"
    assert (m.path / "closed/secret").read_text() == "closed/secret"
    former = (m.path / "open").stat().st_ino
    exchange(bindfs)
    for name in ("secret", "unread"):
        found = as_user(USER, USER, [], (m.path / "open" / name).read_text)
        assert found in (errno.EACCES, errno.ENOENT)
    assert as_user(USER, USER, [], lambda: os.listdir(m.path / "open")) in (errno.EACCES, ["public"])
    wait_for(lambda: (m.path / "open").stat().st_ino, lambda number: number != former)  # a bindfs has no birth times
    assert (m.path / "open").stat().st_mode & 0o777 == 0o700
    assert (m.path / "open/unread").read_text() == "closed/unread"
    assert sorted(os.listdir(m.path / "open")) == ["secret", "unread"]


@pytest.mark.promise("CH-2")
@MODES
def test_a_directory_that_the_source_keeps_after_its_removal_is_not_the_next_one_of_its_name(
    mount: MakeMount, source: Path, tmp_path: Path, beneath: ExitStack, mode: tuple[str, ...]
) -> None:
    """MooseFS keeps it while the daemon has it open: empty, with two links. Before: it stayed empty."""
    for name, content in ("d", b"old"), ("new", b"new"):
        (source / name).mkdir()
        for file in ("read", "other"):
            (source / name / file).write_bytes(content)
    (trash := tmp_path / "trash").mkdir()
    faulty, faults, _ = start_fault_fs(source, tmp_path, beneath)
    settle()
    m = mount(faulty, *mode)
    assert (m.path / "d/read").read_bytes() == b"old"
    number = (faulty / "d").stat().st_ino
    (source / "d").rename(removed := tmp_path / "removed")
    (source / "new").rename(source / "d")
    shutil.rmtree(removed)
    (faults / "moved").write_text(f"{number} {trash}")
    expire()
    for name in ("other", "unknown", "other"):
        try:
            assert (m.path / "d" / name).read_bytes() == b"new"
        except OSError as error:  # the first request that finds nothing may notice it
            assert error.errno in (errno.ESTALE, errno.ENOENT)
    assert (m.path / "d/other").read_bytes() == b"new" and sorted(os.listdir(m.path / "d")) == ["other", "read"]


@pytest.mark.promise("CH-4")
@pytest.mark.parametrize("mode", [(), ("--no-fastpath",)], ids=["fastpath", "python"])
def test_a_file_is_created_where_the_path_leads(
    mount: MakeMount, bindfs: Bindfs, tree: Path, mode: tuple[str, ...]
) -> None:
    m = mount(bindfs.path, *mode)
    assert (m.path / "open/public").read_text() == "open/public"
    opened = os.open(m.path / "open", os.O_RDONLY | os.O_DIRECTORY)
    exchange(bindfs)
    try:
        os.close(os.open("made", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=opened))
    except OSError as error:
        assert error.errno == errno.ESTALE
        assert not list(tree.glob("*/made"))
    else:
        assert (tree / "closed/made").exists()  # the directory that is open, under its new name
    finally:
        os.close(opened)
    (m.path / "open/new").write_text("new")
    assert (tree / "open/new").read_text() == "new"


@pytest.mark.promise("CH-39")
@MODES
def test_a_new_directory_with_the_number_of_a_removed_one_has_none_of_its_files(
    mount: MakeMount, bindfs: Bindfs, tree: Path, mode: tuple[str, ...]
) -> None:
    m = mount(bindfs.path, *mode)
    assert (m.path / "open/public").read_text() == "open/public"
    assert (m.path / "closed/secret").read_text() == "closed/secret"
    exchange(bindfs)
    for name in os.listdir(tree / "closed"):
        (tree / "closed" / name).unlink()
    (tree / "closed").rmdir()
    (tree / "closed").mkdir()  # a filesystem may give it the same number
    (tree / "closed/other").write_text("other")
    wait_for(lambda: os.path.exists(bindfs.path / "closed/other"), bool)
    assert not (m.path / "open/other").exists()
    assert (m.path / "open/unread").read_text() == "closed/unread"
    assert (m.path / "closed/other").read_text() == "other"


@pytest.mark.promise("CH-10")
@pytest.mark.parametrize("mode", [("--read-only", "--no-fastpath"), ("--no-fastpath",)], ids=" ".join)
def test_a_read_of_a_file_that_another_node_has_renamed_fails_with_estale(
    mount: MakeMount, bindfs: Bindfs, mode: tuple[str, ...]
) -> None:
    """Before: ENOENT, because the question about the open file follows its path. Its record stayed."""
    path = bindfs.root / "large"
    path.write_bytes(b"x" * (8 << 20))
    settle()
    m = mount(bindfs.path, *mode)
    with open(m.path / "large", "rb", buffering=0) as file:
        assert os.pread(file.fileno(), 1, 0) == b"x"
        path.rename(bindfs.root / "elsewhere")
        with pytest.raises(OSError) as failed:
            os.pread(file.fileno(), 1, 6 << 20)
    assert failed.value.errno == errno.ESTALE
    wait_for(lambda: (m.path / "elsewhere").read_bytes(), lambda content: content == b"x" * (8 << 20))


@pytest.mark.promise("TE-4")
def test_a_file_with_two_names_is_read_up_to_its_end(bindfs: Bindfs) -> None:
    """bindfs takes each name for a file of its own, whose size the kernel keeps for a second. Before: a reader who had
    opened it by the other name got a part, and the next writer appended at the end that the reader had met."""
    first, second = bindfs.path / "first", bindfs.path / "second"
    first.write_bytes(b"0" * 1000)
    os.link(first, second)
    wait_for(lambda: second.stat().st_nlink, lambda links: links == 2)
    with closing(os.open(bindfs.path, os.O_PATH)) as root, closing(os.open(second, os.O_RDONLY)) as fd:
        source = Source(root, fstype="fuse.bindfs")
        for _ in range(5):
            os.fstat(fd)
            with open(first, "ab") as writer:
                writer.write(b"1" * 5000)
            if len(os.pread(fd, 100_000, 0)) == 1000:
                break
        else:
            raise AssertionError("bindfs shows what was written by another name at once")
        assert len(source.pread(fd, 100_000, 0, None)) == first.stat().st_size
