"""Resource limits (getrlimit(2)) that a daemon inherits from its starter, which may be a shell on a login node.

The daemon raises them before anything else, so that the fast path and the notifier inherit what it has. A hard limit
can be raised only with CAP_SYS_RESOURCE.

Not touched: RLIMIT_CORE, because a core file contains data of the source. RLIMIT_RSS and RLIMIT_LOCKS have no effect.
"""

import resource
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cachefs.contract.index import MAP_BYTES
from cachefs.errors import CacheFsError

_STACK_BYTES = 8 << 20
"""Of each thread: what Linux gives to a process by default."""
_WANTED = {resource.RLIMIT_NOFILE: lambda: min(512 << 10, int(Path("/proc/sys/fs/nr_open").read_text()))}
"""Hard limits that cannot be infinite."""
_UNUSED = (
    resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_NICE, resource.RLIMIT_RTPRIO,
    resource.RLIMIT_SIGPENDING,
)  # fmt: skip


@dataclass(frozen=True)
class _Limit:
    number: int
    option: str
    """Of ulimit, the command of shells."""
    enough: int
    """RLIM_INFINITY: nothing less is enough."""
    effect: str
    """Of a lower limit."""

    def is_low(self) -> bool:
        value = resource.getrlimit(self.number)[0]
        return value != resource.RLIM_INFINITY and (self.enough == resource.RLIM_INFINITY or value < self.enough)

    def __str__(self) -> str:
        value = resource.getrlimit(self.number)[0]
        shown = value >> 10 if self.option in ("-v", "-d", "-f", "-s") else value  # bash counts KiB
        return f"cannot raise a limit of the starting process (ulimit {self.option} {shown}): {self.effect}"


_NEEDED = (
    _Limit(resource.RLIMIT_AS, "-v", 3 * MAP_BYTES, "the index needs 3 TiB of address space"),
    _Limit(resource.RLIMIT_FSIZE, "-f", 1 << 30, "the memory that processes share, and the cache, need files of 1 GiB"),
)  # fmt: skip
_LIMITS = (
    _Limit(resource.RLIMIT_CPU, "-t", resource.RLIM_INFINITY, "the kernel ends the daemon after that time"),
    _Limit(resource.RLIMIT_DATA, "-d", 4 << 30, "the daemon may run out of memory"),
    _Limit(resource.RLIMIT_FSIZE, "-f", resource.RLIM_INFINITY, "larger files cannot be written, nor a larger cache"),
    _Limit(resource.RLIMIT_NPROC, "-u", 1024, "the daemon may be refused threads, and calls then wait"),
    _Limit(resource.RLIMIT_RTTIME, "-R", resource.RLIM_INFINITY, "the kernel ends a real-time process"),
    _Limit(resource.RLIMIT_STACK, "-s", 1 << 20, "threads may crash"),
    _Limit(resource.RLIMIT_NOFILE, "-n", 4096, "few files can be open at once"),
)  # fmt: skip


def reset() -> list[str]:
    """Raise all limits as far as possible. Returns a line for each that stays too low.

    Raises CacheFsError if the daemon cannot work with one.
    """
    for number in (*_UNUSED, *(limit.number for limit in (*_NEEDED, *_LIMITS))):
        hard = resource.getrlimit(number)[1]
        highest = _higher(hard, _WANTED[number]() if number in _WANTED else resource.RLIM_INFINITY)
        _set(number, (highest, highest), (hard, hard))
    # Stacks of threads have the size of the soft limit at the start of their program, so it must not be high.
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    _set(resource.RLIMIT_STACK, (_STACK_BYTES, hard), (hard, hard))
    threading.stack_size(_STACK_BYTES)
    if needed := [str(limit) for limit in _NEEDED if limit.is_low()]:
        raise CacheFsError("; ".join(needed))
    return [str(limit) for limit in _LIMITS if limit.is_low()]


def _higher(one: int, other: int) -> int:
    return resource.RLIM_INFINITY if resource.RLIM_INFINITY in (one, other) else max(one, other)


def _set(number: int, *choices: tuple[int, int]) -> None:
    """Set the first pair of soft and hard limit that the kernel accepts."""
    for choice in choices:
        with suppress(OSError, ValueError):  # ValueError: without CAP_SYS_RESOURCE, or soft above hard
            resource.setrlimit(number, choice)
            return
