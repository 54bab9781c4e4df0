"""Aliases: inode numbers of our own, for objects that cannot have their number in the source here (hazard 10).

Programs keep inode numbers in 32 bits, or in doubles (JavaScript), where two numbers above 2^53 may look like one. So
an alias lies

- just below 2^32, if the object's number in the source is below 2^32,
- just below 2^53 otherwise, and when the lower range is used up.

Our numbers and the source's never meet: an object whose number in the source lies in one of the two ranges gets an
alias, too. There is one exception. An earlier version had no such ranges, so a record that has its number in the source
keeps it. The aliases of earlier versions, from 2^62 on, stay valid in the same way; new ones are not made.

Aliases are given out downwards, and none is given out twice, because of these rules:

- META `aliases` has the lowest alias of each range. The update that gives an alias out writes it, so that a daemon that
  takes over goes on below it. The session keeps a copy, which a lost durable index does not take with it.
- A daemon that cannot know all of its predecessor's aliases leaves the next `LEFT_OUT` of each range out: after a crash
  of the machine, an incomplete session, or the loss of the index.
- A rebuilt index begins below the aliases in the blob, an imported snapshot below those of the exporter, and a damaged
  index that has lost META below those in its records.
"""

import struct
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

from cachefs.contract.index import ROOT_INODE, Table
from cachefs.store.index.environment import Environment, Update, View
from cachefs.store.index.records import FLAGS_PINNED, PINNED, Inode, inode_key, inode_of_key, pair_key
from cachefs.store.runs import FIRST_OLD_ALIAS, RUN_KEY
from cachefs.system.stat import NO_NUMBER, Stat

LOW = range((1 << 32) - (1 << 28), (1 << 32) - 1)
"""Without 2^32 - 1, which 32-bit programs may take for -1."""
HIGH = range(1 << 52, 1 << 53)
LEFT_OUT = 1 << 18
"""More aliases than a daemon gives out before META is in the durable index."""
_KEY, _SESSION_KEY = b"aliases", b"given aliases"
_BY_NUMBER = (Table.INODES, Table.LINKS, Table.DENTRIES, Table.LISTING)
"""Tables whose keys begin with the number of an inode."""
_CODEC = struct.Struct("<I4x2Q")  # flags, then `Given`


class Given(NamedTuple):
    """Which aliases were given out: those from these numbers on."""

    low: int = LOW.stop
    high: int = HIGH.stop

    def pack(self, flags: int = PINNED) -> bytes:
        return _CODEC.pack(flags, *self)

    @classmethod
    def unpack(cls, value: bytes | None) -> "Given":
        return cls(*_CODEC.unpack(value)[1:]) if value else cls()

    def and_those(self, other: "Given") -> "Given":
        return Given(min(self.low, other.low), min(self.high, other.high))

    def and_numbers(self, numbers: Iterable[int]) -> "Given":
        """Numbers of other ranges do not matter."""
        low, high = self
        for number in numbers:
            if number in LOW:
                low = min(low, number)
            elif number in HIGH:
                high = min(high, number)
        return Given(low, high)

    def and_lost_ones(self) -> "Given":
        """Leave out numbers that a predecessor may have given out without a trace."""
        return Given(max(self.low - LEFT_OUT, LOW.start), max(self.high - LEFT_OUT, HIGH.start))

    def not_given(self, source_number: int) -> Iterator[int]:
        """Numbers for an object, the best first. `source_number`: its number in the source."""
        lower = range(self.low - 1, LOW.start - 1, -1) if source_number < 1 << 32 else ()
        return chain(lower, range(self.high - 1, HIGH.start - 1, -1))

    def store(self, durable: Environment) -> None:
        with durable.write() as txn:
            txn.put(_KEY, self.pack(), db=durable.tables[Table.META])


# --- what was given out -----------------------------------------------------------------------------------------------


def recorded(index: Environment | View) -> Given:
    """By the record or its copy in the session: one of them may be lost."""
    given, copy = (Given.unpack(index.get(Table.META, key)) for key in (_KEY, _SESSION_KEY))
    return given.and_those(copy)


def record(update: Update, given: Given) -> None:
    """In the session and, with the next commit, in the durable index."""
    for key, value in ((_KEY, given.pack()), (_SESSION_KEY, given.pack(flags=0))):
        if update.get(Table.META, key) != value:
            update.put(Table.META, key, value)


def recorded_at_start(durable: Environment) -> Given:
    given = recorded(durable)
    return given if durable.get(Table.META, RUN_KEY) else given.and_those(_given_in_records(durable))


def _given_in_records(durable: Environment) -> Given:
    """Reads all of the index."""
    with durable.lmdb.begin() as txn:
        aliases = (inode_of_key(value[8:16]) for _, value in txn.cursor(db=durable.tables[Table.ALIASES]))
        inodes = (Inode.unpack(inode_of_key(key), value) for key, value in txn.cursor(db=durable.tables[Table.INODES]))
        return Given().and_numbers(aliases).and_numbers(each.number for each in inodes if not is_own(each))


# --- numbers of objects -----------------------------------------------------------------------------------------------


def number_of(view: View, now: Stat) -> int:
    """The inode number that an object of the source has here, or would get. 0: an alias that was not given out yet."""
    alias = view.get(Table.ALIASES, pair_key(now.device, now.inode))
    if alias:
        return inode_of_key(alias[8:16])
    if now.device or not ROOT_INODE < now.inode < FIRST_OLD_ALIAS:
        return 0
    if now.inode in LOW or now.inode in HIGH:
        value = view.get(Table.INODES, inode_key(now.inode))
        return now.inode if value and is_own(Inode.unpack(now.inode, value)) else 0
    return now.inode


def is_own(inode: Inode) -> bool:
    """Does this inode have its number in the source?"""
    return inode.device == 0 and inode.number == inode.source_inode


def is_free(update: Update, number: int) -> bool:
    """Is nothing left of an object that had this number: no record, names, children or data?

    Otherwise the next object with this number would inherit it: a directory would show another one's children.
    """
    key = inode_key(number)
    return all(update.first_key(table, key) is None for table in _BY_NUMBER) and not update.extents.has_any(number)


def give(update: Update, now: Stat) -> int:
    """Give an object of the source an alias that no object ever had. It replaces the one that the object has.

    Where inode numbers do not stay (NO_NUMBER), only the name leads to the alias.
    """
    given = recorded(update)
    number = next(filter(partial(is_free, update), given.not_given(now.inode)))
    record(update, given.and_numbers([number]))
    if now.inode != NO_NUMBER:
        update.put(Table.ALIASES, pair_key(now.device, now.inode), FLAGS_PINNED + bytes(4) + inode_key(number))
    return number
