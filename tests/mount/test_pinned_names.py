"""Which names are pinned when a file is opened for the first time: those that are valid then, and no others."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, settle, wait_for

pytestmark = pytest.mark.promise("IM-3")

MakeMount = Callable[..., Mount]
OLD, NEW = b"old " * 5000, b"the new one " * 500
TIMEOUT_S = 0.3


@pytest.fixture
def tree(source: Path) -> Path:
    """A file with three names: while it has more than one, each of them is one that may have remained."""
    (source / "a/b").mkdir(parents=True)
    (source / "a/b/file").write_bytes(OLD)
    (source / "x").write_bytes(OLD)
    os.link(source / "x", source / "y")
    os.link(source / "x", source / "z")
    (source / "other").write_bytes(NEW)
    settle()
    return source


def expire() -> None:
    """Wait until earlier look-ups have expired: the time that the promise is about."""
    time.sleep(TIMEOUT_S + 0.1)


def replaced(tree: Path) -> None:
    (tree / "other").rename(tree / "x")


def removed(tree: Path) -> None:
    (tree / "x").unlink()


def read_or_none(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def opened(path: Path) -> None:
    assert path.read_bytes() == OLD


def pinned(path: Path) -> None:
    cachefs("pin", path)


def warmed_up(path: Path) -> None:
    cachefs("warmup", path)


@pytest.mark.parametrize(
    ("become_immutable", "cache"),
    [(opened, "metadata"), (opened, "full"), (pinned, "metadata"), (pinned, "full"), (warmed_up, "full")],
)
@pytest.mark.parametrize("change", [replaced, removed])
def test_a_name_that_has_expired_is_not_pinned_with_another(
    mount: MakeMount,
    tree: Path,
    become_immutable: Callable[[Path], None],
    cache: str,
    change: Callable[[Path], None],
) -> None:
    m = mount(tree, "--attr-timeout", TIMEOUT_S, "--cache", cache)
    (m.path / "x").stat()
    expire()
    change(tree)
    become_immutable(m.path / "y")
    assert read_or_none(m.path / "x") == (NEW if change is replaced else None)
    assert (m.path / "y").read_bytes() == OLD


def test_a_name_that_is_believed_is_pinned_with_another(mount: MakeMount, tree: Path) -> None:
    """Each name costs one look at the source, in the first epoch."""
    m = mount(tree, "--attr-timeout", 20)
    for name in ("x", "y", "z"):
        (m.path / name).stat()
    assert (m.path / "y").read_bytes() == OLD
    wait_for(lambda: os.getxattr(m.path / "y", "user.cachefs.state"), lambda state: state == b"immutable")
    before = m.ops()
    m.drop_caches()
    for name in ("x", "y", "z"):
        assert (m.path / name).read_bytes() == OLD
    after = m.ops()
    assert after["lstat"] == before["lstat"]


@contextmanager
def opened_before_its_names_expire(directory: Path) -> Iterator[int]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        expire()
        yield fd
    finally:
        os.close(fd)


def read_in(directory_fd: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY, dir_fd=directory_fd)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


def test_a_directory_that_has_expired_is_not_pinned_by_its_name(mount: MakeMount, tree: Path) -> None:
    """A process works in the directory, or has it open: what it opens there proves nothing for the names above."""
    m = mount(tree, "--attr-timeout", TIMEOUT_S)
    with opened_before_its_names_expire(m.path / "a/b") as inside:
        (tree / "a").rename(tree / "c")
        (tree / "a/b").mkdir(parents=True)
        (tree / "a/b/file").write_bytes(NEW)
        assert read_in(inside, "file") == OLD
    assert (m.path / "a/b/file").read_bytes() == NEW
    assert (m.path / "c/b/file").read_bytes() == OLD


def test_an_expired_directory_above_costs_nothing_in_the_second_epoch(mount: MakeMount, tree: Path) -> None:
    m = mount(tree, "--attr-timeout", TIMEOUT_S)
    with opened_before_its_names_expire(m.path / "a/b") as inside:
        assert read_in(inside, "file") == OLD
    (m.path / "a/b/file").read_bytes()
    expire()
    before = m.ops()
    assert (m.path / "a/b/file").read_bytes() == OLD
    assert m.ops() == before
