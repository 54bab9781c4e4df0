"""Names that `--mutable` matches and names that it does not, of the same file: which of them decide, and when."""

import errno
import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, expire, raises_errno, settle, wait_for

MakeMount = Callable[..., Mount]
OLD, NEW = b"old " * 5000, b"the new one " * 500
MUTABLE = ("--mutable", "*.log", "--mutable", "runs/**")
LEVELS = pytest.mark.parametrize("cache", ["metadata", "full"])


@pytest.fixture
def tree(source: Path) -> Path:
    (source / "out/deep").mkdir(parents=True)
    (source / "runs").mkdir()
    for name in ("file", "other", "out/deep/file", "job.log"):
        (source / name).write_bytes(OLD)
    settle()
    return source


def is_immutable(path: Path) -> bool:
    """Asked by a process of its own, because a process that was refused to write to a file cannot unlink it."""
    done = subprocess.run(["sh", "-c", ': <> "$0"', path], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "Operation not permitted" in done.stderr
    return done.returncode != 0


def state(path: Path) -> str:
    return os.getxattr(path, "user.cachefs.state").decode()


def rewrite_and_read(path: Path, beneath: Path) -> None:
    """Writes by this mount are visible at once, those of other nodes after about a second: nothing is cached."""
    path.write_bytes(NEW)
    assert path.read_bytes() == NEW == beneath.read_bytes()
    beneath.write_bytes(OLD)
    wait_for(path.read_bytes, lambda content: content == OLD)
    os.chmod(path, 0o640)
    assert path.stat().st_mode & 0o777 == beneath.stat().st_mode & 0o777 == 0o640


# --- renames ---------------------------------------------------------------------------------------------------------


@pytest.mark.promise("EX-4")
@LEVELS
def test_an_immutable_file_that_gets_a_mutable_name_is_mutable(mount: MakeMount, tree: Path, cache: str) -> None:
    m = mount(tree, *MUTABLE, "--cache", cache)
    assert (m.path / "file").read_bytes() == OLD
    assert is_immutable(m.path / "file")
    m.flush()
    (m.path / "file").rename(m.path / "new.log")
    assert (m.path / "new.log").read_bytes() == OLD
    rewrite_and_read(m.path / "new.log", tree / "new.log")
    assert state(m.path / "new.log") in ("written", "mutable")
    assert m.flush()["cached_files"] == 0


@pytest.mark.promise("EX-6")
def test_a_mutable_name_that_another_node_replaces_shows_the_new_file(mount: MakeMount, tree: Path) -> None:
    m = mount(tree, *MUTABLE)
    assert (m.path / "file").read_bytes() == OLD
    (m.path / "file").rename(m.path / "new.log")
    assert state(m.path / "new.log") == "mutable"
    (tree / "other").rename(tree / "new.log")
    (tree / "new.log").write_bytes(NEW)
    wait_for((m.path / "new.log").read_bytes, lambda content: content == NEW)


@pytest.mark.promise("EX-5")
def test_it_is_immutable_again_under_another_name(mount: MakeMount, tree: Path) -> None:
    m = mount(tree, *MUTABLE)
    assert (m.path / "file").read_bytes() == OLD
    (m.path / "file").rename(m.path / "new.log")
    assert (m.path / "new.log").read_bytes() == OLD
    (m.path / "new.log").rename(m.path / "file")
    assert (m.path / "file").read_bytes() == OLD
    assert is_immutable(m.path / "file")
    assert state(m.path / "file") == "immutable"


@pytest.mark.promise("EX-5")
@LEVELS
@pytest.mark.parametrize("written", [False, True])
def test_a_mutable_file_that_gets_another_name(mount: MakeMount, tree: Path, cache: str, written: bool) -> None:
    """After that it is immutable once read, unless it was written in this run."""
    m = mount(tree, *MUTABLE, "--cache", cache)
    if written:
        (m.path / "job.log").write_bytes(OLD)
    assert (m.path / "job.log").read_bytes() == OLD
    (m.path / "job.log").rename(m.path / "job.txt")
    assert (m.path / "job.txt").read_bytes() == OLD
    assert is_immutable(m.path / "job.txt") != written


def rename_it(m: Mount, name: str) -> str:
    (m.path / name).rename(m.path / "other name")
    return "other name"


def unlink_it(m: Mount, name: str) -> str:
    (m.path / name).unlink()
    return "second"


def pin_it(m: Mount, name: str) -> str:
    cachefs("pin", m.path / name)
    return name


@pytest.mark.promise("EX-26")
@pytest.mark.parametrize("mode", [(), ("--no-fastpath",)], ids=["fastpath", "python"])
@pytest.mark.parametrize(
    ("name", "make_immutable"),
    [("it.log", rename_it), ("it.log", unlink_it), ("it", pin_it)],
    ids=["renamed", "unlinked", "pinned"],
)
def test_a_descriptor_that_is_open_when_a_file_becomes_immutable_shows_the_pinned_version(
    mount: MakeMount, tree: Path, name: str, make_immutable: Callable[[Mount, str], str], mode: tuple[str, ...]
) -> None:
    """Its READs fill the pages that all descriptors of the file share. Before: with a later version."""
    old, new = b"1" * 24_000_000, b"2" * 24_000_000
    m = mount(tree, *MUTABLE, *mode)

    def opened_before() -> tuple[int, str]:
        """A descriptor of before the file became immutable, and the file's name."""
        (m.path if make_immutable is pin_it else tree).joinpath(name).write_bytes(old)
        if make_immutable is unlink_it:
            (tree / "second").hardlink_to(tree / name)
            assert (m.path / "second").stat().st_nlink == 2
        settle()
        opened = os.open(m.path / name, os.O_RDONLY)
        assert os.pread(opened, 4096, 0) == old[:4096]
        found = make_immutable(m, name)
        with open(m.path / found, "rb") as another:
            assert os.pread(another.fileno(), 4096, 0) == old[:4096]
        expire()
        return opened, found

    opened, found = opened_before()
    (m.path / found).unlink()
    assert os.pread(opened, 4096, 10 << 20) == old[:4096]
    os.close(opened)
    opened, found = opened_before()
    (tree / found).write_bytes(new)
    raises_errno(errno.ESTALE, partial(os.pread, opened, 4096, 10 << 20))
    os.close(opened)


@pytest.mark.promise("EX-5")
@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize(
    ("name", "make_immutable"),
    [("it.log", rename_it), ("it.log", unlink_it), ("it", pin_it)],
    ids=["renamed", "unlinked", "pinned"],
)
def test_a_file_that_becomes_immutable_shows_none_of_the_pages_that_were_read_before(
    mount: MakeMount, tree: Path, name: str, make_immutable: Callable[[Mount, str], str], is_open: bool
) -> None:
    """They may be of a version that no time distinguishes from the present one. Before: they stayed."""
    old, new = b"1" * 400_000, b"2" * 400_000
    m = mount(tree, *MUTABLE)
    (m.path if make_immutable is pin_it else tree).joinpath(name).write_bytes(old)
    if make_immutable is unlink_it:
        (tree / "second").hardlink_to(tree / name)
        assert (m.path / "second").stat().st_nlink == 2
    opened = os.open(m.path / name, os.O_RDONLY)
    assert os.pread(opened, 4096, 0) == old[:4096]
    if not is_open:
        os.close(opened)
    rewrite(tree / name, new)
    settle()
    found = m.path / make_immutable(m, name)
    for _ in range(2):
        assert set(found.read_bytes()) == {ord("2")}
    if is_open:
        os.close(opened)


@pytest.mark.promise("EX-5")
@pytest.mark.parametrize(
    "mode",
    [(), ("--no-fastpath",), ("--read-only",), ("--read-only", "--no-fastpath")],
    ids=["fastpath", "python", "read-only", "read-only-python"],
)
@pytest.mark.parametrize("by", ["warm-up", "several opens"])
def test_a_file_that_becomes_immutable_by_no_single_open_shows_no_pages_that_were_read_before(
    mount: MakeMount, tree: Path, by: str, mode: tuple[str, ...]
) -> None:
    """Before: only the open that made it immutable dropped them. Later opens, which may be faster, kept them."""
    size = 4 << 20
    m = mount(tree, *MUTABLE, *mode, *(["--simulate-latency", "50"] if by == "several opens" else []))
    (tree / "it.log").write_bytes(b"1" * size)
    settle()
    opened = os.open(m.path / "it.log", os.O_RDONLY)
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_RANDOM)
    assert os.pread(opened, 4096, 0) == b"1" * 4096
    rewrite(tree / "it.log", b"2" * size)
    (tree / "it.log").rename(tree / "it")
    wait_for((m.path / "it").exists, bool)
    settle()
    if by == "warm-up":
        cachefs("warmup", m.path / "it")

    def contents() -> set[int]:
        with open(m.path / "it", "rb", buffering=0) as file:
            return {os.pread(file.fileno(), 4096, offset)[0] for offset in (0, 2 << 20)}

    with ThreadPoolExecutor(12) as pool:
        found = [future.result() for future in [pool.submit(contents) for _ in range(12) if not time.sleep(0.01)]]
    os.close(opened)
    assert found == [{ord("2")}] * 12


