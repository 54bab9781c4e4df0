"""Latencies of requests, by kind: histograms with four buckets per power of two, from a microsecond on.

The fast path has the same buckets (common/latency.h), so that both can be added. The error of a quantile is at most an
eighth.
"""

from collections.abc import Sequence

from cachefs.contract.shared import LATENCY_BUCKETS, LATENCY_FIRST_BIT, LATENCY_KINDS

KINDS, BUCKETS, FIRST_BIT = LATENCY_KINDS, LATENCY_BUCKETS, LATENCY_FIRST_BIT

Histogram = list[int]
"""The sum in nanoseconds, then the number of requests in each bucket."""


def bucket(ns: int) -> int:
    top = ns.bit_length() - 1
    if top < FIRST_BIT:
        return 0
    return min((top - FIRST_BIT) * 4 + (ns >> (top - 2) & 3), BUCKETS - 1)


def bound_s(number: int) -> float:
    """The upper bound of a bucket, in seconds."""
    octave, quarter = divmod(number, 4)
    return (1 << FIRST_BIT + octave) * (5 + quarter) / 4 / 1e9


class Latencies:
    """The histograms of one process."""

    def __init__(self) -> None:
        self.by_kind: dict[str, Histogram] = {kind: [0] * (1 + BUCKETS) for kind in KINDS}

    def note(self, kind: str, ns: int) -> None:
        histogram = self.by_kind[kind]
        histogram[0] += ns
        histogram[1 + bucket(ns)] += 1


def added(histograms: Sequence[dict[str, Histogram]]) -> dict[str, Histogram]:
    return {kind: [sum(column) for column in zip(*(h[kind] for h in histograms), strict=True)] for kind in KINDS}


def quantile_s(histogram: Sequence[int], share: float) -> float:
    """In seconds; 0 without requests."""
    counts = histogram[1:]
    wanted = share * sum(counts)
    seen = 0
    for number, count in enumerate(counts):
        seen += count
        if count and seen >= wanted:
            before = bound_s(number - 1) if number else 0.0
            return (before + bound_s(number)) / 2
    return 0.0
