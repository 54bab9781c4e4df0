"""Paths from the root of the source, by the names that lead to an inode."""

import errno
import os

from cachefs.attributes import ROOT_INODE, inode_key, inode_of_key
from cachefs.environment import Table, View

MAX_DEPTH = 4096
REMEMBERED_PATHS = 4096


def links_of(view: View, number: int) -> list[tuple[int, bytes]]:
    """All known names: (parent, name)."""
    return [(inode_of_key(key[8:16]), key[16:]) for key, _ in view.scan(Table.LINKS, inode_key(number))]


def directory_of(view: View, number: int) -> int | None:
    """The parent of an inode, by one of its names."""
    link = view.first_key(Table.LINKS, inode_key(number))
    return inode_of_key(link[8:16]) if link is not None else None


class Paths:
    """Those of directories are remembered; `forget` them when one moves."""

    def __init__(self) -> None:
        self._directories: dict[int, bytes] = {}

    def forget(self) -> None:
        self._directories.clear()

    def path(self, view: View, number: int) -> bytes:
        """Raises OSError ESTALE where no name leads to the inode."""
        if number == ROOT_INODE:
            return b""
        known = self._directories.get(number)
        if known is not None:
            return known
        return self._joined(view, number, 0)

    def beneath(self, view: View, directory: int, name: bytes) -> bytes:
        """The path of a name in a directory."""
        return self._directory(view, directory, 0) + name

    def _joined(self, view: View, number: int, depth: int) -> bytes:
        """The path of the directory that an inode is in, and its name there."""
        link = view.first_key(Table.LINKS, inode_key(number))
        if link is None or depth > MAX_DEPTH:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return self._directory(view, inode_of_key(link[8:16]), depth) + link[16:]

    def _directory(self, view: View, number: int, depth: int) -> bytes:
        """The path of a directory with a slash behind it, empty for the root."""
        if number == ROOT_INODE:
            return b""
        known = self._directories.get(number)
        if known is None:
            known = self._joined(view, number, depth + 1)
            if len(self._directories) >= REMEMBERED_PATHS:
                self._directories.clear()
            self._directories[number] = known
        return known + b"/"