def rewrite(file: Path, content: bytes) -> None:
    """In place, with the size and the mtime of before."""
    before = file.stat()
    with open(file, "r+b") as rewritten:
        rewritten.write(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.promise("EX-5")
@pytest.mark.parametrize("mode", [(), ("--no-fastpath",)], ids=["fastpath", "python"])
@pytest.mark.parametrize("how", ["renamed", "unpinned"])
def test_a_file_that_was_immutable_before_shows_no_pages_of_that_time_or_of_its_mutable_time(
    mount: MakeMount, tree: Path, how: str, mode: tuple[str, ...]
) -> None:
    """Found by an attack: the pages of handles that were opened before it became mutable were not counted."""
    size = 4 << 20
    (tree / "it").write_bytes(b"1" * size)
    settle()
    m = mount(tree, *MUTABLE, *mode)
    opened = os.open(m.path / "it", os.O_RDONLY)
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_RANDOM)
    assert os.pread(opened, 1, 0) == b"1"
    if how == "renamed":
        (m.path / "it").rename(m.path / "it.log")
    else:
        cachefs("unpin", m.path / "it")
    assert os.pread(opened, 1, 4096) == b"1"
    rewrite(tree / ("it.log" if how == "renamed" else "it"), b"2" * size)
    settle()
    if how == "renamed":
        (m.path / "it.log").rename(m.path / "it")
        cachefs("warmup", m.path / "it")
    else:
        cachefs("pin", m.path / "it")
    with open(m.path / "it", "rb", buffering=0) as again:
        assert {os.pread(again.fileno(), 1, offset) for offset in (0, 4096, 2 << 20)} == {b"2"}
    os.close(opened)


