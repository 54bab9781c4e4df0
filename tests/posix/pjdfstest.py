"""github.com/pjd/pjdfstest: what POSIX says of names, modes, owners and times; one test each sub-test."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.posix.suite import Job, Outcome, Results, Suite, described

_HAVE = (
    "SYS_SYSMACROS_H FACCESSAT FCHMODAT FCHOWNAT FSTATAT LINKAT MKDIRAT MKFIFOAT MKNODAT OPENAT POSIX_FALLOCATE "
    "READLINKAT RENAMEAT SYMLINKAT UNLINKAT UTIMENSAT STRUCT_STAT_ST_ATIM STRUCT_STAT_ST_CTIM STRUCT_STAT_ST_MTIM"
)
"""What its configure script finds on Linux with glibc."""


def build(sources: Path, place: Path) -> None:
    """Its program and its scripts.

    Some of its tests run only on filesystems of certain types, for which they ask df: it gives the type of the disk
    for each mount.
    """
    (place / "config.h").write_text("".join(f"#define HAVE_{name} 1\n" for name in _HAVE.split()))
    command = ["cc", "-O1", "-w", "-D_GNU_SOURCE", f"-I{place}", sources / "pjdfstest.c", "-o", place / "pjdfstest"]
    subprocess.run(command, check=True)
    shutil.copytree(sources / "tests", place / "tests")
    (place / "bin").mkdir()
    df = place / "bin/df"
    df.write_text(f"#!/bin/sh\nexec {shutil.which('df')} -PT {shlex.quote(str(place))}\n")
    df.chmod(0o755)


def reader(name: str) -> Callable[[str, int], Results]:
    def read(output: str, _: int) -> Results:
        found = re.findall(r"^(not )?ok (\d+)(.*# TODO)?", output, re.MULTILINE)
        results = {
            f"{name}:{number}": Outcome.FAILED if bad and not todo else Outcome.PASSED for bad, number, todo in found
        }
        plan = re.search(r"^1\.\.(\d+)", output, re.MULTILINE)
        for number in range(len(found) + 1, int(plan[1]) + 1 if plan else 1):
            results[f"{name}:{number}"] = Outcome.FAILED  # it ended before them
        return results

    return read


def jobs(place: Path, _: Path, short: bool) -> Iterator[Job]:
    for test in sorted((place / "tests").glob("*/*.t")):
        name = f"{test.parent.name}/{test.stem}"
        if short and test.parent.name not in ("rename", "unlink"):
            continue
        yield Job(
            name,
            ("sh", test),
            reader(name),
            timeout_s=600,
            group=test.parent.name,
            directory="work",
            environment={"PATH": f"{place}/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
        )


SUITE = Suite(build, jobs, described, sources="pjdfstest", churned=True)
