"""Another node: changes the source behind the mount's back."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from cachefs.fs.mutations import RENAME_EXCHANGE
from cachefs.system import syscalls


class OtherNode:
    """Each change fails with an OSError where the tree is not of that shape."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._versions = 0

    def content(self, size: int) -> bytes:
        """Of another version than all others, in every eight bytes."""
        self._versions += 1
        return (b"%07d." % self._versions * (size // 8 + 1))[:size]

    def build(self) -> None:
        for directory in ("d", "e"):
            (self._root / directory).mkdir()
        for path, size in (("a", 300_000), ("d/a", 300_000), ("d/b", 5000), ("e/a", 5000)):
            self.create(path, size)

    # --- contents: (path, size) ------------------------------------------------------------------------------------

    def create(self, path: str, size: int) -> None:
        """Or rewrite in place."""
        (self._root / path).write_bytes(self.content(size))

    def replace(self, path: str, size: int) -> None:
        """By a rename over it."""
        new = self._root.parent / "new"
        new.write_bytes(self.content(size))
        os.rename(new, self._root / path)

    def rewrite(self, path: str, size: int) -> None:
        """In place, at the same size, from some offset on."""
        length = (self._root / path).stat().st_size
        offset = size % max(length, 1)
        with open(self._root / path, "r+b") as file:
            os.pwrite(file.fileno(), self.content(length - offset), offset)

    # --- names: (path, another path) -------------------------------------------------------------------------------

    def rename(self, path: str, other: str) -> None:
        os.rename(self._root / path, self._root / other)

    def exchange(self, path: str, other: str) -> None:
        """Nothing has changed, change times included, where it fails."""
        old, new = os.fsencode(self._root / path), os.fsencode(self._root / other)
        syscalls.renameat2(-1, old, -1, new, RENAME_EXCHANGE)  # the paths are absolute

    def link(self, path: str, other: str) -> None:
        os.link(self._root / path, self._root / other)

    def remove(self, path: str, _: str) -> None:
        if (self._root / path).is_dir():
            shutil.rmtree(self._root / path)
        else:
            (self._root / path).unlink()

    def make_directory(self, path: str, _: str) -> None:
        (self._root / path).mkdir()

    def replace_directory(self, _: str, __: str) -> None:
        """`d` becomes `e`, and a new `d` takes its place (hazard 23)."""
        shutil.rmtree(self._root / "e", ignore_errors=True)
        os.rename(self._root / "d", self._root / "e")
        (self._root / "d").mkdir()
        self.create("d/a", 5000)

    def add_many(self, path: str, _: str) -> None:
        """So many names that a listing needs several requests."""
        directory = (self._root / path).parent if (self._root / path).is_file() else self._root / path
        first = len(list(directory.iterdir()))
        for number in range(MANY):
            (directory / f"many-{first + number}").touch()


MANY = 40
CONTENTS: tuple[Callable[[OtherNode, str, int], None], ...] = (
    OtherNode.rewrite,
    OtherNode.replace,
    OtherNode.create,
)
NAMES: tuple[Callable[[OtherNode, str, str], None], ...] = (
    OtherNode.rename,
    OtherNode.exchange,
    OtherNode.remove,
    OtherNode.link,
    OtherNode.make_directory,
    OtherNode.replace_directory,
    OtherNode.add_many,
)
