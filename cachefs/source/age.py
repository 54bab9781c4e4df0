"""Age: is what was read of a file just now certain to be one version? The fast path has the same rule
(fastpath/c/cache/age.h).

The kernel sets mtime and ctime before it copies what is written (hazard 25). Data that are read during one write() hold
old and new bytes, and pass every later comparison of times. So data of a *young* file, one that changed less than
`settle_ns` before they are read, are given to the reader and not cached, and the kernel's pages of it are dropped when
it is old enough (young_files.py). A time in the future counts as young: the clock of the source may be ahead of ours,
and nothing is known of when the file changed.

`settle_ns` is an option of the mount, which tests make shorter.
"""

from cachefs.store.index.records import Inode
from cachefs.system.stat import Stat


def until_old_ns(changed: Inode | Stat, now_ns: int, settle_ns: int) -> int:
    """How long until the file is old enough; 0 if it is. Long for times in the future."""
    return max(0, max(changed.mtime_ns, changed.ctime_ns) + settle_ns - now_ns)


def is_young(changed: Inode | Stat, now_ns: int, settle_ns: int) -> bool:
    return until_old_ns(changed, now_ns, settle_ns) > 0


def until_written_ns(changed: Inode | Stat, now_ns: int, settle_ns: int) -> int:
    """How long until a write() has ended that was under way when the file was read, whatever the source's clock is."""
    return min(until_old_ns(changed, now_ns, settle_ns), settle_ns)


def worth_waiting_ns(changed: Inode | Stat, now_ns: int, settle_ns: int) -> int:
    """How long to wait before the data are fetched to be cached; 0 also where the time is too far in the future."""
    wait_ns = until_old_ns(changed, now_ns, settle_ns)
    return wait_ns if wait_ns <= 2 * settle_ns else 0
