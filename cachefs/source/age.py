"""Age: are data that were just read certainly of one version? The fast path has the same rule
(fastpath/c/cache/age.h).

The kernel sets mtime and ctime before it copies what is written (hazard 25). Data that are read during one write()
contain old and new bytes, and pass every later comparison of times. A file is *young* if it changed less than
`settle_ns` ago. Data of a young file are given to the reader and not cached, and the kernel's pages of it are dropped
when it is old enough (young_files.py). A file whose time is in the future is young, too: the clock of the source may be
ahead of ours, so that it is not known when the file changed.

`settle_ns` is an option of the mount; tests use shorter times.
"""

from cachefs.store.index.records import Inode
from cachefs.system.stat import Stat


def until_old_ns(changed: Inode | Stat, now_ns: int, settle_ns: int) -> int:
    """The time until the file is old enough; 0 if it is. Long for times in the future."""
    return max(0, max(changed.mtime_ns, changed.ctime_ns) + settle_ns - now_ns)


def is_young(changed: Inode | Stat, now_ns: int, settle_ns: int) -> bool:
    return until_old_ns(changed, now_ns, settle_ns) > 0


def until_written_ns(changed: Inode | Stat, now_ns: int, settle_ns: int) -> int:
    """The time until a write() that was under way at the read has ended, whatever the clock of the source says."""
    return min(until_old_ns(changed, now_ns, settle_ns), settle_ns)


def worth_waiting_ns(changed: Inode | Stat, now_ns: int, settle_ns: int) -> int:
    """How long to wait before data are fetched and cached; 0 also if the time is too far in the future."""
    wait_ns = until_old_ns(changed, now_ns, settle_ns)
    return wait_ns if wait_ns <= 2 * settle_ns else 0