@pytest.mark.fastpath
@pytest.mark.promise("EX-5")
def test_a_successor_of_the_daemon_knows_which_files_have_pages_of_their_mutable_time(
    mount: MakeMount, tree: Path
) -> None:
    """Found by an attack: only open handles were known after a kill."""
    size = 4 << 20
    (tree / "it.log").write_bytes(b"1" * size)
    settle()
    m = mount(tree, *MUTABLE)
    opened = os.open(m.path / "it.log", os.O_RDONLY)
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_RANDOM)
    assert os.pread(opened, 1, 0) == b"1"
    os.close(opened)
    m.kill()
    m.start(*MUTABLE)
    rewrite(tree / "it.log", b"2" * size)
    (m.path / "it.log").rename(m.path / "it")
    settle()
    cachefs("warmup", m.path / "it")
    with open(m.path / "it", "rb", buffering=0) as again:
        assert {os.pread(again.fileno(), 1, offset) for offset in (0, 2 << 20)} == {b"2"}


@pytest.mark.promise("EX-5")
def test_a_mutable_file_that_a_writer_has_open_gets_another_name(mount: MakeMount, tree: Path) -> None:
    m = mount(tree, *MUTABLE)
    with open(m.path / "job.log", "r+b", buffering=0) as writer:
        (m.path / "job.log").rename(m.path / "job.txt")
        assert (m.path / "job.txt").read_bytes() == OLD
        writer.write(NEW)
        assert (m.path / "job.txt").read_bytes() == NEW + OLD[len(NEW) :]


