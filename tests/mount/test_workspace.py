"""`--profile workspace --immutable GLOB`: a dataset and the results of jobs on one mount. Files that grow."""

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, expire, raises_errno, settle, wait_for

MakeMount = Callable[..., Mount]
OPENED_MUTABLE = [
    ("--mutable", "**"),
    ("--mutable", "**", "--no-fastpath"),
    ("--profile", "changing"),
    ("--cache", "none"),
]
WORKSPACE = ("--profile", "workspace", "--immutable", "data/**")


@pytest.fixture
def tree(source: Path) -> Path:
    for name in ("data/train", "data/val", "runs"):
        (source / name).mkdir(parents=True)
    for name in ("data/train/a", "data/val/b", "runs/checkpoint", "script.py"):
        (source / name).write_bytes(name.encode() * 1000)
    settle()
    return source


def state(path: Path) -> str:
    return os.getxattr(path, "user.cachefs.state").decode()


@pytest.mark.promise("EX-14")
def test_only_what_matches_is_immutable(mount: MakeMount, tree: Path) -> None:
    m = mount(tree, *WORKSPACE)
    for name in ("data/train/a", "data/val/b"):
        assert (m.path / name).read_bytes() == name.encode() * 1000
        raises_errno(errno.EPERM, lambda name=name: (m.path / name).write_bytes(b"new"))
        assert state(m.path / name) == "immutable"
    for name in ("runs/checkpoint", "script.py"):
        for content in (b"one", b"the second"):
            (m.path / name).read_bytes()
            (m.path / name).write_bytes(content)
            assert (m.path / name).read_bytes() == (tree / name).read_bytes() == content
        (tree / name).write_bytes(b"of another node")
        wait_for((m.path / name).read_bytes, lambda content: content == b"of another node")
    assert m.flush()["cached_files"] == 2
    (m.path / "runs/other").mkdir()
    assert "--immutable does not match its path" in cachefs("info", m.path / "runs/other").stdout


@pytest.mark.promise("EX-14")
def test_a_second_epoch_does_not_ask_the_source(mount: MakeMount, tree: Path) -> None:
    """The directories that lead to the dataset are pinned as well."""
    m = mount(tree, *WORKSPACE)
    (m.path / "data/train/a").read_bytes()
    m.flush()
    for _ in range(2):  # the first one compares directories that changed lately once more
        settle()
        m.drop_caches()
        before = m.ops()
        assert (m.path / "data/train/a").read_bytes() == b"data/train/a" * 1000
    assert m.ops() == before


@pytest.mark.promise("EX-14")
def test_mutable_has_precedence(mount: MakeMount, tree: Path) -> None:
    m = mount(tree, "--immutable", "data/**", "--mutable", "data/val/**")
    (m.path / "data/val/b").read_bytes()
    (m.path / "data/val/b").write_bytes(b"new")
    assert (m.path / "data/val/b").read_bytes() == b"new"
    (m.path / "data/train/a").read_bytes()
    raises_errno(errno.EPERM, lambda: (m.path / "data/train/a").write_bytes(b"new"))


@pytest.mark.promise("EX-14")
@pytest.mark.parametrize("how", [pytest.param("take-over", marks=pytest.mark.fastpath), "remount"])
def test_it_holds_for_the_next_daemon(mount: MakeMount, tree: Path, how: str) -> None:
    m = mount(tree, *WORKSPACE)
    if how == "take-over":
        cachefs("restart", m.path)
        m.pid = m.status()["pid"]
    else:
        m.remount(*WORKSPACE)
    (m.path / "script.py").read_bytes()
    (m.path / "script.py").write_bytes(b"new")
    (m.path / "data/train/a").read_bytes()
    raises_errno(errno.EPERM, lambda: (m.path / "data/train/a").write_bytes(b"new"))


@pytest.mark.promise("EX-14")
def test_what_an_earlier_mount_made_immutable_is_mutable_where_nothing_matches(mount: MakeMount, tree: Path) -> None:
    m = mount(tree)
    (m.path / "script.py").read_bytes()
    raises_errno(errno.EPERM, lambda: (m.path / "script.py").write_bytes(b"new"))
    m.flush()
    m.remount(*WORKSPACE)
    (m.path / "script.py").write_bytes(b"new")
    assert (m.path / "script.py").read_bytes() == (tree / "script.py").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--profile", "workspace"], "--profile workspace needs --immutable GLOB"),
        (["--immutable", "../x"], "--immutable: '../x' can match nothing"),
    ],
)
def test_bad_options_are_one_line(tmp_path: Path, arguments: list[str], says: str) -> None:
    done = cachefs("mount", tmp_path, tmp_path, *arguments, check=False)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
    assert not os.path.ismount(tmp_path)


