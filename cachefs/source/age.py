"""Age: are data that are about to be read certainly of one version? metadata/validity.py decides, and the flag YOUNG of
the record tells both languages.

The kernel sets mtime and ctime before it copies what is written (hazard 25). Data that are read during one write()
contain old and new bytes, and pass every later comparison of times. The clock that sets the times is the source's, or
that of the node that writes, and may be late (hazard 53). So age is observed: a version that may be recent is *young*
until two comparisons show it unchanged. The second one begins `settle_ns` after the first by this machine's monotonic
clock, and reaches the source. Data of a young file are given to the reader and not cached, and the kernel's pages of
them are dropped after `settle_ns` (young_files.py). Not covered: one write() that lasts longer than that, and a clock
that is later than `LATE_NS`.

A version may be recent if its change time is less than `LATE_NS` ago, or in the future. Where this machine's own clock
sets the times, as on a local disk, less than `settle_ns` ago. Where ctime proves nothing (store/filesystem.py) the
later of ctime and mtime counts.

`settle_ns` is an option of the mount; tests use shorter times.
"""

from cachefs.contract.shared import SETTLE_NS
from cachefs.system.clock import NANOSECONDS

LATE_NS = 600 * NANOSECONDS


def recent_ns(settle_ns: int, *, has_own_clock: bool) -> int:
    """How long a version counts as recent. `has_own_clock`: not this machine's sets the times of the source."""
    return LATE_NS if has_own_clock and settle_ns >= SETTLE_NS else settle_ns