@pytest.mark.promise("EX-4")
@pytest.mark.parametrize("length", [100_000, 5 << 20], ids=["small", "large"])
def test_who_has_it_open_while_it_gets_a_mutable_name_reads_on(mount: MakeMount, tree: Path, length: int) -> None:
    content = os.urandom(length)
    (tree / "file").write_bytes(content)
    settle()
    m = mount(tree, *MUTABLE)
    with open(m.path / "file", "rb", buffering=0) as before:
        assert before.read(10_000) == content[:10_000]
        (m.path / "file").rename(m.path / "new.log")
        m.drop_caches()
        rest = b"".join(iter(lambda: before.read(1 << 16), b""))
        assert content[:10_000] + rest == content
        assert os.fstat(before.fileno()).st_size == length
        with open(m.path / "new.log", "ab") as writer:
            writer.write(b"more")
        assert before.read() == b"more"
        assert os.fstat(before.fileno()).st_size == length + 4


@pytest.mark.promise("EX-4")
def test_a_directory_that_gets_a_mutable_name(mount: MakeMount, tree: Path) -> None:
    m = mount(tree, *MUTABLE)
    assert (m.path / "out/deep/file").read_bytes() == OLD
    assert is_immutable(m.path / "out/deep/file")
    (m.path / "out").rename(m.path / "runs/1")
    rewrite_and_read(m.path / "runs/1/deep/file", tree / "runs/1/deep/file")
    # The directories are not pinned any more, either.
    (tree / "runs/1/deep").rename(tree / "runs/aside")
    (tree / "runs/1/deep").mkdir()
    (tree / "runs/1/deep/file").write_bytes(NEW)
    wait_for((m.path / "runs/1/deep/file").read_bytes, lambda content: content == NEW)
    (m.path / "runs/1").rename(m.path / "out")
    settle()
    assert (m.path / "out/deep/file").read_bytes() == NEW
    assert is_immutable(m.path / "out/deep/file")


@pytest.mark.promise("EX-4")
def test_two_names_that_are_exchanged(mount: MakeMount, tree: Path) -> None:
    from cachefs.system.syscalls import renameat2

    m = mount(tree, *MUTABLE)
    for name in ("file", "job.log"):
        assert (m.path / name).read_bytes() == OLD
    root = os.open(m.path, os.O_RDONLY)
    try:
        renameat2(root, b"file", root, b"job.log", 2)
    finally:
        os.close(root)
    assert (m.path / "file").read_bytes() == OLD
    assert is_immutable(m.path / "file")
    rewrite_and_read(m.path / "job.log", tree / "job.log")


# --- hard links ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("EX-3")
@LEVELS
def test_a_mutable_name_more_does_not_make_a_file_mutable(mount: MakeMount, tree: Path, cache: str) -> None:
    """A job may read it by the other name. When that is removed, the file is mutable."""
    m = mount(tree, *MUTABLE, "--cache", cache)
    assert (m.path / "file").read_bytes() == OLD
    os.link(m.path / "file", m.path / "new.log")
    for name in ("file", "new.log"):
        assert (m.path / name).read_bytes() == OLD
        assert is_immutable(m.path / name)
        assert state(m.path / name) == "immutable"
    (m.path / "file").unlink()
    rewrite_and_read(m.path / "new.log", tree / "new.log")


@pytest.mark.promise("EX-4")
def test_the_last_name_that_is_not_mutable_is_replaced(mount: MakeMount, tree: Path) -> None:
    m = mount(tree, *MUTABLE)
    assert (m.path / "file").read_bytes() == OLD
    os.link(m.path / "file", m.path / "new.log")
    (m.path / "other").rename(m.path / "file")
    rewrite_and_read(m.path / "new.log", tree / "new.log")


@pytest.mark.promise("EX-2")
@LEVELS
@pytest.mark.parametrize("here", [True, False], ids=["linked here", "linked before"])
def test_another_name_of_a_mutable_file_does_not_make_it_immutable(
    mount: MakeMount, tree: Path, cache: str, here: bool
) -> None:
    if not here:
        os.link(tree / "job.log", tree / "a-name")
        settle()
    m = mount(tree, *MUTABLE, "--cache", cache)
    assert (m.path / "job.log").read_bytes() == OLD
    if here:
        os.link(m.path / "job.log", m.path / "a-name")
    assert (m.path / "a-name").read_bytes() == OLD
    rewrite_and_read(m.path / "job.log", tree / "job.log")
    assert (m.path / "a-name").read_bytes() == OLD
    assert m.flush()["cached_files"] == 0


