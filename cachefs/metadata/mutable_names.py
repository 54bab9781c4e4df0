"""Mutable names: those that `--mutable` matches, and the default names of files. What do they mean for a file with
several names, or with a new name?

An OPEN says which inode is opened, and not by which name. So all known names of an inode decide together:

- *Any* name matches: the file is not made immutable, and nothing more of it is pinned.
- *All* names match: the file is no longer immutable or pinned. As long as one name does not match, a job may read an
  immutable file by it; so the file stays immutable.
- A matching name is never pinned itself, whatever it leads to, and its absence is not pinned either. So a directory
  in which such a name may appear is never marked LISTED.

The names are checked when this mount compares an object with the source (`InodeCache.apply_stat`), when a file is
opened for the first time (`Immutability.is_mutable`), and after this mount has changed a name
(`Mutations._follow_names`).
"""

from cachefs.contract.index import Table
from cachefs.metadata.inode_paths import Paths
from cachefs.store.index.environment import View
from cachefs.store.index.records import Dentry, Inode, inode_key
from policies.globs import Globs, Names


class MutableNames:
    def __init__(self, globs: Globs, names: Names, paths: Paths) -> None:
        """`names`: of regular files; a directory with such a name is like any other."""
        self._globs = globs
        self._names = names
        self._has_globs, self._has_names = bool(globs), bool(names)
        self._paths = paths

    def __bool__(self) -> bool:
        """Are there any?"""
        return self._has_globs or self._has_names

    def matches_path(self, path: bytes) -> bool:
        return self._has_globs and self._globs.matches(path)

    def matches(self, view: View, parent: int, name: bytes, number: int = 0) -> bool:
        """A name in a directory of which no record is left does not match: jobs may have read the file by that name.

        `number`: of the inode that the name leads to; 0: what the index says.
        """
        if self._has_names and self._names.matches(name) and not self._is_directory(view, parent, name, number):
            return True
        if not self._has_globs:
            return False
        try:
            return self._globs.matches(self._paths.beneath(view, parent, name))
        except OSError:
            return False

    def _is_directory(self, view: View, parent: int, name: bytes, number: int) -> bool:
        if not number:
            dentry = view.get(Table.DENTRIES, inode_key(parent) + name)
            number = Dentry.unpack(dentry).inode if dentry else 0
        value = view.get(Table.INODES, inode_key(number))
        return value is not None and Inode.unpack(number, value).is_directory

    def may_come(self, directory: bytes | None) -> bool:
        """May a matching name appear in the directory at this path? Then no listing of the directory is complete."""
        if self._has_names:
            return True
        return self._has_globs and (directory is None or self._globs.match_within(directory))

    def names(self, view: View, number: int) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        """The known names of an inode (some of them, where there are very many): (those that match, the others)."""
        matching: list[tuple[int, bytes]] = []
        others: list[tuple[int, bytes]] = []
        for link in self._paths.names(view, number):
            (matching if self.matches(view, *link, number) else others).append(link)
        return matching, others

    def any(self, view: View, number: int) -> bool:
        return bool(self) and bool(self.names(view, number)[0])

    def reach_beneath(self, view: View, directory: int) -> bool:
        """May names beneath a directory match because of its path?"""
        path = self._paths.directory(view, directory).path
        return self._has_globs and path is not None and self._globs.reach_beneath(path)
