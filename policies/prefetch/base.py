"""The interface of prefetch policies. Paths are bytes, from the root of the mount, without a slash at either end."""

from collections.abc import Iterable
from dataclasses import dataclass

from policies.globs import Globs


@dataclass(frozen=True, slots=True)
class Target:
    """Files to be fetched."""

    path: bytes
    """A directory, or a file."""
    recursive: bool = False
    """Include all files beneath the directory."""
    globs: Globs | None = None
    """Only files that match."""


class Prefetch:
    """What to fetch before it is read. The caller lists, finds out what is cached, and fetches. This policy fetches
    nothing.
    """

    per_file = False
    """Does it matter which file of a directory is read?"""

    def started(self) -> Iterable[Target]:
        """The mount has started."""
        return ()

    def read(self, path: bytes) -> Iterable[Target]:
        """A file was read. Without `per_file`: of several reads in a row in one directory only the first."""
        return ()
