"""Calls that are kept while it is not known whether the source is gone.

After the source was mounted anew, calls by its old root fail with ENOTCONN. A call that fails like this is kept until
the root has been checked (daemon/kernel/source_connection.py). Places for kept calls are shared by owner, as slots are.
"""

import errno
from collections.abc import Iterator
from typing import Any

from cachefs.source.calls.call import Call
from cachefs.source.identity import Changed
from cachefs.source.shares import Shares

MAX_KEPT = 512
"""Calls that may be kept; more fail at once."""
LOST_ERRORS = frozenset({errno.ENOTCONN, errno.ESTALE, errno.ESHUTDOWN, errno.ECONNABORTED})
"""Errors of the kernel if the mount of a descriptor is gone; ECONNABORTED for calls that were under way."""
FAILURES = LOST_ERRORS - {errno.ESTALE} | {
    errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EIO, errno.ENETDOWN, errno.ENETUNREACH,
    errno.EREMOTEIO, errno.ETIMEDOUT,
}  # fmt: skip
"""Errors of the source itself, not of the requested object. ESTALE, too, unless it is the result of a comparison."""


def may_be_lost(error: BaseException) -> bool:
    """Does this error of a call mean that the source may be gone?"""
    return isinstance(error, OSError) and error.errno in LOST_ERRORS and not isinstance(error, Changed)


class KeptCalls:
    def __init__(self, reserve: int) -> None:
        self._kept: dict[Call[Any], None] = {}
        self._places = Shares(MAX_KEPT, reserve)

    def __iter__(self) -> Iterator[Call[Any]]:
        return iter(self._kept)

    def keep(self, call: Call[Any]) -> bool:
        """False: too many calls of its owner are kept."""
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
