"""What all users need is shared by uid: calls to the source, requests under way, descriptors.

After taking a place an owner has at most three times what is left free: one owner alone gets three quarters of all
places, the next one three quarters of the rest, and so on (hazard 31). A few owners take nearly everything like that.
So there is a reserve besides, of which an owner may take a place as long as it has fewer than `LEAST` of all: that
leaves room for reserve / `LEAST` more owners. The fast path has the same rule (common/shares.h). The owner of a piece
of work is the uid of the request it serves; work that the daemon does for itself (prefetch, warm-up) is `DAEMON`'s, an
owner like any other.

The owner travels in a context variable: each request sets it, tasks inherit it, and whoever takes something from a
share asks for it. That keeps a uid out of every signature between a request and the call to the source.

Work that several users wait for, such as the listing of a directory, has several owners: a `Party`. Whoever joins the
work joins its party, and what the work takes then comes from any share of the party that has room. So nobody waits in
the queue of another user because that user asked first.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

DAEMON = -1
UNKNOWN = -2
"""Requests on a handle whose opener nobody knows. They share one share."""
LEAST = 2


class Party:
    """The owners of a piece of work. The first one began it."""

    __slots__ = ("owners", "waiting")

    def __init__(self, owner: int) -> None:
        self.owners = [owner]
        self.waiting: dict[object, Callable[[int], None]] = {}
        """What waits for room in a share of the party, and how to tell it of another owner."""

    def join(self, owner: int) -> None:
        if owner not in self.owners:
            self.owners.append(owner)
            for joined in list(self.waiting.values()):
                joined(owner)

    @contextmanager
    def waits_for(self, other: "Party") -> Iterator[None]:
        """While the block runs our work waits for another one: all of us are owners of that one, too."""
        for owner in self.owners:
            other.join(owner)
        self.waiting[other] = other.join
        try:
            yield
        finally:
            self.waiting.pop(other, None)


_DAEMONS_PARTY = Party(DAEMON)
_party: ContextVar[Party] = ContextVar("party", default=_DAEMONS_PARTY)


def act_for(uid: int) -> None:
    """What this task does from now on, and the tasks that it starts, is done for this user."""
    _party.set(Party(uid))


def owner() -> int:
    return _party.get().owners[0]


def party() -> Party:
    return _party.get()


@contextmanager
def new_party() -> Iterator[Party]:
    """What is started in the block is done for a party of its own, which others may join."""
    made = Party(owner())
    token = _party.set(made)
    try:
        yield made
    finally:
        _party.reset(token)


class Shares:
    """How many of a bounded number of places each owner has."""

    __slots__ = ("_held", "held", "reserve", "total")

    def __init__(self, total: int, reserve: int = 0) -> None:
        """`total` is without the reserve."""
        # constants
        self.total = total
        self.reserve = reserve
        # state
        self.held = 0
        self._held: Counter[int] = Counter()

    @classmethod
    def for_each(cls, most: int, reserve: int = 0) -> "Shares":
        """So many places that one owner alone may have `most` of them."""
        return cls(-(-most * 4 // 3), reserve)

    def held_by(self, owner: int) -> int:
        return self._held.get(owner, 0)

    def is_full(self, owner: int) -> bool:
        """May this owner have no more?"""
        held = self._held.get(owner, 0)
        if held + 1 <= 3 * (self.total - self.held - 1):
            return False
        return held >= LEAST or self.held >= self.total - 1 + self.reserve

    def take(self, owner: int) -> None:
        self._held[owner] += 1
        self.held += 1

    def give(self, owner: int) -> None:
        left = self._held[owner] - 1
        assert left >= 0, "given back twice"
        self.held -= 1
        if left:
            self._held[owner] = left
        else:
            del self._held[owner]
