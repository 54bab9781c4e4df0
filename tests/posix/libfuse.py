"""test_syscalls of libfuse: what its own examples are tested with. One test each line that it prints."""

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.posix.suite import Job, Outcome, Results, Suite, described


def build(sources: Path, place: Path) -> None:
    (place / "fuse_config.h").write_text("#define HAVE_COPY_FILE_RANGE 1\n#define HAVE_STATX 1\n")
    source, program = sources / "test/test_syscalls.c", place / "test_syscalls"
    subprocess.run(["cc", "-O1", "-w", "-D_GNU_SOURCE", f"-I{place}", source, "-lpthread", "-o", program], check=True)


def reader(form: str) -> Callable[[str, int], Results]:
    def read(output: str, status: int) -> Results:
        # what it leaves without a word it has found not to be supported
        silent = Outcome.FAILED if status else Outcome.SKIPPED
        begun = dict.fromkeys(re.findall(r"^\+ +[\d.]+s +\d+ \[(.*)\] START$", output, re.MULTILINE), silent)
        begun |= dict.fromkeys(re.findall(r"^\+ +[\d.]+s +\d+ \[(.*)\] OK$", output, re.MULTILINE), Outcome.PASSED)
        results = {f"{form}/{name}": outcome for name, outcome in begun.items()}
        return results | {form: Outcome.FAILED if status else Outcome.PASSED}

    return read


def jobs(place: Path, directory: Path, _: bool) -> Iterator[Job]:
    for form, options in {"named": (), "unlinked": ("-u",)}.items():
        yield Job(form, (place / "test_syscalls", directory / form, *options), reader(form), timeout_s=120)


SUITE = Suite(build, jobs, described, sources="libfuse")
