"""Runs, and the versions that they give out: no version is used twice, even if the index or the blob is lost.

A run is the life of one mount of a cache. The versions of inodes are sequence numbers whose upper part is the run. They
are unique if runs are, and runs are unique because of this rule: **a new run is higher than every run whose numbers the
index, the blob or a snapshot still contains.**

- An index counts its runs (META `run`).
- A rebuilt index continues above the records of the blob (recovery.py).
- An imported snapshot begins above the old aliases of the exporter (snapshot.py).
- An index that has records but no run, because it was damaged, is searched for the highest run.

Sequence number: `(run << 40) + (takeovers << 28) + n`. Earlier versions took their aliases (aliases.py) from the same
sequence, with bit 62 set. Caches may contain such *old aliases*.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from cachefs.contract.index import Table
from cachefs.errors import CacheFsError
from cachefs.store.index.environment import Environment
from cachefs.store.index.index import Index
from cachefs.store.index.records import PINNED, Extent, Inode, inode_of_key
from cachefs.system.stat import NO_CONNECTION

RUN_BITS, TAKEOVER_BITS = 40, 28
FIRST_OLD_ALIAS = 1 << 62
MAX_RUN = (FIRST_OLD_ALIAS >> RUN_BITS) - 1
"""Higher runs would reach the bit that marks an old alias."""
CONNECTION_BITS = 10
RUN_KEY, _CONNECTION_KEY = b"run", b"source connection"
_CONNECTION = struct.Struct("<IQ")  # flags of the value, number


def run_of(number: int) -> int:
    """The run that gave out a version or an old alias."""
    return (number & (FIRST_OLD_ALIAS - 1)) >> RUN_BITS


def run_of_inode(number: int) -> int:
    """The run that gave out an inode number; 0: it is no old alias."""
    return run_of(number) if number & FIRST_OLD_ALIAS else 0


def first_connection(run: int) -> int:
    """The number of a run's first connection to its source; a record has 32 bits for it."""
    return run << CONNECTION_BITS


def next_connection(number: int) -> int:
    """When a run has used its numbers: one that no record has, so that everything is compared by name."""
    is_last = number >= NO_CONNECTION or (number + 1) % (1 << CONNECTION_BITS) == 0
    return NO_CONNECTION if is_last else number + 1


def save_connection(index: Index, number: int) -> None:
    """For a successor."""
    with index.update() as update:
        update.put(Table.META, _CONNECTION_KEY, _CONNECTION.pack(0, number))


def saved_connection(index: Index) -> int:
    with index.view() as view:
        value = view.get(Table.META, _CONNECTION_KEY)
    return _CONNECTION.unpack(value)[1] if value else NO_CONNECTION


@dataclass(frozen=True, slots=True)
class RunState:
    """META `run`: the number of the run, and which records of earlier runs are valid."""

    run: int = 0
    floor: int = 0
    """Records that were validated in this run or later are valid (validity.py)."""
    clean: bool = True
    boot_id: bytes = bytes(16)
    rctime: bytes = b""
    """Of the source's root when this run began (rctime.py); empty: it has none, or none that can be used."""
    unmoved_floor: int = 0
    """The first run that began with this `rctime`, and since which nothing was recorded without a comparison."""

    _CODEC = struct.Struct("<II2Q16s40sQ")

    def pack(self) -> bytes:
        return self._CODEC.pack(PINNED, self.clean, self.run, self.floor, self.boot_id, self.rctime, self.unmoved_floor)

    @classmethod
    def unpack(cls, value: bytes) -> "RunState":
        _, clean, run, floor, boot_id, rctime, unmoved_floor = cls._CODEC.unpack(value.ljust(cls._CODEC.size, b"\0"))
        if len(value) < cls._CODEC.size:  # of an older version without the last field: no earlier run is valid
            unmoved_floor = run + 1
        return cls(run, floor, bool(clean), boot_id, rctime.rstrip(b"\0"), unmoved_floor)

    def store(self, durable: Environment) -> None:
        with durable.write() as txn:
            txn.put(RUN_KEY, self.pack(), db=durable.tables[Table.META])


def ended(highest: int) -> RunState:
    """The state of a run whose index was rebuilt or imported: only its number is valid."""
    if not 0 <= highest < MAX_RUN:
        raise CacheFsError(f"run {highest} is not a valid run: remove the cache directory to start with an empty cache")
    return RunState(highest, highest + 1, clean=False)


def last_run(durable: Environment) -> RunState | None:
    """The last run of this index. None: there was none."""
    value = durable.get(Table.META, RUN_KEY)
    if value:
        return RunState.unpack(value)
    highest = _highest_run(durable)
    return ended(highest) if highest else None


def _highest_run(durable: Environment) -> int:
    """The highest run whose numbers this index contains; reads all of it."""
    highest = 0
    with durable.lmdb.begin() as txn:
        for _, value in txn.cursor(db=durable.tables[Table.ALIASES]):
            highest = max(highest, run_of_inode(inode_of_key(value[8:16])))
        for key, value in txn.cursor(db=durable.tables[Table.INODES]):
            number = inode_of_key(key)
            inode = Inode.unpack(number, value)
            highest = max(highest, run_of_inode(number), run_of(inode.version), inode.validated_run)
        for _, value in txn.cursor(db=durable.tables[Table.EXTENTS]):
            highest = max(highest, run_of(Extent.unpack(value).version))
    return highest


class Numbers:
    """The sequence numbers of a run. Each daemon that takes the run over begins 2^28 higher than its predecessor.

    A daemon that has used its 2^28 numbers continues with those of the next daemon. `on_range` is called then, because
    a successor must know it.
    """

    def __init__(
        self, run: int, takeovers: int = 0, on_range: Callable[[int], object] = lambda takeovers: None
    ) -> None:
        """`takeovers`: how many daemons went on with this run after another one had died.

        `on_range`: called with what counts as the number of take-overs from now on.
        """
        self._last = (run << RUN_BITS) + (takeovers << TAKEOVER_BITS)
        self._on_range = on_range

    def next(self) -> int:
        """A number that was never given out before, in any run."""
        self._last += 1
        if self._last & (1 << TAKEOVER_BITS) - 1 == 0:
            self._on_range((self._last & (1 << RUN_BITS) - 1) >> TAKEOVER_BITS)
        return self._last
