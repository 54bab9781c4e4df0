"""What the machine has found: named, and as short as it gets."""

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cachefs.client.hand_over import OpenSource
from cachefs.fs.mutations import RENAME_EXCHANGE
from cachefs.options import Options
from cachefs.system import syscalls
from tests.model.clocks import Clocks
from tests.model.kernel import Kernel, KernelInode
from tests.model.modes import OPTIONS, SMALL
from tests.model.node import Node, Synchronous, TrioThread


class Tree:
    """A source, and a mount of it."""

    def __init__(self, root: Path, node: Any, kernel: Kernel, clocks: Clocks, options: Options) -> None:
        self.root, self.node, self.kernel, self.clocks = root, node, kernel, clocks
        self.is_read_only = options.read_only


@pytest.fixture
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tree]:
    clocks = Clocks()
    root = tmp_path / "source"
    for directory in ("d", "e"):
        (root / directory).mkdir(parents=True)
    for path in ("a", "d/a", "e/a"):
        (root / path).write_bytes(path.encode())
    with TrioThread(clocks).running() as call:
        options = OPTIONS[getattr(request, "param", "read-write")]
        node = Node(root, tmp_path, options, clocks, random.Random(0))
        call(node.start)
        yield Tree(root, Synchronous(node, call), node.kernel, clocks, options)
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
    os.rename(tree.root / "a", tree.root / "d/b")  # elsewhere: a directory with overwritten files holds results
    node.pass_time(5.0)
    opened = node.open("d/b", os.O_WRONLY | os.O_TRUNC)
    node.write(opened, 0, b"new")
    node.close(opened)
    for name, expected in (("a", b"a"), ("d/b", b"new")):
        opened = node.open(name, os.O_RDONLY)
        assert node.read(opened, 0, 10) == expected
        node.close(opened)


def open_files(root: Path) -> list[str]:
    """Files of the source that this process has open, by whatever name."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if each.readlink().is_relative_to(root) and not each.is_dir():
                found.append(str(each.readlink().relative_to(root)))
    return found


@pytest.mark.parametrize("tree", OPTIONS, indirect=True)
def test_what_nobody_has_open_is_not_open_at_the_source(tree: Tree) -> None:
    node, root = tree.node, tree.root
    (root / "large").write_bytes(bytes(SMALL + 1))
    (root / "closed").write_bytes(b"")
    node.pass_time(5.0)
    for path in ("a", "large", "d/a"):
        for _ in range(2):
            opened = node.open(path, os.O_RDONLY)
            node.read(opened, 0, 10)
            node.close(opened)
    if not tree.is_read_only:
        opened = node.open("new", os.O_RDWR | os.O_CREAT)
        node.write(opened, 0, b"new")
        assert "new" in open_files(root)
        os.rename(root / "new", root / "other")
        node.close(opened)
        node.unlink("d/a")
        node.rename("a", "e/b")
    node.stat("closed")
    os.unlink(root / "closed")
    with suppress(FileNotFoundError):  # a pinned name is opened all the same
        node.close(node.open("closed", os.O_RDONLY))
    node.pass_time(60.0)
    node.shrink(1.0)
    node.flush()
    node.pass_time(60.0)
    assert open_files(root) == []


def test_what_a_predecessor_had_open_and_is_not_known_any_more_is_closed(tree: Tree) -> None:
    node, root = tree.node, tree.root
    node.stat("a")
    number = (root / "a").stat().st_ino
    fds = [os.open(root / "a", os.O_RDONLY) for _ in range(2)]
    assert open_files(root) == ["a", "a"]
    handed = [OpenSource(0, number, 1, fds[0]), OpenSource(0, number + 1000, 1, fds[1])]
    assert node._node._parts.descriptors.adopt(handed) == []
    assert open_files(root) == []


def read(node: Any, path: str) -> bytes:
    opened = node.open(path, os.O_RDONLY)
    try:
        return bytes(node.read(opened, 0, 100))
    finally:
        node.close(opened)


def test_a_file_that_was_truncated_here_stays_mutable(tree: Tree) -> None:
    node, file = tree.node, tree.root / "d/a"
    node.truncate("d/a", 2)
    node.pass_time(5.0)
    assert read(node, "d/a") == b"d/"
    file.write_bytes(b"of another node")
    node.pass_time(5.0)
    assert read(node, "d/a") == b"of another node"


@pytest.mark.parametrize("tree", ["mutable"], indirect=True)
def test_who_opens_a_mutable_file_gets_the_size_that_it_has(tree: Tree) -> None:
    node, file = tree.node, tree.root / "a"
    assert node.stat("a")[1] == 1
    file.write_bytes(b"of another node")
    opened = node.open("a", os.O_RDONLY)  # by what the kernel believes
    assert node.stat("a")[1] == len(b"of another node")
    node.close(opened)


@pytest.mark.parametrize("tree", ["read-only"], indirect=True)
@pytest.mark.parametrize("age_s", [0.0, 5.0])
def test_a_file_is_fetched_ahead_once_and_when_it_is_old_enough(tree: Tree, age_s: float) -> None:
    """What came of a young one could not be kept."""
    node, parts = tree.node, tree.node._node._parts
    (tree.root / "new").write_bytes(b"new")
    node.stat("new")
    node.pass_time(age_s)
    node.stat("new")
    for _ in range(2):
        node._call(parts.files.fetch_ahead, (tree.root / "new").stat().st_ino, 0)
        assert parts.metrics.prefetched == (age_s > 0)
        node.flush()


@pytest.mark.parametrize("tree", ["mutable", "limited-never"], indirect=True)
def test_a_name_is_listed_though_its_record_goes_as_fast_as_it_is_made(tree: Tree) -> None:
    """Memory is short, and other processes look the name up again and again: a FORGET follows each comparison."""
    parts = tree.node._node._parts
    comparisons = parts.directories._comparisons
    make, number = comparisons.make, (tree.root / "d/a").stat().st_ino

    async def forgotten_at_once(*arguments: object) -> None:
        await make(*arguments)
        await parts.files.forget([(number, 1)])

    comparisons.make = forgotten_at_once
    assert tree.node.listdir("d") == ["a"]
    os.unlink(tree.root / "d/a")
    tree.node.pass_time(5.0)
    assert tree.node.listdir("d") == []


@pytest.mark.parametrize("tree", ["never", "limited-never"], indirect=True)
def test_a_file_keeps_its_record_though_a_forget_comes_during_its_lookup(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is dropped at the same moment, and its number given to a directory, which the kernel would answer with EIO."""
    node, parts, number = tree.node, tree.node._node._parts, (tree.root / "e/a").stat().st_ino
    node.stat("e/a")
    with monkeypatch.context() as kernel:
        kernel.setattr(type(node._node.kernel), "attributes", lambda *_: False)  # it has not received the answer yet
        with parts.opened.index.update() as update:
            parts.metadata.drop(update, number)
        node._call(parts.files.forget, [(number, 1)])
    assert node._node.kernel._inodes[number].lookups
    assert parts.metadata.current(number) is not None
    opened = node.open("e/a", os.O_RDONLY)
    assert node.read(opened, 0, 10) == b"e/a"
    node.close(opened)


