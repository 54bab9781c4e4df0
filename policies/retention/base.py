"""What a retention policy is asked. Keys are whatever the caller caches: units of files, or files."""

from collections.abc import Hashable
from typing import Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Retention(Protocol[Key]):
    """Which cached objects make room for new ones.

    The caller keeps the bytes, the capacity and the clock; a policy keeps an order. It is told of every object that
    comes (`inserted`), is used (`accessed`) and goes (`removed`), and asked who goes next (`victim`).
    """

    def inserted(self, key: Key) -> None:
        """An object that was not cached is from now on. A key that is known already counts as accessed."""

    def accessed(self, key: Key) -> None:
        """A read, hit or miss; of a miss it is told before `inserted`. Reported late, perhaps after a removal."""

    def removed(self, key: Key) -> None:
        """The object has gone, for whatever reason. Unknown keys are ignored."""

    def victim(self) -> Key | None:
        """Who goes to make room for a newcomer. None: nobody does, and that stays outside. Changes nothing."""
