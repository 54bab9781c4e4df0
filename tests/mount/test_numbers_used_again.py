"""A FUSE source without birth times that gives the inode number of a removed directory to the next one."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bindfs import Bindfs
from tests.conftest import Mount, expire, settle

ENOUGH = 200
MODES = {
    "read-only": ("--read-only",),
    "read-write": (),
    "no-fastpath": ("--no-fastpath",),
    "changing": ("--profile", "changing"),
}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Bindfs]:
    (tmp_path / "root").mkdir()
    made = Bindfs(tmp_path / "root", tmp_path / "source")
    yield made
    made.close()


def make_with_number(path: Path, number: int) -> None:
    """Make a directory that has this inode number: ext4 gives a free number to one of the next directories."""
    for at in range(ENOUGH):
        made = path.with_name(f"spare{at}")
        made.mkdir()
        if made.stat().st_ino == number:
            made.rename(path)
            return
    pytest.skip("the filesystem of the tests does not use inode numbers again at once")


@pytest.mark.promise("CH-40")
@pytest.mark.promise("CH-2")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_directory_with_the_number_of_a_removed_one_shows_its_own_names(
    mount: Callable[..., Mount], source: Bindfs, mode: tuple[str, ...]
) -> None:
    """Before: the descriptor of the removed directory was kept, and no name in the new one was ever found."""
    directory = source.path / "directory"
    directory.mkdir()
    (directory / "first").write_bytes(b"first")
    settle()
    m = mount(source.path, *mode)
    assert (m.path / "directory" / "first").stat().st_size == len(b"first")
    number = os.stat(directory).st_ino
    (directory / "first").unlink()
    directory.rmdir()
    make_with_number(directory, number)
    (directory / "second").write_bytes(b"the second")
    expire()
    assert (m.path / "directory" / "second").read_bytes() == b"the second"
    assert os.listdir(m.path / "directory") == ["second"]
