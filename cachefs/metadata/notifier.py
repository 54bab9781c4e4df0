"""How the rest of cachefs makes the kernel drop what it caches. `cachefs/fuse` implements it."""

from collections.abc import Sequence
from typing import Protocol


class Notifier(Protocol):
    def drop_soon(self, entries: Sequence[tuple[int, bytes]], numbers: Sequence[int] = ()) -> None:
        """Drop names, given as (parent, name), and the attributes and pages of inodes. Returns at once."""

    async def drop(self, entries: Sequence[tuple[int, bytes]], numbers: Sequence[int]) -> None:
        """The same, after the answers that were given so far. Returns when the kernel has dropped them."""

    def attributes(self, number: int) -> bool:
        """Drop attributes and ACLs of an inode. Waits for no request. Returns whether the kernel knows the inode."""

    def dropped_between(self, number: int, since_ns: int, until_ns: int) -> bool:
        """Has the kernel dropped attributes of an inode that it knew, at the earliest at `since_ns`, and no other ones
        after `until_ns`? False where that is not known any more."""
