"""Inode numbers of our own, as programs see them that keep numbers in 32 bits or in doubles."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, contents, settle, start_fault_fs

MakeMount = Callable[..., Mount]
MODES = pytest.mark.parametrize(
    "mode",
    [("--read-only",), (), ("--mutable", "*.log"), ("--cache", "none"), ("--read-only", "--no-fastpath"),
     ("--no-fastpath",)],
    ids=["read-only", "read-write", "mutable", "none", "read-only-no-fastpath", "read-write-no-fastpath"],
)  # fmt: skip
FILES = 12
LIMIT = 8


def numbers(root: Path) -> dict[Path, int]:
    return {path.relative_to(root): path.lstat().st_ino for path in root.rglob("*")}


def make_files(root: Path) -> None:
    (root / "sub").mkdir(parents=True)
    for number in range(FILES):
        (root / "sub" / f"f{number}").write_bytes(b"%d" % number * 300)


def read_again(m: Mount, source: Path) -> None:
    """A read of a file that another node has changed fails once."""
    for path in contents(source):
        with suppress(OSError):
            (m.path / path).read_bytes()
    assert contents(m.path) == contents(source)


@pytest.fixture
def tree(tmp_path: Path, beneath: ExitStack) -> Iterator[Path]:
    """Files of the source's filesystem, and of another one beneath."""
    root = tmp_path / "tree"
    make_files(root / "own")
    (root / "nested").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root / "nested"], check=True)
    beneath.callback(subprocess.run, ["umount", "-l", root / "nested"], check=True)
    make_files(root / "nested/deep")
    assert all(number < 1 << 32 for number in numbers(root).values())
    settle()
    yield root


def change(m: Mount, root: Path) -> None:
    """Change files that the mount has pinned and the kernel knows: they may get other numbers there."""
    held = [os.open(m.path / path, os.O_PATH) for path in contents(root)]
    for path in contents(root):
        (root / path).write_bytes(b"changed" * 50)
    settle()
    for place in ("own/sub", "nested/deep/sub"):
        cachefs("invalidate", m.path / place)
    read_again(m, root)
    for fd in held:
        os.close(fd)


@pytest.mark.promise("CH-34")
@pytest.mark.promise("CH-35")
@MODES
def test_numbers_of_a_source_with_numbers_of_32_bits_have_32_bits(
    mount: MakeMount, tree: Path, mode: tuple[str, ...]
) -> None:
    m = mount(tree, *mode)
    assert contents(m.path) == contents(tree)
    seen = set(numbers(m.path).values())
    for _ in range(2):
        change(m, tree)
        found = numbers(m.path)
        assert found.keys() == numbers(tree).keys()
        assert len(set(found.values())) == len(found)
        assert all(number < 1 << 32 for number in found.values()), found
        seen |= set(found.values())
    m.flush()
    if "--no-fastpath" not in mode and not Mount.no_fastpath:
        m.kill()
        m.start()
        assert numbers(m.path) == found
        cachefs("restart", m.path)
        assert numbers(m.path) == found
    m.umount()
    m.start()
    read_again(m, tree)
    assert numbers(m.path) == found
    change(m, tree)
    after = numbers(m.path)
    assert all(number < 1 << 32 for number in after.values())
    assert not {after[path] for path in after if after[path] != found[path]} & seen


@pytest.mark.promise("CH-34")
@pytest.mark.promise("CH-35")
@pytest.mark.parametrize("mode", [("--read-only",), (), ("--no-fastpath",)], ids=["read-only", "read-write", "python"])
def test_numbers_of_a_mount_with_a_metadata_limit_have_32_bits(
    mount: MakeMount, tree: Path, mode: tuple[str, ...]
) -> None:
    m = mount(tree, *mode, "--metadata-limit", LIMIT, "--metadata-retention", "lru")
    held: list[int] = []
    """So that the kernel keeps every inode."""
    paths: dict[int, Path] = {}
    for _ in range(3):
        assert contents(m.path) == contents(tree)
        found = numbers(m.path)
        assert len(set(found.values())) == len(found)
        assert all(number < 1 << 32 for number in found.values()), found
        for path, number in found.items():
            assert paths.setdefault(number, path) == path
        held += [os.open(m.path / path, os.O_RDONLY) for path in contents(tree)]
        change(m, tree)
    for fd in held:
        os.close(fd)


@pytest.mark.promise("CH-34")
@pytest.mark.parametrize("mode", [("--read-only",), (), ("--no-fastpath",)], ids=["read-only", "read-write", "python"])
def test_numbers_of_a_source_with_longer_numbers_are_doubles(
    mount: MakeMount, tmp_path: Path, beneath: ExitStack, mode: tuple[str, ...]
) -> None:
    """As CephFS has them. Objects with numbers from the ranges of ours get others."""
    root = tmp_path / "tree"
    make_files(root)
    given = [1 << 40, (1 << 53) - 1, (1 << 53) - 2, (1 << 32) - 2, (1 << 32) - 3, 1 << 62, (1 << 52) - 1]
    settle()
    faults = tmp_path / "faults"
    source, _, _ = start_fault_fs(root, tmp_path, beneath, "".join(f"{n} sub/f{i}\n" for i, n in enumerate(given)))
    assert faults.exists()
    m = mount(source, *mode)
    assert contents(m.path) == contents(root)
    for _ in range(2):
        found = numbers(m.path)
        assert len(set(found.values())) == len(found)
        assert len(set(map(float, found.values()))) == len(found)
        assert all(number < 1 << 53 for number in found.values()), found
        assert found[Path("sub/f0")] == 1 << 40 and found[Path("sub/f6")] == (1 << 52) - 1
        m.flush()
        m.umount()
        m.start()
        assert contents(m.path) == contents(root)
        assert numbers(m.path) == found
    (root / "sub/f0").write_bytes(b"changed")
    settle()
    cachefs("invalidate", m.path / "sub/f0")
    with suppress(OSError):
        (m.path / "sub/f0").read_bytes()
    assert (m.path / "sub/f0").read_bytes() == b"changed"
    assert numbers(m.path)[Path("sub/f0")] < 1 << 53
