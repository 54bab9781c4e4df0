"""Retention: what to evict to make room. A policy is one file, and one line here; docs/POLICIES.md has the steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from policies.retention.base import Retention
from policies.retention.fifo import FIFO
from policies.retention.lru import LRU
from policies.retention.no_replacement import NoReplacement
from policies.retention.opt import OPT
from policies.retention.retire import RetireWhenDone


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """Arguments of some policies."""

    part_of: Callable[[Any], object] = lambda key: key
    """The partition or directory of an object."""
    next_uses: Sequence[int] = ()
    """For each access of a trace, the next one to the same object; empty on a mount."""


_MAKERS: dict[str, Callable[[PolicyContext], Retention[Any]]] = {
    "no-replacement": lambda _: NoReplacement(),
    "lru": lambda _: LRU(),
    "fifo": lambda _: FIFO(),
    "retire": lambda context: RetireWhenDone(context.part_of),
    "opt": lambda context: OPT(context.next_uses),
}

NAMES = tuple(_MAKERS)
MOUNTABLE = tuple(name for name in NAMES if name != "opt")
"""Policies that do not need to know the future."""


def make(name: str, context: PolicyContext | None = None) -> Retention[Any]:
    """Raises KeyError for a name that is not in NAMES."""
    return _MAKERS[name](context or PolicyContext())