@pytest.mark.promise("EX-6")
@pytest.mark.parametrize("kind", ["read-write", "read-only"])
def test_a_mutable_name_of_an_immutable_file_is_not_pinned(mount: MakeMount, tree: Path, kind: str) -> None:
    """The mutable name shows changes by other nodes; the other name keeps what was read."""
    os.link(tree / "file", tree / "runs/file")
    settle()
    m = mount(tree, *MUTABLE, *(["--read-only"] if kind == "read-only" else []))
    assert (m.path / "file").read_bytes() == OLD
    assert (m.path / "runs/file").read_bytes() == OLD
    assert "file" in os.listdir(m.path / "runs")
    (tree / "other").write_bytes(NEW)
    (tree / "other").rename(tree / "runs/file")
    wait_for((m.path / "runs/file").read_bytes, lambda content: content == NEW)
    assert (m.path / "file").read_bytes() == OLD


# --- another --mutable -----------------------------------------------------------------------------------------------


@pytest.mark.promise("EX-7")
@pytest.mark.parametrize("revalidate", ["lazy", "never"])
def test_what_was_immutable_is_mutable_for_a_mount_that_says_so(mount: MakeMount, tree: Path, revalidate: str) -> None:
    m = mount(tree, "--revalidate", revalidate)
    assert (m.path / "job.log").read_bytes() == OLD
    assert (m.path / "file").read_bytes() == OLD
    assert is_immutable(m.path / "job.log")
    m.flush()
    m.remount("--revalidate", revalidate, *MUTABLE)
    assert (m.path / "file").read_bytes() == OLD
    assert is_immutable(m.path / "file")
    rewrite_and_read(m.path / "job.log", tree / "job.log")


@pytest.mark.promise("EX-7")
def test_what_gets_a_mutable_name_is_mutable_after_a_restart(mount: MakeMount, tree: Path) -> None:
    m = mount(tree, *MUTABLE)
    assert (m.path / "file").read_bytes() == OLD
    assert (m.path / "out/deep/file").read_bytes() == OLD
    m.flush()
    (m.path / "file").rename(m.path / "new.log")
    (tree / "out").rename(tree / "runs/1")  # by another node: this mount keeps what it has pinned
    m.remount(*MUTABLE)
    rewrite_and_read(m.path / "new.log", tree / "new.log")
    rewrite_and_read(m.path / "runs/1/deep/file", tree / "runs/1/deep/file")


@pytest.mark.promise("CL-3")
def test_cache_none_has_no_immutable_files_under_any_name(mount: MakeMount, tree: Path) -> None:
    m = mount(tree, *MUTABLE, "--cache", "none")
    assert (m.path / "file").read_bytes() == OLD
    (m.path / "file").rename(m.path / "new.log")
    rewrite_and_read(m.path / "new.log", tree / "new.log")
    (m.path / "new.log").rename(m.path / "file")
    rewrite_and_read(m.path / "file", tree / "file")


@pytest.mark.promise("EX-7", "PE-29")
def test_another_node_moves_a_directory_and_its_files_are_compared(mount: MakeMount, tree: Path) -> None:
    m = mount(tree, *MUTABLE)
    assert (m.path / "out/deep/file").read_bytes() == OLD
    (tree / "out").rename(tree / "runs/1")
    assert wait_for((m.path / "runs/1/deep/file").exists, bool)
    rewrite_and_read(m.path / "runs/1/deep/file", tree / "runs/1/deep/file")


# --- names that are not there yet, on a read-only mount -------------------------------------------------------------


@pytest.mark.promise("PI-5")
@pytest.mark.parametrize("known", ["listed", "looked up", "both"])
@pytest.mark.parametrize("directory", ["", "out", "out/deep"])
def test_a_mutable_name_that_another_node_makes_shows_up(
    mount: MakeMount, tree: Path, known: str, directory: str
) -> None:
    m = mount(tree, "--read-only", *MUTABLE)
    new = m.path / directory / "new.log"
    if known != "looked up":
        assert "new.log" not in os.listdir(m.path / directory)
    if known != "listed":
        assert not new.exists()
    (tree / directory / "new.log").write_bytes(NEW)
    assert wait_for(new.exists, bool)
    assert new.read_bytes() == NEW
    assert "new.log" in wait_for(lambda: os.listdir(m.path / directory), lambda names: "new.log" in names)
    (tree / directory / "new.log").unlink()
    assert not wait_for(new.exists, lambda exists: not exists)
    wait_for(lambda: os.listdir(m.path / directory), lambda names: "new.log" not in names)
    (tree / directory / "new.log").mkdir()
    assert wait_for(new.is_dir, bool)


