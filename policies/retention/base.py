"""The interface of retention policies. Keys are what the caller caches: units of files, or files."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Retention(Generic[Key]):
    """Chooses which cached objects make room for new ones. This one keeps no order, and evicts nothing.

    The caller keeps the bytes, the capacity and the clock; a policy keeps an order. It receives each object that is
    `inserted`, `accessed` and `removed`, and names the next `victim`.
    """

    def inserted(self, key: Key) -> None:
        """An object is cached from now on. If the key is known, this counts as an access."""

    def accessed(self, key: Key) -> None:
        """A read, hit or miss; a miss comes before `inserted`. Reported late, perhaps after a removal."""

    def expected(self, key: Key) -> None:
        """It is being prefetched, and will be read."""

    def removed(self, key: Key) -> None:
        """The object is gone, for any reason. Unknown keys are ignored."""

    def victim(self) -> Key | None:
        """The object to evict for a new one. None: evict nothing, and do not cache the new one. Changes nothing."""
        return None
