"""Prefetch: what to fetch before it is read. One file a policy, one line here; docs/POLICIES.md has the steps."""

from collections.abc import Callable, Sequence

from policies.prefetch.base import Prefetch
from policies.prefetch.dependency_graph import DependencyGraph, Partition
from policies.prefetch.directory_order import Directory, WholeTree
from policies.prefetch.sequential import NoPrefetch

GRAPH = "graph"
_MAKERS: dict[str, Callable[[Sequence[Partition]], Prefetch]] = {
    "sequential": lambda _: NoPrefetch(),
    "none": lambda _: NoPrefetch(),
    "directory": lambda _: Directory(),
    "all": lambda _: WholeTree(),
    GRAPH: DependencyGraph,
}

NAMES = tuple(_MAKERS)
BEYOND_FILES = ("directory", "all", GRAPH)
"""Those that fetch files which nobody has opened."""
LISTENING = ("directory", GRAPH)
"""Those that must know what is read."""


def make(name: str, graph: Sequence[Partition] = ()) -> Prefetch:
    """Raises KeyError for a name that is not in NAMES."""
    return _MAKERS[name](graph)
