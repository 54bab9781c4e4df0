"""Calls that are kept while it is not known whether the source has gone.

A source that was mounted anew answers ENOTCONN to calls by its old root. A call that fails like that is kept until the
root has been asked (daemon/kernel/source_connection.py). Kept calls are shared by owner, as slots are.
"""

import errno
from collections.abc import Iterator
from typing import Any

from cachefs.source.calls.call import Call
from cachefs.source.identity import Changed
from cachefs.source.shares import Shares

MAX_KEPT = 512
"""Calls that wait for a source that has gone; more fail at once."""
LOST_ERRORS = frozenset({errno.ENOTCONN, errno.ESTALE, errno.ESHUTDOWN, errno.ECONNABORTED})
"""What the kernel says when the mount behind a descriptor has gone; ECONNABORTED to calls that were under way."""
FAILURES = LOST_ERRORS - {errno.ESTALE} | {
    errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EIO, errno.ENETDOWN, errno.ENETUNREACH,
    errno.EREMOTEIO, errno.ETIMEDOUT,
}  # fmt: skip
"""Errors of the source itself, not of what was asked for. ESTALE counts where no comparison said so."""


def may_be_lost(error: BaseException) -> bool:
    """Does this error of a call mean that the source may have gone?"""
    return isinstance(error, OSError) and error.errno in LOST_ERRORS and not isinstance(error, Changed)


class KeptCalls:
    def __init__(self, reserve: int) -> None:
        self._kept: dict[Call[Any], None] = {}
        self._places = Shares(MAX_KEPT, reserve)

    def __iter__(self) -> Iterator[Call[Any]]:
        return iter(self._kept)

    def keep(self, call: Call[Any]) -> bool:
        """False: there are too many of its owner."""
        if self._places.is_full(call.owner):
            return False
        self._places.take(call.owner)
        self._kept[call] = None
        return True

    def drop(self, call: Call[Any]) -> bool:
        """False: it is not kept."""
        if call not in self._kept:
            return False
        del self._kept[call]
        self._places.give(call.owner)
        return True

    def take_all(self) -> list[Call[Any]]:
        kept = list(self._kept)
        for call in kept:
            self.drop(call)
        return kept
