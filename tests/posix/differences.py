"""Where a mount may do otherwise than the disk underneath, and why. docs/TESTING.md says the same in more words."""

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Difference:
    tests: str
    """Pattern for SUITE/TEST."""
    why: str
    fuse: bool
    """Every filesystem on FUSE has it: bindfs as well."""
    places: str = "*"


_FALLOCATE = "fallocate is not supported on read-write mounts"
_TMPFILE = "O_TMPFILE is not supported"
_FLAGS = "FUSE passes FS_IOC_SETFLAGS on; neither bindfs nor cachefs takes it"
DIFFERENCES = (
    Difference("ltp/fallocate0[13]", _FALLOCATE, True),
    Difference("ltp/mremap06", _FALLOCATE, True),
    Difference("stress-ng/fsize", _FALLOCATE + ": the size limit of the process is not asked for it", True),
    Difference("ltp/openat03", _TMPFILE, True),
    Difference("libfuse/*/create tmpfile", _TMPFILE, True),
    Difference("libfuse/*/create and link tmpfile", _TMPFILE, True),
    Difference("ltp/lseek11", "SEEK_HOLE and SEEK_DATA see no holes", True),
    Difference("ltp/setxattr03", _FLAGS, True),
    Difference("stress-ng/fiemap", "FUSE has no FIEMAP", True),
)


def explained(test: str, place: str) -> Difference | None:
    for difference in DIFFERENCES:
        if fnmatchcase(test, difference.tests) and fnmatchcase(place, difference.places):
            return difference
    return None
