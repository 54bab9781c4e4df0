"""Names that `--mutable` matches, and what follows from them for a file that has several names, or gets another one.

OPEN names an inode, not the name that it was opened by. So the names that are known of an inode decide together:

- *Any* of them matches: the file is not made immutable, and nothing of it is pinned from now on.
- *All* of them match: nothing of it is immutable or pinned any more. A file that is immutable stays so as long as a job
  may read it under a name that does not match.
- A name that matches is never pinned itself, whatever it leads to, nor that there is no such name. So where one may
  come a directory is never marked LISTED.

The names are looked at when this mount compares an object with the source (`InodeCache.apply_stat`), when a file is
opened for the first time (`Immutability.is_mutable`), and when this mount has changed a name
(`OwnChanges.names_changed`).
"""

from cachefs.metadata.inode_paths import Paths
from cachefs.store.index.environment import View
from policies.globs import Globs


class MutableNames:
    def __init__(self, globs: Globs, paths: Paths) -> None:
        self._globs = globs
        self._paths = paths

    def __bool__(self) -> bool:
        """Are there any?"""
        return bool(self._globs)

    def matches_path(self, path: bytes) -> bool:
        return bool(self._globs) and self._globs.matches(path)

    def matches(self, view: View, parent: int, name: bytes) -> bool:
        """A name in a directory that is not known any more does not match: jobs may have read the file by it."""
        if not self._globs:
            return False
        try:
            return self._globs.matches(self._paths.beneath(view, parent, name))
        except OSError:
            return False

    def may_come(self, directory: bytes | None) -> bool:
        """May a name match that the directory at this path does not have yet? Then no listing of it is complete."""
        return bool(self._globs) and (directory is None or self._globs.match_within(directory))

    def names(self, view: View, number: int) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        """The names that are known of an inode, of very many some: (those that match, the others)."""
        matching: list[tuple[int, bytes]] = []
        others: list[tuple[int, bytes]] = []
        for link in self._paths.names(view, number):
            (matching if self.matches(view, *link) else others).append(link)
        return matching, others

    def any(self, view: View, number: int) -> bool:
        return bool(self._globs) and bool(self.names(view, number)[0])

    def reach_beneath(self, view: View, directory: int) -> bool:
        """May names beneath a directory match because of where it lies?"""
        path = self._paths.directory(view, directory).path
        return bool(self._globs) and path is not None and self._globs.reach_beneath(path)
