"""Runs, and the numbers that they give out: none is ever used twice, whatever was lost.

A run is one life of a daemon on a cache. All versions of inodes, and the inode numbers that are not the source's
(*aliases*), are sequence numbers whose upper part is the run. So they are unique as long as runs are, and runs are as
long as this rule holds: **a run is above every run whose numbers the index, the blob or a snapshot still contains.**

- An index counts its runs (META `run`).
- A rebuilt index continues above the blob's records (recovery.py).
- An imported snapshot begins above the exporter's aliases (snapshot.py).
- An index that has records but no run, because it was damaged, is searched for the highest one.

Sequence number: `(run << 40) + (takeovers << 28) + n`. Alias: a sequence number with bit 62 set.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from cachefs.contract.index import Table
from cachefs.errors import CacheFsError
from cachefs.store.index.environment import Environment
from cachefs.store.index.records import PINNED, Extent, Inode, inode_of_key

RUN_BITS, TAKEOVER_BITS = 40, 28
FIRST_ALIAS = 1 << 62
MAX_RUN = (FIRST_ALIAS >> RUN_BITS) - 1
"""Higher ones would reach the bit that marks an alias."""
_KEY = b"run"


def run_of(number: int) -> int:
    """The run that gave out a version or an alias."""
    return (number & (FIRST_ALIAS - 1)) >> RUN_BITS


def run_of_inode(number: int) -> int:
    """The run that gave out an inode number; 0: it is the source's."""
    return run_of(number) if number & FIRST_ALIAS else 0


@dataclass(frozen=True, slots=True)
class RunState:
    """META `run`: the number of the run, and what the next one may believe."""

    run: int = 0
    floor: int = 0
    clean: bool = True
    boot_id: bytes = bytes(16)
    rctime: bytes = b""
    """Of the source's root when this run began (rctime.py); empty: it has none, or cannot tell anything."""
    unmoved_floor: int = 0
    """The first run that began with this `rctime`, and since which nothing was recorded that was not compared."""

    _CODEC = struct.Struct("<II2Q16s40sQ")

    def pack(self) -> bytes:
        return self._CODEC.pack(PINNED, self.clean, self.run, self.floor, self.boot_id, self.rctime, self.unmoved_floor)

    @classmethod
    def unpack(cls, value: bytes) -> "RunState":
        _, clean, run, floor, boot_id, rctime, unmoved_floor = cls._CODEC.unpack(value.ljust(cls._CODEC.size, b"\0"))
        if len(value) < cls._CODEC.size:  # of a version that did not know the last field: no run is vouched for
            unmoved_floor = run + 1
        return cls(run, floor, bool(clean), boot_id, rctime.rstrip(b"\0"), unmoved_floor)

    def store(self, durable: Environment) -> None:
        with durable.write() as txn:
            txn.put(_KEY, self.pack(), db=durable.tables[Table.META])


def ended(highest: int) -> RunState:
    """What a run leaves behind whose index was made of other things: its number counts, nothing else does."""
    if not 0 <= highest < MAX_RUN:
        raise CacheFsError(f"run {highest} is no number of a run: remove the cache directory to start anew")
    return RunState(highest, highest + 1, clean=False)


def last_run(durable: Environment) -> RunState | None:
    """The last run of this index. None: there was none."""
    with durable.lmdb.begin() as txn:
        value: bytes | None = txn.get(_KEY, db=durable.tables[Table.META])
    if value:
        return RunState.unpack(value)
    highest = _highest_run(durable)
    return ended(highest) if highest else None


def _highest_run(durable: Environment) -> int:
    """The highest run whose numbers this index contains, found the hard way."""
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
    """The sequence numbers of a run. Those of each daemon that takes it over begin 2^28 higher than those of the last.

    A daemon that uses its 2^28 up goes on with those of the next one, and says so: it must be written down where a
    successor finds it.
    """

    def __init__(self, run: int, takeovers: int) -> None:
        """`takeovers`: how many daemons went on with this run after another one had died."""
        self._last = (run << RUN_BITS) + (takeovers << TAKEOVER_BITS)
        self.on_range: Callable[[int], None] = lambda takeovers: None
        """Called with what counts as the number of take-overs from now on."""

    def next(self) -> int:
        """A number that was never given out before, in any run."""
        self._last += 1
        if self._last & (1 << TAKEOVER_BITS) - 1 == 0:
            self.on_range((self._last & (1 << RUN_BITS) - 1) >> TAKEOVER_BITS)
        return self._last

    def next_alias(self, is_free: Callable[[int], bool]) -> int:
        """An inode number that was never given out. `is_free`: it is not in use.

        A cache that was made before runs were restored may contain numbers of this run: those are passed over.
        """
        while not is_free(number := FIRST_ALIAS | self.next()):
            pass
        return number
