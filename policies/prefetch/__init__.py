"""Prefetch: what to fetch ahead of reads. A policy is one file, and one line here; docs/POLICIES.md has the steps."""

from collections.abc import Callable, Sequence

from policies.prefetch.base import Prefetch
from policies.prefetch.dependency_graph import DependencyGraph, Partition
from policies.prefetch.directory_order import Directory, WholeTree

GRAPH = "graph"
_MAKERS: dict[str, Callable[[Sequence[Partition]], Prefetch]] = {
    "sequential": lambda _: Prefetch(),
    "none": lambda _: Prefetch(),
    "directory": lambda _: Directory(),
    "all": lambda _: WholeTree(),
    GRAPH: DependencyGraph,
}

NAMES = tuple(_MAKERS)
BEYOND_FILES = ("directory", "all", GRAPH)
"""Policies that fetch files that are not open."""
LISTENING = ("directory", GRAPH)
"""Policies that must know what is read."""


def make(name: str, graph: Sequence[Partition] = ()) -> Prefetch:
    """Raises KeyError for a name that is not in NAMES."""
    return _MAKERS[name](graph)
