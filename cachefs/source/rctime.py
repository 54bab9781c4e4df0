"""CephFS: has anything beneath the source's root changed since the cache was made? One number tells.

`ceph.dir.rctime` of a directory is the latest ctime beneath it. Each run records that of the root when it begins
(`RunState.rctime`), and the first run since which it has not moved (`unmoved_floor`): records that were compared in
that run or later are valid if the number is the same now. But the number may lag behind:

- It follows a change after 5 to 10 s, because the MDS propagates it from directory to directory, and learns of a
  client's writes when that client gives up its caps. Therefore a run that finds the number unchanged compares at first,
  as with `lazy`. Earlier runs are valid only if the number is still the same after `grace_s`: by then it shows every
  change that was made before the run began, and would show later ones as well.
- ctimes come from the clocks of the nodes. A change that a node with a late clock makes just after the latest change
  does not move the number. Therefore the number is used only if it was older than `grace_s` when it was recorded: then
  clocks that differ by less than that cannot hide a change.

Changes by this mount move the number, too: the next run compares.

The number does not show everything, so some records are compared in each run nevertheless (`strict_floor` and
`links_floor` in metadata/validity.py):

- CephFS counts a file with several names where its first name is, which may be outside the source, regardless of the
  name that it is changed by. Files with several names are compared. So are objects of filesystems mounted beneath.
- The number does not cover records that a run took over without a comparison: those of a metadata snapshot, and those
  that are valid because of `never` (`unmoved_floor` is above such a run).

A limitation remains: while a client writes to a file without a pause of a few seconds, and no other client looks at the
file, the MDS does not learn of the changes. Such a file may appear as it was recorded until the writer pauses or closes
it and the mount begins again. No read mixes both versions, because fetched data are compared.
"""

import errno
import logging
from collections.abc import Callable

_NAME = b"ceph.dir.rctime"
_ABSENT = frozenset({errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
log = logging.getLogger(__name__)


def ask(getxattr: Callable[[bytes], bytes]) -> bytes:
    """The rctime of the source's root; empty if it has none. Raises OSError if the source does not answer."""
    try:
        value = getxattr(_NAME).rstrip(b"\0")
        float(value)
    except OSError as error:
        if error.errno in _ABSENT:
            return b""
        raise
    except ValueError:
        log.warning("the source returns %r for %s, which is not a time", value, _NAME.decode())
        return b""
    return value


def recordable(value: bytes, now_s: float, grace_s: float) -> bytes:
    """`value`, or empty if it is too young to be used."""
    return value if value and now_s - float(value) > grace_s else b""
