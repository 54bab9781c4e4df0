"""Prefetch: what to fetch before it is read. One file a policy, one line here; docs/POLICIES.md has the steps."""

from collections.abc import Callable

from policies.prefetch.base import Prefetch
from policies.prefetch.directory_order import Directory, WholeTree
from policies.prefetch.sequential import NoPrefetch

_MAKERS: dict[str, Callable[[], Prefetch]] = {
    "sequential": NoPrefetch,
    "none": NoPrefetch,
    "directory": Directory,
    "all": WholeTree,
}

NAMES = tuple(_MAKERS)
BEYOND_FILES = ("directory", "all")
"""Those that fetch files which nobody has opened."""


def make(name: str) -> Prefetch:
    """Raises KeyError for a name that is not in NAMES."""
    return _MAKERS[name]()
