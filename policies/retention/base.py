"""What a retention policy is asked. Keys are whatever the caller caches: units of files, or files."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Retention(Generic[Key]):
    """Which cached objects make room for new ones. This one keeps no order and gives nothing away.

    The caller keeps the bytes, the capacity and the clock; a policy keeps an order. It is told of every object that
    comes (`inserted`), is used (`accessed`) and goes (`removed`), and asked who goes next (`victim`).
    """

    def inserted(self, key: Key) -> None:
        """An object that was not cached is from now on. A key that is known already counts as accessed."""

    def accessed(self, key: Key) -> None:
        """A read, hit or miss; of a miss it is told before `inserted`. Reported late, perhaps after a removal."""

    def expected(self, key: Key) -> None:
        """It is being fetched before anybody has asked for it, and will be read."""

    def removed(self, key: Key) -> None:
        """The object has gone, for whatever reason. Unknown keys are ignored."""

    def victim(self) -> Key | None:
        """Who goes to make room for a newcomer. None: nobody does, and that stays outside. Changes nothing."""
        return None
