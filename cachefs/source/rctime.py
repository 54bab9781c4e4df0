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

The number does not show everything, so that some things are compared in each run all the same (`strict_floor`):

- CephFS counts a file with several names where its first name is, which may be outside the source, whichever of its
  names it is changed by. Files with several names are compared. So are objects of other filesystems mounted beneath.
- What a run recorded that had not compared it is vouched for by nothing: what it was given by a metadata snapshot, and
  what `never` believes (`unmoved_floor` is above such a run).

What remains: while a client writes to a file without a pause of a few seconds, and nobody else looks at the file, the
MDS does not hear of it. Such a file may be shown as it was recorded until the writer pauses or closes it and the mount
begins again; no read mixes the two, because whatever is fetched is compared.
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