@pytest.mark.promise("IM-3")
def test_another_name_of_a_file_that_has_expired_is_not_pinned_with_it(tree: Tree) -> None:
    """Another node exchanges it between its last look-up and the read by the other name."""
    node = tree.node
    node.link("e/a", "b")
    node.pass_time(2.5)
    old, new = os.fsencode(tree.root / "a"), os.fsencode(tree.root / "e/a")
    syscalls.renameat2(-1, old, -1, new, RENAME_EXCHANGE)
    for name, expected in (("a", b"e/a"), ("e/a", b"a")):
        opened = node.open(name, os.O_RDONLY)
        assert node.read(opened, 0, 10) == expected
        node.close(opened)


@pytest.mark.promise("PI-7")
@pytest.mark.parametrize("tree", OPTIONS, indirect=True)
def test_a_directory_that_is_moved_after_its_invalidation_is_not_there(tree: Tree) -> None:
    """It was pinned again while it was compared for the invalidation."""
    tree.node.stat("d")
    tree.node.invalidate("")
    os.rename(tree.root / "d", tree.root / "b")
    tree.node.pass_time(5.0)
    with pytest.raises(FileNotFoundError):
        tree.node.stat("d")
    tree.node.stat("b")


@pytest.mark.promise("PI-7", "PI-8")
@pytest.mark.parametrize("tree", OPTIONS, indirect=True)
def test_a_directory_that_is_made_again_after_its_invalidation_is_there(tree: Tree) -> None:
    """Its absence was pinned while it was compared for the invalidation."""
    tree.node.stat("d")
    os.rename(tree.root / "d", tree.root / "b")
    tree.node.invalidate("d")
    os.rename(tree.root / "b", tree.root / "d")
    tree.node.pass_time(5.0)
    tree.node.stat("d")


@pytest.mark.promise("EX-20", "CH-1")
@pytest.mark.parametrize("is_truncated", [False, True])
def test_a_result_that_is_replaced_and_read_is_written_to(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, is_truncated: bool
) -> None:
    """The kernel looks it up again, because it was replaced. Then a reader makes it immutable. That was answered with
    ESTALE once more, which reached the job."""
    node, kernel, look_up = tree.node, tree.kernel, tree.kernel._step
    node.close(node.open("d/a", os.O_WRONLY))  # from now on its directory holds results
    (tree.root / "b").write_bytes(b"version 1")
    os.rename(tree.root / "b", tree.root / "d/a")

    async def read_meanwhile(parent: int, name: bytes, *, again: bool) -> KernelInode | None:
        found = await look_up(parent, name, again=again)
        if again and name == b"a":
            reader = await kernel.open("d/a", os.O_RDONLY)
            assert await kernel.read(reader, 0, 10) == b"version 1"
            await kernel.close(reader)
        return found

    monkeypatch.setattr(kernel, "_step", read_meanwhile)
    if is_truncated:
        node.truncate("d/a", 3)
        assert (tree.root / "d/a").read_bytes() == b"ver"
    else:
        writer = node.open("d/a", os.O_WRONLY)
        node.write(writer, 0, b"V")
        node.close(writer)
        assert (tree.root / "d/a").read_bytes() == b"Version 1"
