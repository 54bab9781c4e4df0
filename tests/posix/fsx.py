"""fsx of xfstests: random operations on one file, compared with what was written after each read.

It asks the filesystem first which kinds of fallocate it has, and leaves the others out.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.posix.suite import Job, Suite, by_status, described

_HAVE = (
    "ASSERT_H DIRENT_H ERRNO_H ERR_H FCNTL_H LINUX_FALLOC_H MALLOC_H STDLIB_H STRINGS_H STRING_H SYS_IOCTL_H "
    "SYS_MMAN_H SYS_PARAM_H SYS_STATVFS_H SYS_STAT_H SYS_TIME_H SYS_TYPES_H SYS_WAIT_H UNISTD_H"
)
_DIRECT = ("-Z", "-R", "-W", "-r4096", "-w4096", "-t4096")
FORMS: dict[str, tuple[str, ...]] = {
    "read-write-mmap": (),
    "reopened": ("-c", "50", "-f"),
    "sync-after-each": ("-y",),
    "direct": _DIRECT,
    "aio": ("-A",),
    "aio-direct": ("-A", *_DIRECT),
}
OPERATIONS, OPERATIONS_SHORT = 500_000, 10_000
"""In each place, all forms together: 10^6 for each mode, with the fast path and without."""


def build(sources: Path, place: Path) -> None:
    (place / "config.h").write_text("".join(f"#define HAVE_{name} 1\n" for name in ("STDC_HEADERS", *_HAVE.split())))
    options = ["-O1", "-w", "-include", "getopt.h", "-D_GNU_SOURCE", "-DAIO", "-DFALLOCATE", "-DHAVE_COPY_FILE_RANGE"]
    include = [f"-I{place}", f"-I{sources}/src", f"-I{sources}/include"]
    subprocess.run(["cc", *options, *include, sources / "ltp/fsx.c", "-laio", "-o", place / "fsx"], check=True)


def jobs(place: Path, _: Path, short: bool) -> Iterator[Job]:
    operations = (OPERATIONS_SHORT if short else OPERATIONS) // len(FORMS)
    for seed, (name, options) in enumerate(FORMS.items(), start=1):
        command = (place / "fsx", "-q", "-S", str(seed), "-N", str(operations), *options, "file")
        yield Job(name, command, by_status(name), timeout_s=120 if short else 1800)


SUITE = Suite(build, jobs, described, sources="xfstests")
