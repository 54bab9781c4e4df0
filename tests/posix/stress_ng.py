"""stress-ng: its stressors of the class `filesystem`, one after the other, each checking what it does."""

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.posix.suite import Job, Outcome, Results, Suite

_ELSEWHERE = {
    "bind-mount", "binderfs", "dup", "eventfd", "procfs", "ioprio",
}  # fmt: skip
"""Not on the directory that it is given."""
_SECONDS, _SECONDS_SHORT = 2, 1


def build(_: Path, place: Path) -> None:
    done = subprocess.run(["stress-ng", "--class", "filesystem?"], stdout=subprocess.PIPE, text=True, check=True)
    (place / "stressors").write_text(done.stdout.partition(":")[2])


def version(_: Path) -> str:
    done = subprocess.run(["stress-ng", "--version"], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split()[2]


def reader(name: str) -> Callable[[str, int], Results]:
    def read(output: str, status: int) -> Results:
        if status in (0, 3, 4) and re.search(r"not implemented|skipped: [1-9]|skipping", output):
            return {name: Outcome.SKIPPED}
        failed = status or re.search(r"\bfail:", output)
        return {name: Outcome.FAILED if failed else Outcome.PASSED}

    return read


def jobs(place: Path, directory: Path, short: bool) -> Iterator[Job]:
    seconds = str(_SECONDS_SHORT if short else _SECONDS)
    for stressor in (place / "stressors").read_text().split():
        if stressor in _ELSEWHERE:
            continue
        sizes = {
            "hdd": ("--hdd-bytes", "16M"),
            "iomix": ("--iomix-bytes", "16M"),
            "fallocate": ("--fallocate-bytes", "16M"),
            "copy-file": ("--copy-file-bytes", "128M"),
            "sync-file": ("--sync-file-bytes", "16M"),
            "dirdeep": ("--dirdeep-inodes", "2000"),
        }.get(stressor, ())
        command = (
            "stress-ng", f"--{stressor}", "1", *sizes, "--timeout", seconds, "--verify", "--seed", "1",
            "--temp-path", directory / stressor,
        )  # fmt: skip
        yield Job(stressor, command, reader(stressor), timeout_s=90)


SUITE = Suite(build, jobs, version)
