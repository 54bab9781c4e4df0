"""What the machine has found: named, and as short as it gets."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model.clocks import Clocks
from tests.model.modes import OPTIONS
from tests.model.node import Node, Synchronous, TrioThread


class Tree:
    """A source, and a mount of it."""

    def __init__(self, root: Path, node: Any, clocks: Clocks) -> None:
        self.root, self.node, self.clocks = root, node, clocks


@pytest.fixture
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tree]:
    clocks = Clocks()
    root = tmp_path / "source"
    for directory in ("d", "e"):
        (root / directory).mkdir(parents=True)
    for path in ("a", "d/a", "e/a"):
        (root / path).write_bytes(path.encode())
    with TrioThread(clocks).running() as call:
        node = Node(root, tmp_path, OPTIONS[getattr(request, "param", "read-write")], clocks, random.Random(0))
        call(node.start)
        yield Tree(root, Synchronous(node, call), clocks)
        call(node.end)


def replace_directory(root: Path) -> None:
    """`d` becomes `e`, and another `d` takes its place."""
    shutil.rmtree(root / "e")
    os.rename(root / "d", root / "e")
    (root / "d").mkdir()


@pytest.mark.parametrize("tree", OPTIONS, indirect=True)
def test_a_name_stays_listed_though_what_it_led_to_was_seen_elsewhere(tree: Tree) -> None:
    assert sorted(tree.node.listdir("")) == ["a", "d", "e"]
    replace_directory(tree.root)
    tree.node.listdir("e")
    assert sorted(tree.node.listdir("")) == ["a", "d", "e"]


@pytest.mark.promise("CH-1")
def test_a_file_is_looked_up_in_the_directory_that_took_the_place_of_its_own(tree: Tree) -> None:
    """The file fails to open first. It is its directory that has gone, and that the kernel must look up again."""
    tree.node.close(tree.node.open("e/b", os.O_WRONLY | os.O_CREAT))
    opened = tree.node.open("e/a", os.O_RDONLY)
    assert tree.node.read(opened, 0, 10) == b"e/a"  # pins the directory
    tree.node.close(opened)
    (tree.root / "d/b").write_bytes(b"d/b")
    replace_directory(tree.root)
    opened = tree.node.open("e/b", os.O_RDONLY)
    assert tree.node.read(opened, 0, 10) == b"d/b"
    tree.node.close(opened)


def test_a_missing_name_in_the_root_is_looked_up_again_after_everything_was_invalidated(tree: Tree) -> None:
    with pytest.raises(FileNotFoundError):
        tree.node.stat("new")
    (tree.root / "new").mkdir()
    tree.node.invalidate("")
    tree.node.stat("new")


@pytest.mark.promise("CH-24")
def test_a_pinned_name_that_is_renamed_here_stays_pinned(tree: Tree) -> None:
    node = tree.node
    node.pass_time(5.0)
    opened = node.open("a", os.O_RDONLY)
    assert node.read(opened, 0, 10) == b"a"
    node.close(opened)
    node.rename("a", "b")
    os.rename(tree.root / "b", tree.root / "elsewhere")
    node.pass_time(5.0)
    opened = node.open("b", os.O_RDONLY)
    assert node.read(opened, 0, 10) == b"a"
    node.close(opened)


@pytest.mark.promise("EX-11")
def test_what_was_read_and_then_renamed_by_another_node_is_a_file_of_its_own_under_its_new_name(tree: Tree) -> None:
    node = tree.node
    node.pass_time(5.0)
    opened = node.open("a", os.O_RDONLY)
    assert node.read(opened, 0, 10) == b"a"
    node.close(opened)
    os.rename(tree.root / "a", tree.root / "b")
    node.pass_time(5.0)
    opened = node.open("b", os.O_WRONLY | os.O_TRUNC)
    node.write(opened, 0, b"new")
    node.close(opened)
    for name, expected in (("a", b"a"), ("b", b"new")):
        opened = node.open(name, os.O_RDONLY)
        assert node.read(opened, 0, 10) == expected
        node.close(opened)
