"""Limited resources are shared by uid: calls to the source, requests under way, descriptors.

After taking a place an owner has at most three times as many as are left free: a single owner gets three quarters of
all places, the next one three quarters of the rest, and so on (hazard 31). With this rule alone a few owners would take
nearly everything. Therefore there is also a reserve. An owner may take a place of it as long as it has fewer than
`LEAST` places, which leaves room for reserve / `LEAST` more owners. The fast path has the same rule (common/shares.h).
The owner of a piece of work is the uid of the request that it serves. Work that the daemon does for itself (prefetch,
warm-up) belongs to `DAEMON`, an owner like any other.

The owner is in a context variable, which each request sets and tasks inherit. So no function between a request and the
call to the source needs a uid as argument.

Work that several users wait for, such as the listing of a directory, has several owners: a `Party`. A request that
joins the work adds its owner to the party, and the work takes places from any share of the party with room. So no user
waits in the queue of another user that asked first.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from cachefs.source.credentials import Caller

DAEMON = -1
UNKNOWN = -2
"""The owner of all requests on handles whose opener is not known."""
LEAST = 2
MAX_CALLERS = 16


class Party:
    """The owners of a piece of work. The first one began it."""

    __slots__ = ("callers", "owners", "waiting")

    def __init__(self, owner: int, callers: Iterable[Caller] = ()) -> None:
        self.owners = [owner]
        self.callers: list[Caller] = []
        """Processes that wait for it, one of each user but root: a source may refuse root what it grants them."""
        self.admit(callers)
        self.waiting: dict[object, Callable[[int], None]] = {}
        """Work that waits for room in a share of the party → function to call with another owner."""

    def join(self, owner: int) -> None:
        if owner not in self.owners:
            self.owners.append(owner)
            for joined in list(self.waiting.values()):
                joined(owner)

    def admit(self, callers: Iterable[Caller]) -> None:
        for caller in callers:
            is_known = caller.uid == 0 or any(each.uid == caller.uid for each in self.callers)
            if not is_known and len(self.callers) < MAX_CALLERS:
                self.callers.append(caller)

    @contextmanager
    def waits_for(self, other: "Party") -> Iterator[None]:
        """While the block runs, our work waits for another party: our owners join it."""
        for owner in self.owners:
            other.join(owner)
        other.admit(self.callers)
        self.waiting[other] = other.join
        try:
            yield
        finally:
            self.waiting.pop(other, None)


_DAEMONS_PARTY = Party(DAEMON)
_party: ContextVar[Party] = ContextVar("party", default=_DAEMONS_PARTY)


def act_for(uid: int, caller: Caller | None = None) -> None:
    """The work of this task from now on, and of the tasks that it starts, belongs to this user.

    `caller`: the process that waits for it. None: not known.
    """
    _party.set(Party(uid, () if caller is None else (caller,)))


def owner() -> int:
    return _party.get().owners[0]


def caller() -> Caller | None:
    """A process that waits for the work of this task. None: not known, or of root."""
    callers = _party.get().callers
    return callers[0] if callers else None


def party() -> Party:
    return _party.get()


@contextmanager
def new_party() -> Iterator[Party]:
    """Work that is started in the block belongs to a new party, which others may join."""
    made = Party(owner(), _party.get().callers)
    token = _party.set(made)
    try:
        yield made
    finally:
        _party.reset(token)


class Shares:
    """The number of places that each owner has, of a limited number."""

    __slots__ = ("_taken", "reserve", "taken", "total")

    def __init__(self, total: int, reserve: int = 0) -> None:
        """`total` is without the reserve."""
        # constants
        self.total = total
        self.reserve = reserve
        # state
        self.taken = 0
        self._taken: Counter[int] = Counter()

    @classmethod
    def for_each(cls, most: int, reserve: int = 0) -> "Shares":
        """As many places as are necessary for a single owner to get `most` of them."""
        return cls(-(-most * 4 // 3), reserve)

    def taken_by(self, owner: int) -> int:
        return self._taken.get(owner, 0)

    def is_full(self, owner: int) -> bool:
        """May this owner take no more?"""
        own = self.taken_by(owner)
        if own + 1 <= 3 * (self.total - self.taken - 1):
            return False
        return own >= LEAST or self.taken >= self.total - 1 + self.reserve

    def take(self, owner: int) -> None:
        self._taken[owner] += 1
        self.taken += 1

    def give(self, owner: int) -> None:
        assert self._taken[owner] > 0, "given back twice"
        self.taken -= 1
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
