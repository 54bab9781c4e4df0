"""A directory of the source that has a name and no links: a removed directory that a bind mount shows."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Mount, expire

MODES = {"read-only": ("--read-only",), "read-write": (), "no-fastpath": ("--no-fastpath",)}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    root, removed = tmp_path / "source", tmp_path / "removed"
    (root / "place").mkdir(parents=True)
    removed.mkdir()
    subprocess.run(["mount", "--bind", removed, root / "place"], check=True)
    removed.rmdir()
    yield root
    subprocess.run(["umount", "-l", root / "place"], check=True)


@pytest.mark.promise("CH-42")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_directory_without_links_is_listed_and_looked_up_in(
    mount: Callable[..., Mount], source: Path, mode: tuple[str, ...]
) -> None:
    """Before: each call failed with ESTALE, for as long as cachefs was mounted."""
    place = mount(source, *mode).path / "place"
    assert os.listdir(place) == []
    assert not (place / "missing").exists()
    expire()
    assert os.listdir(place) == []
    with pytest.raises(FileNotFoundError):
        os.stat(place / "missing")
