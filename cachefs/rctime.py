"""CephFS: has nothing beneath the source's root changed since the cache was made? One number says so.

`ceph.dir.rctime` of a directory is the latest ctime beneath it. Each run records that of the root when it begins
(`RunState.rctime`), and the first run since which it has stood still (`unmoved_floor`): what was compared in that run
or later is as it is at the source, if the number is the same now. But the number may be behind:

- It follows a change by 5 to 10 s, because the MDS passes it up from directory to directory, and hears of what a
  client writes when that client gives up its caps. Therefore a run that finds the number where it was compares at
  first, as with `lazy`, and believes only when the number is still the same after `grace_s`: by then it shows all that
  had been changed when the run began, and what changed since would show as well.
- ctimes come from the clocks of the nodes. A change that a node with a late clock makes just after the latest one does
  not move the number. Therefore it counts only if it was older than `grace_s` when it was recorded: clocks that differ
  by less cannot hide anything then.

What this mount changes itself moves the number, too: the next run compares.

It says nothing of what is changed by a name outside the source, where a file has several, nor of another filesystem
that is mounted beneath. Therefore it is not the default.
"""

import errno
import logging
from collections.abc import Callable

_NAME = b"ceph.dir.rctime"
_ABSENT = frozenset({errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
log = logging.getLogger(__name__)


def ask(getxattr: Callable[[bytes], bytes]) -> bytes:
    """What the source says of its root; empty where it has no such number. Raises OSError where it does not answer."""
    try:
        value = getxattr(_NAME).rstrip(b"\0")
        float(value)
    except OSError as error:
        if error.errno in _ABSENT:
            return b""
        raise
    except ValueError:
        log.warning("the source says %r of %s: not a time", value, _NAME.decode())
        return b""
    return value


def recordable(value: bytes, now_s: float, grace_s: float) -> bytes:
    """`value`, or empty where it is too young to tell anything."""
    return value if value and now_s - float(value) > grace_s else b""