@pytest.mark.promise("PI-5")
def test_what_another_node_makes_in_a_mutable_directory_shows_up(mount: MakeMount, tree: Path) -> None:
    m = mount(tree, "--read-only", *MUTABLE)
    assert os.listdir(m.path / "runs") == []
    (tree / "runs/1").mkdir()
    wait_for(lambda: os.listdir(m.path / "runs"), lambda names: names == ["1"])
    assert os.listdir(m.path / "runs/1") == []
    (tree / "runs/1/state").write_bytes(NEW)
    wait_for(lambda: os.listdir(m.path / "runs/1"), lambda names: names == ["state"])


@pytest.mark.promise("PI-6")
def test_where_no_name_can_match_listings_and_absences_are_pinned(mount: MakeMount, tree: Path) -> None:
    m = mount(tree, "--read-only", "--mutable", "runs/**", "--mutable", "out/*.log")
    for _ in range(2):
        assert os.listdir(m.path / "out/deep") == ["file"]
        assert not (m.path / "out/deep/new.log").exists()
        (tree / "out/deep/new.log").write_bytes(NEW)
        expire()


@pytest.mark.parametrize("revalidate", ["lazy", "never"])
@pytest.mark.parametrize("known", ["listed", "looked up"])
def test_a_name_that_was_pinned_as_missing_is_mutable_for_a_mount_that_says_so(
    mount: MakeMount, tree: Path, revalidate: str, known: str
) -> None:
    m = mount(tree, "--read-only", "--revalidate", revalidate)
    if known == "listed":
        assert "new.log" not in os.listdir(m.path / "out")
    assert not (m.path / "out/new.log").exists()
    m.flush()
    for _ in range(2):
        m.remount("--read-only", "--revalidate", revalidate, *MUTABLE)
        assert not (m.path / "out/new.log").exists()
        (tree / "out/new.log").write_bytes(NEW)
        assert wait_for((m.path / "out/new.log").exists, bool)
        wait_for(lambda: os.listdir(m.path / "out"), lambda names: "new.log" in names)
        (tree / "out/new.log").unlink()
        assert not wait_for((m.path / "out/new.log").exists, lambda exists: not exists)


@pytest.mark.promise("EX-2")
@pytest.mark.parametrize("mode", [["--read-only"], [], ["--read-only", "--no-fastpath"]], ids="-".join)
def test_one_name_that_matches_keeps_a_file_mutable_under_all(mount: MakeMount, source: Path, mode: list[str]) -> None:
    (source / "job.log").write_bytes(b"old")
    os.link(source / "job.log", source / "a-name")
    settle()
    m = mount(source, "--mutable", "*.log", *mode)
    for name in ("job.log", "a-name"):
        (m.path / name).stat()
    assert (m.path / "a-name").read_bytes() == b"old"
    assert m.flush()["cached_files"] == 0
    (source / "job.log").write_bytes(b"the new one")
    for name in ("a-name", "job.log"):
        wait_for((m.path / name).read_bytes, lambda content: content == b"the new one")


@pytest.mark.promise("PI-6")
@pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
def test_a_directory_that_was_missing_stays_missing_whatever_would_match_in_it(
    mount: MakeMount, source: Path, mode: list[str]
) -> None:
    globs = ["--mutable", "runs/*.log", "--mutable", "absent/**/*.log", "--mutable", "*.tmp"]
    m = mount(source, "--read-only", *globs, *mode)
    for name in ("runs", "absent"):
        assert not (m.path / name).exists()
        (source / name).mkdir()
        (source / name / "a.log").write_bytes(b"x")
    expire()
    m.drop_caches()
    assert not (m.path / "runs").exists() and not (m.path / "absent/a.log").exists()