# --- files that grow -------------------------------------------------------------------------------------------------


@pytest.mark.promise("EX-15")
@pytest.mark.parametrize(
    "arguments",
    [["--mutable", "*.log"], ["--profile", "changing"], [*WORKSPACE], ["--read-only", "--mutable", "*.log"]],
    ids=["mutable", "changing", "workspace", "read-only, mutable"],
)
def test_tail_shows_what_another_node_appends(mount: MakeMount, tree: Path, arguments: list[str]) -> None:
    (tree / "train.log").write_text("epoch 0\n")
    m = mount(tree, *arguments)
    with open(m.path / "train.log", "rb", buffering=0) as log:  # stays open, as `tail -f` keeps it
        assert log.read() == b"epoch 0\n"
        for epoch in range(1, 4):
            with open(tree / "train.log", "a") as appended:
                appended.write(f"epoch {epoch}\n")
            wait_for(lambda: os.fstat(log.fileno()).st_size, lambda size, epoch=epoch: size == 8 * (epoch + 1))
            assert log.read() == b"epoch %d\n" % epoch


@pytest.mark.promise("EX-15")
@pytest.mark.parametrize("mode", OPENED_MUTABLE, ids=" ".join)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR], ids=["read", "read-write"])
def test_a_read_and_a_seek_to_the_end_know_the_present_size(
    mount: MakeMount, tree: Path, mode: tuple[str, ...], flags: int
) -> None:
    """They ask the kernel for no attributes but the size. Before: it ignored the answer, because the same comparison
    had made it drop the attributes. The first read after a change ended at the former end of the file."""
    m = mount(tree, *mode)
    names = ("not read", "read")
    for name in names:
        (tree / name).write_bytes(b"short")
    opened = {name: os.open(m.path / name, flags) for name in names}
    assert os.pread(opened["read"], 10, 0) == b"short"
    for name in names:
        with open(tree / name, "r+b") as other:
            other.write(b"much longer")
    expire()
    assert [os.pread(fd, 100, 0) for fd in opened.values()] == [b"much longer"] * 2
    for name in names:
        os.truncate(tree / name, 4)
    expire()
    assert [os.lseek(fd, 0, os.SEEK_END) for fd in opened.values()] == [4, 4]
    assert [os.pread(fd, 100, 0) for fd in opened.values()] == [b"much"] * 2
    for fd in opened.values():
        os.close(fd)


SETATTRS = {
    "chmod": lambda fd: os.fchmod(fd, 0o600),
    "chown": lambda fd: os.fchown(fd, 7, 7),
    "utimens": lambda fd: os.utime(fd, (5, 5)),
    "truncate": lambda fd: os.ftruncate(fd, 5),
}


@pytest.mark.promise("EX-15")
@pytest.mark.parametrize("mode", OPENED_MUTABLE, ids=" ".join)
@pytest.mark.parametrize("change", SETATTRS)
def test_an_open_file_shows_what_another_node_wrote_before_a_change_of_its_attributes(
    mount: MakeMount, tree: Path, mode: tuple[str, ...], change: str
) -> None:
    """The kernel takes over the times in the answer to the change. Before: it kept its pages by them for good."""
    (tree / "file").write_bytes(b"first")
    settle()
    m = mount(tree, *mode)
    with open(m.path / "file", "r+b") as opened, mmap.mmap(opened.fileno(), 5, prot=mmap.PROT_READ) as mapped:
        assert mapped[:] == os.pread(opened.fileno(), 5, 0) == b"first"
        expire()
        with open(tree / "file", "r+b") as other:
            other.write(b"later")
        SETATTRS[change](opened.fileno())
        wait_for(lambda: mapped[:], lambda found: found == b"later", 5)
        assert os.pread(opened.fileno(), 5, 0) == b"later"


@pytest.mark.promise("EX-15")
@pytest.mark.parametrize("mode", [["--read-only"], []], ids=["read-only", "read-write"])
def test_an_immutable_file_does_not_grow(mount: MakeMount, tree: Path, mode: list[str]) -> None:
    (tree / "train.log").write_text("epoch 0\n")
    settle()
    m = mount(tree, *mode)
    assert (m.path / "train.log").read_bytes() == b"epoch 0\n"
    m.flush()
    with open(tree / "train.log", "a") as appended:
        appended.write("epoch 1\n")
    settle()
    assert (m.path / "train.log").read_bytes() == b"epoch 0\n"
    cachefs("invalidate", m.path / "train.log")
    assert (m.path / "train.log").read_bytes() == b"epoch 0\nepoch 1\n"
