"""What a prefetch policy is asked. Paths are bytes, from the root of the mount, without a slash at either end."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Target:
    """Files to be fetched."""

    directory: bytes
    recursive: bool = False
    """With all that is beneath it."""


class Prefetch(Protocol):
    """What to fetch before anybody asks for it. The caller lists, looks at what is cached, and fetches."""

    def started(self) -> Iterable[Target]:
        """The mount is there."""

    def read(self, path: bytes) -> Iterable[Target]:
        """A file was read; the caller may leave out those of a directory whose last file was told of just before."""
