"""What a prefetch policy is asked. Paths are bytes, from the root of the mount, without a slash at either end."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from policies.globs import Globs


@dataclass(frozen=True, slots=True)
class Target:
    """Files to be fetched."""

    path: bytes
    """A directory, or a file."""
    recursive: bool = False
    """With all that is beneath it."""
    globs: Globs | None = None
    """Only the files that match."""


class Prefetch(Protocol):
    """What to fetch before anybody asks for it. The caller lists, looks at what is cached, and fetches."""

    per_file: bool
    """Does it matter which file of a directory is read?"""

    def started(self) -> Iterable[Target]:
        """The mount is there."""

    def read(self, path: bytes) -> Iterable[Target]:
        """A file was read. Not `per_file`: of several in a row in one directory the first one only."""
