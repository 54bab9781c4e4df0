"""Numbers are never used twice, seen through a mount (hazard 26): lost indexes and imported snapshots."""

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, contents, settle

pytestmark = pytest.mark.promise("CH-22")

MakeMount = Callable[..., Mount]
FILES = 40


def make_tree(root: Path) -> list[str]:
    root.mkdir()
    names = [f"f{number:03}" for number in range(FILES)]
    for name in names:
        (root / name).write_bytes(os.urandom(300))
    settle()
    return names


def rewrite(root: Path, names: list[str]) -> None:
    """In place, at equal size."""
    for name in names:
        (root / name).write_bytes(os.urandom(300))


def numbers_are_unique(mountpoint: Path) -> bool:
    found = [entry.stat().st_ino for entry in os.scandir(mountpoint)]
    return len(set(found)) == len(found)


def change_while_known(m: Mount, root: Path, names: list[str]) -> None:
    """Change files that the mount has pinned and the kernel knows: they get other numbers there."""
    held = [os.open(m.path / name, os.O_PATH) for name in names]  # or the kernel may forget them
    rewrite(root, names)
    settle()
    for name in names:
        with contextlib.suppress(OSError):  # ESTALE, once
            (m.path / name).read_bytes()
        assert (m.path / name).read_bytes() == (root / name).read_bytes()
    for fd in held:
        os.close(fd)


def test_a_lost_index_serves_no_file_the_bytes_of_another(mount: MakeMount, tmp_path: Path) -> None:
    root = tmp_path / "tree"
    names = make_tree(root)
    m = mount(root, "--read-only")
    change_while_known(m, root, names[:20])
    assert contents(m.path) == contents(root)
    for seed in range(2):
        run = m.flush()["run"]
        m.umount()
        shutil.rmtree(m.cache / "index")
        rewrite(root, names[20:])
        settle()
        m.start()
        assert m.status()["run"] > run
        order = list(names)
        random.Random(seed).shuffle(order)
        for name in order:
            assert (m.path / name).read_bytes() == (root / name).read_bytes(), name
        assert numbers_are_unique(m.path)


def test_a_lost_index_keeps_the_data_of_files_with_numbers_of_ours(mount: MakeMount, tmp_path: Path) -> None:
    """Their aliases are rebuilt from the blob: nothing is fetched again."""
    root = tmp_path / "tree"
    names = make_tree(root)
    m = mount(root, "--read-only")
    change_while_known(m, root, names[:20])
    numbers = {name: os.stat(m.path / name).st_ino for name in names[:20]}
    assert not set(numbers.values()) & {os.stat(root / name).st_ino for name in names}
    m.flush()
    m.umount()
    shutil.rmtree(m.cache / "index")
    m.start()
    for name in names[:20]:
        assert (m.path / name).read_bytes() == (root / name).read_bytes()
        assert os.stat(m.path / name).st_ino == numbers[name]
    assert "open" not in m.ops()


def test_numbers_of_a_snapshot_are_not_given_out_again(mount: MakeMount, tmp_path: Path) -> None:
    root = tmp_path / "tree"
    names = make_tree(root)
    first = mount(root, "--read-only", name="first")
    change_while_known(first, root, names[:20])
    os.listdir(first.path)
    cachefs("snapshot", "export", first.path, tmp_path / "snapshot")
    m = mount(root, "--read-only", "--metadata-snapshot", tmp_path / "snapshot")
    os.listdir(m.path)
    change_while_known(m, root, names[20:40])
    assert contents(m.path) == contents(root)
    assert numbers_are_unique(m.path)
    m.umount()
    m.start("--revalidate", "never")
    assert contents(m.path) == contents(root)
    assert numbers_are_unique(m.path)
