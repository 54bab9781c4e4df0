"""The patterns of `--mutable` of the last run: what was pinned with other patterns is compared."""

import os
from collections.abc import Iterable

from cachefs.contract.index import Table
from cachefs.options import DEFAULT_NAME
from cachefs.store.index.environment import Environment
from cachefs.store.index.records import FLAGGED_NUMBER, FLAGS_PINNED, PINNED

_KEY = b"mutable"
_SINCE_KEY = b"mutable-since"


def last(durable: Environment) -> set[str]:
    """`--mutable` of the last run."""
    patterns = (durable.get(Table.META, _KEY) or FLAGS_PINNED)[len(FLAGS_PINNED) :]
    return set(map(os.fsdecode, patterns.split(b"\0"))) if patterns else set()


def only_loses_defaults(before: Iterable[str], now: Iterable[str]) -> bool:
    """Are these patterns of two mounts the same, but for default names that the second one does not have?

    What the first one has pinned then holds for the second one, as for a read-only mount after a read-write one.
    """
    lost = set(before) - set(now)
    return set(now) <= set(before) and all(pattern.startswith(DEFAULT_NAME) for pattern in lost)


def since(durable: Environment) -> int:
    """The run in which the patterns last changed."""
    value = durable.get(Table.META, _SINCE_KEY)
    return int(FLAGGED_NUMBER.unpack(value)[1]) if value else 0


def store(durable: Environment, patterns: Iterable[str], since_run: int) -> None:
    """`since_run`: the run in which they last changed."""
    with durable.write() as txn:
        value = FLAGS_PINNED + b"\0".join(os.fsencode(pattern) for pattern in sorted(set(patterns)))
        txn.put(_KEY, value, db=durable.tables[Table.META])
        txn.put(_SINCE_KEY, FLAGGED_NUMBER.pack(PINNED, since_run), db=durable.tables[Table.META])
