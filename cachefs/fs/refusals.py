"""Refusals: requests that fail because a file is immutable, or is not what was pinned.

A job gets EPERM or ESTALE, and no reason. So the daemon counts each refusal and logs the first one of each path, with
the reason and the remedy.
"""

import errno
import logging
from collections.abc import Callable

from cachefs.metadata.inode_cache import InodeCache
from cachefs.printable import one_line
from cachefs.stats.metrics import Metrics
from cachefs.system.clock import SYSTEM

log = logging.getLogger(__name__)

PERIOD_S = 3600.0
MOST_PATHS = 100
"""How many paths are logged in one period. Each is logged once."""


class Refusals:
    def __init__(
        self, metadata: InodeCache, metrics: Metrics, monotonic_s: Callable[[], float] = SYSTEM.monotonic_s
    ) -> None:
        # dependencies
        self._metadata = metadata
        self._metrics = metrics
        self._monotonic_s = monotonic_s
        # state
        self._logged: set[tuple[int, int]] = set()
        """(inode, errno)"""
        self._ends_s = 0.0

    def immutable(self, number: int) -> None:
        """A change of an immutable file is about to fail with EPERM."""
        self._metrics.refused_changes += 1
        if self._is_first(number, errno.EPERM):
            log.warning(
                "%s: a change was refused with EPERM, because the file is immutable: it was read, warmed up or pinned. "
                "To keep such files mutable, mount with --mutable GLOB. For this file alone, run: "
                "cachefs unpin MOUNTPOINT/%s",
                *2 * [self._path(number)],
            )

    def changed(self, number: int) -> None:
        """A read of an immutable file is about to fail with ESTALE."""
        self._metrics.stale_reads += 1
        if self._is_first(number, errno.ESTALE):
            log.warning(
                "%s: a read failed with ESTALE, because the file has changed at the source since it became immutable. "
                "Open it again to read the new version. If files change while jobs read them, mount with "
                "--mutable GLOB or --profile changing",
                self._path(number),
            )

    def _is_first(self, number: int, error: int) -> bool:
        now_s = self._monotonic_s()
        if now_s >= self._ends_s:
            self._logged.clear()
            self._ends_s = now_s + PERIOD_S
        if (number, error) in self._logged or len(self._logged) >= MOST_PATHS:
            return False
        self._logged.add((number, error))
        return True

    def _path(self, number: int) -> str:
        try:
            with self._metadata.index.view() as view:
                return one_line(self._metadata.paths.path(view, number))
        except OSError:  # no name leads to it any more
            return f"inode {number}"
