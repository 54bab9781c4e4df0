"""Warm-ups in the background: started, listed, awaited and cancelled by requests on the control socket.

Each has a number. The reports of the last ones are kept, so that a client may await one that has ended meanwhile.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import trio

from cachefs.client.client import Report
from cachefs.errors import CacheFsError
from cachefs.prefetch.warm_up import WarmUp

log = logging.getLogger(__name__)

MAX_ENDED = 16
"""How many reports of warm-ups that have ended are kept."""
MAX_NAMED = 3
"""How many paths of a warm-up are listed."""


@dataclass(eq=False)
class BackgroundWarmUp:
    number: int
    work: WarmUp
    paths: Sequence[bytes]
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)
    report: Report | None = None
    """None: it has not ended, was cancelled, or has failed."""
    is_awaited: bool = False
    """Has a client learnt how it ended, or cancelled it?"""

    def as_dict(self) -> dict[str, Any]:
        named = [path.decode(errors="surrogateescape") for path in self.paths[:MAX_NAMED]]
        return {"id": self.number, "paths": named, "path_count": len(self.paths), **asdict(self.work.progress())}


class BackgroundWarmUps:
    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._by_number: dict[int, BackgroundWarmUp] = {}
        """Those that run, and the last that have ended, in the order of their starts."""
        self._last = 0

    def running(self) -> list[dict[str, Any]]:
        return [each.as_dict() for each in self._by_number.values() if not each.ended.is_set()]

    def ended(self) -> list[dict[str, Any]]:
        """Those that no client has awaited."""
        return [each.as_dict() for each in self._by_number.values() if each.ended.is_set() and not each.is_awaited]

    def start(self, work: WarmUp, paths: Sequence[bytes]) -> int:
        self._last += 1
        started = self._by_number[self._last] = BackgroundWarmUp(self._last, work, paths)
        self._nursery.start_soon(self._run, started)
        return started.number

    def get(self, number: int) -> BackgroundWarmUp:
        """Raises CacheFsError if there is none."""
        found = self._by_number.get(number)
        if found is None:
            raise CacheFsError(f"there is no warm-up {number}; `cachefs warmup --list` lists those that run")
        return found

    def cancel(self, number: int) -> None:
        """What was fetched stays cached. Raises as `get`, and if it has ended."""
        found = self.get(number)
        if found.ended.is_set():
            raise CacheFsError(f"warm-up {number} has ended already")
        found.is_awaited = True
        found.scope.cancel()

    async def _run(self, started: BackgroundWarmUp) -> None:
        try:
            with started.scope:
                started.report = await started.work.run(started.paths)
        except Exception:  # the mount continues
            log.exception("bug in a warm-up")
            return
        finally:
            started.ended.set()
            self._forget_old()
        if started.report is None:
            log.info("warm-up %d: cancelled", started.number)
            return
        report = started.report
        log.info("warm-up %d: %d of %d files are cached", started.number, report.cached_files, report.files)
        for problem in report.problems:
            log.warning("warm-up %d: %s", started.number, problem)

    def _forget_old(self) -> None:
        ended = [number for number, each in self._by_number.items() if each.ended.is_set()]
        for number in ended[:-MAX_ENDED]:
            del self._by_number[number]
