"""Computes the hits of a cache of a given size, by replaying a trace through the policies that a mount uses.

Accesses have an order, but no time: an object is cached as soon as it was read. Metadata take no room. An object for
which there is no room is not cached at all. Ideas: caffeine's simulator, libCacheSim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from policies.retention import PolicyContext, make
from policies.retention.opt import OPT


@dataclass(frozen=True)
class Trace:
    """Accesses to objects, which are numbered from 0."""

    accesses: Sequence[int]
    sizes: Sequence[int]
    """Bytes of each object."""
    parts: Sequence[object] = field(default=())
    """The partition or directory of each object; empty: all are in the same."""

    @cached_property
    def total_bytes(self) -> int:
        """The size of all objects, which is that of a cache that holds everything."""
        return sum(self.sizes)

    @cached_property
    def next_uses(self) -> list[int]:
        """For each access: the position of the next access to the same object; len(accesses) if there is none."""
        following = [len(self.accesses)] * len(self.sizes)
        uses = [0] * len(self.accesses)
        for position in range(len(self.accesses) - 1, -1, -1):
            key = self.accesses[position]
            uses[position], following[key] = following[key], position
        return uses


@dataclass(frozen=True, slots=True)
class Outcome:
    hits: int
    hit_bytes: int
    accesses: int
    bytes: int

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.accesses if self.accesses else 0.0

    @property
    def byte_hit_ratio(self) -> float:
        return self.hit_bytes / self.bytes if self.bytes else 0.0


def simulate(trace: Trace, retention: str, capacity_bytes: int, *, counted_from: int = 0) -> Outcome:
    """`retention`: a name of `policies.retention`. `counted_from`: earlier accesses only warm the cache."""
    sizes, accesses = trace.sizes, trace.accesses
    uses = trace.next_uses if retention == "opt" else ()
    part_of = trace.parts.__getitem__ if trace.parts else lambda _: 0
    policy = make(retention, PolicyContext(part_of, uses))
    foreseeing = policy if isinstance(policy, OPT) else None
    accessed, inserted, removed, next_victim = policy.accessed, policy.inserted, policy.removed, policy.victim
    cached = bytearray(len(sizes))
    used = hits = hit_bytes = 0
    for position, key in enumerate(accesses):
        if foreseeing is not None:
            foreseeing.now = position
        accessed(key)
        if cached[key]:
            if position >= counted_from:
                hits += 1
                hit_bytes += sizes[key]
            continue
        size = sizes[key]
        if size > capacity_bytes:
            continue
        while used + size > capacity_bytes:
            victim = next_victim()
            if victim is None:
                break
            removed(victim)
            cached[victim] = 0
            used -= sizes[victim]
        else:
            inserted(key)
            cached[key] = 1
            used += size
    counted = accesses[counted_from:]
    return Outcome(hits, hit_bytes, len(counted), sum(map(sizes.__getitem__, counted)))
