"""Threads on a machine that may refuse them: a limit on tasks (cgroup, RLIMIT_NPROC), or no memory for a stack."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio

T = TypeVar("T")
RETRY_S = 0.1
_REFUSED = "can't start new thread"


def is_refused(error: RuntimeError) -> bool:
    """Did the machine refuse a thread? Python has no exception class for that."""
    return str(error) == _REFUSED


@contextmanager
def refusal_is_shortage() -> Iterator[None]:
    """A refused thread raises OSError (EAGAIN), as a refused process does."""
    try:
        yield
    except RuntimeError as error:
        if not is_refused(error):
            raise
        raise OSError(errno.EAGAIN, str(error)) from error


async def in_thread(
    function: Callable[[], T], *, abandon_on_cancel: bool = False, limiter: trio.CapacityLimiter | None = None
) -> T:
    """`trio.to_thread.run_sync`, repeated as long as the machine refuses a thread."""
    while True:
        try:
            return await trio.to_thread.run_sync(function, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
        except RuntimeError as error:
            if not is_refused(error):
                raise
        await trio.sleep(RETRY_S)
