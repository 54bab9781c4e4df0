"""Another node adds to a pinned directory: what the listing shows, and what stat shows, belong together."""

import os
import time
from collections.abc import Callable
from importlib.machinery import FileFinder, SourceFileLoader
from pathlib import Path

import pytest

from tests.conftest import Mount, expire, settle

MakeMount = Callable[..., Mount]
BOTH_WAYS = pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])


def attributes(path: Path | int) -> tuple[int, int, int]:
    now = os.stat(path)
    return now.st_mtime_ns, now.st_nlink, now.st_size


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A source with a directory of one file."""
    source = tmp_path / "tree"
    (source / "package").mkdir(parents=True)
    (source / "package/first.py").write_text("FIRST = 1\n")
    settle()
    return source


def pinned(mount: MakeMount, source: Path, *arguments: str) -> Mount:
    """A mount on which the directory is pinned, listed, and known to the kernel with its attributes."""
    m = mount(source, *arguments)
    assert os.listdir(m.path / "package") == ["first.py"]
    assert (m.path / "package/first.py").read_text() == "FIRST = 1\n"
    expire()
    assert attributes(m.path / "package") == attributes(source / "package")
    return m


def add(source: Path) -> None:
    """As another node does."""
    (source / "package/second.py").write_text("SECOND = 2\n")
    (source / "package/beneath").mkdir()


NAMES = ["beneath", "first.py", "second.py"]


@pytest.mark.promise("EX-24")
@BOTH_WAYS
@pytest.mark.parametrize("first", ["list", "stat", "read"])
def test_new_listing_comes_with_new_attributes(mount: MakeMount, package: Path, first: str, mode: list[str]) -> None:
    m = pinned(mount, package, *mode)
    add(package)
    expire()
    if first == "stat":
        os.stat(m.path / "package")
    elif first == "read":
        assert (m.path / "package/first.py").read_text() == "FIRST = 1\n"
    assert sorted(os.listdir(m.path / "package")) == NAMES
    assert attributes(m.path / "package") == attributes(package / "package")
    expire()
    assert attributes(m.path / "package") == attributes(package / "package")


@pytest.mark.promise("EX-24")
@BOTH_WAYS
def test_open_directory_has_new_attributes_when_it_is_read_again(
    mount: MakeMount, package: Path, mode: list[str]
) -> None:
    m = pinned(mount, package, *mode)
    fd = os.open(m.path / "package", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert os.listdir(fd) == ["first.py"]
        before = attributes(fd)
        add(package)
        expire()
        assert sorted(os.listdir(fd)) == NAMES
        assert attributes(fd) == attributes(package / "package") != before
    finally:
        os.close(fd)


@pytest.mark.promise("EX-24")
@BOTH_WAYS
def test_listing_without_a_removed_name_comes_with_new_attributes(
    mount: MakeMount, package: Path, mode: list[str]
) -> None:
    """No name is new, so nothing else in the directory is compared."""
    add(package)
    settle()
    m = mount(package, *mode)
    assert (m.path / "package/first.py").read_text() == "FIRST = 1\n"
    assert sorted(os.listdir(m.path / "package")) == NAMES
    expire()
    before = attributes(m.path / "package")
    (package / "package/beneath").rmdir()
    expire()
    assert sorted(os.listdir(m.path / "package")) == ["first.py", "second.py"]
    assert attributes(m.path / "package") == attributes(package / "package") != before


@pytest.mark.promise("EX-24")
@BOTH_WAYS
def test_root_of_the_mount_has_new_attributes_too(mount: MakeMount, package: Path, mode: list[str]) -> None:
    m = pinned(mount, package, *mode)
    (package / "new").mkdir()
    expire()
    assert sorted(os.listdir(m.path)) == ["new", "package"]
    assert attributes(m.path) == attributes(package)


@pytest.mark.promise("EX-24")
@BOTH_WAYS
def test_new_attributes_come_with_a_new_listing(mount: MakeMount, package: Path, mode: list[str]) -> None:
    """importlib and others list a directory only if its mtime has moved: a listing of before must not be shown then."""
    m = pinned(mount, package, "--attr-timeout", "60", *mode)
    assert os.listdir(m.path / "package") == ["first.py"]
    time.sleep(0.05)  # a tick of the clock that sets mtime
    add(package)
    assert (m.path / "package/second.py").read_text() == "SECOND = 2\n"  # looked up: the directory was compared
    assert attributes(m.path / "package") == attributes(package / "package")
    assert sorted(os.listdir(m.path / "package")) == NAMES


@pytest.mark.promise("EX-24")
@BOTH_WAYS
def test_python_finds_a_module_that_another_node_has_added(mount: MakeMount, package: Path, mode: list[str]) -> None:
    m = pinned(mount, package, *mode)
    finder = FileFinder(str(m.path / "package"), (SourceFileLoader, [".py"]))
    assert finder.find_spec("first") is not None
    assert finder.find_spec("second") is None
    add(package)
    expire()
    assert sorted(os.listdir(m.path / "package")) == NAMES  # any process
    assert finder.find_spec("second") is not None


@pytest.mark.promise("EX-24")
@BOTH_WAYS
def test_python_finds_an_added_module_once_it_has_dropped_its_caches(
    mount: MakeMount, package: Path, mode: list[str]
) -> None:
    m = pinned(mount, package, *mode)
    finder = FileFinder(str(m.path / "package"), (SourceFileLoader, [".py"]))
    assert finder.find_spec("first") is not None
    add(package)
    expire()
    finder.invalidate_caches()
    assert finder.find_spec("second") is not None


@pytest.mark.promise("EX-24")
@BOTH_WAYS
def test_attributes_after_own_and_other_changes(mount: MakeMount, package: Path, mode: list[str]) -> None:
    m = pinned(mount, package, *mode)
    add(package)
    expire()
    assert sorted(os.listdir(m.path / "package")) == NAMES
    (m.path / "package/third").mkdir()
    assert attributes(m.path / "package") == attributes(package / "package")
    (package / "package/fourth").mkdir()
    expire()
    assert sorted(os.listdir(m.path / "package")) == sorted([*NAMES, "third", "fourth"])
    assert attributes(m.path / "package") == attributes(package / "package")


@pytest.mark.promise("EX-24")
@BOTH_WAYS
def test_directory_that_nothing_pins_has_new_attributes_with_its_listing(
    mount: MakeMount, package: Path, mode: list[str]
) -> None:
    m = mount(package, *mode)
    os.stat(m.path / "package")
    add(package)
    expire()
    assert sorted(os.listdir(m.path / "package")) == NAMES
    assert attributes(m.path / "package") == attributes(package / "package")


@pytest.mark.promise("EX-24")
@BOTH_WAYS
def test_kept_attributes_survive_a_restart(mount: MakeMount, package: Path, mode: list[str]) -> None:
    m = pinned(mount, package, *mode)
    add(package)
    expire()
    assert sorted(os.listdir(m.path / "package")) == NAMES
    m.remount(*mode)
    assert attributes(m.path / "package") == attributes(package / "package")
    assert sorted(os.listdir(m.path / "package")) == NAMES


@pytest.mark.promise("EX-25")
@BOTH_WAYS
def test_read_only_mount_keeps_old_attributes_with_the_old_listing(
    mount: MakeMount, package: Path, mode: list[str]
) -> None:
    m = mount(package, "--read-only", *mode)
    assert os.listdir(m.path / "package") == ["first.py"]
    before = attributes(m.path / "package")
    add(package)
    expire()
    assert os.listdir(m.path / "package") == ["first.py"]
    assert attributes(m.path / "package") == before


@pytest.mark.promise("EX-25")
@BOTH_WAYS
def test_read_only_mount_that_lists_again_has_new_attributes(mount: MakeMount, package: Path, mode: list[str]) -> None:
    """A name that --mutable matches may appear, so that the listing is not pinned."""
    m = mount(package, "--read-only", "--mutable", "*.log", *mode)
    assert os.listdir(m.path / "package") == ["first.py"]
    (package / "package/job.log").write_text("started\n")
    (package / "package/beneath").mkdir()
    expire()
    assert sorted(os.listdir(m.path / "package")) == ["beneath", "first.py", "job.log"]
    assert attributes(m.path / "package") == attributes(package / "package")


@pytest.mark.promise("EX-25")
@BOTH_WAYS
@pytest.mark.parametrize("first", ["package", "package/first.py", "package/missing"])
def test_read_only_mount_has_the_attributes_of_its_first_listing(
    mount: MakeMount, package: Path, first: str, mode: list[str]
) -> None:
    """They were pinned before, by a look-up."""
    m = mount(package, "--read-only", *mode)
    assert (m.path / first).exists() == (first != "package/missing")
    before = attributes(m.path / "package")
    add(package)
    expire()
    assert sorted(os.listdir(m.path / "package")) == NAMES
    assert attributes(m.path / "package") == attributes(package / "package") != before
    m.drop_caches()
    m.remount("--read-only", *mode)
    assert attributes(m.path / "package") == attributes(package / "package")
