"""Writing through a read-write mount, over a directory on this machine, interleaved with another way to write.

    python -m benchmarks.writes [--rounds N]

Small writes: against bindfs, which takes each write to the source before it returns, as cachefs does. A checkpoint:
against the source itself, because bindfs gets large writes in pieces of 4 KiB.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

from benchmarks.harness import Comparison, bindfs, mounted, report

SMALL_FILES, SMALL_BYTES = 1000, 4096
LINES, LINE_BYTES = 3000, 200
CHECKPOINT_BYTES, BLOCK_BYTES = 512 << 20, 1 << 20


def small_files(place: Path) -> None:
    """Results of a preprocessing step."""
    data = os.urandom(SMALL_BYTES)
    for number in range(SMALL_FILES):
        (place / f"{number}").write_bytes(data)


def log_lines(place: Path) -> None:
    """A log, each line at once."""
    line = b"x" * (LINE_BYTES - 1) + b"\n"
    with open(place / "log", "ab", buffering=0) as log:
        for _ in range(LINES):
            log.write(line)


def checkpoint(place: Path) -> None:
    """One large file, written in blocks, synced, and renamed."""
    block = os.urandom(BLOCK_BYTES)
    with open(place / "new", "wb", buffering=0) as file:
        for _ in range(CHECKPOINT_BYTES // BLOCK_BYTES):
            file.write(block)
        os.fsync(file.fileno())
    os.rename(place / "new", place / "checkpoint")


JOBS: dict[str, tuple[Callable[[Path], None], float, str]] = {
    "files of 4 KiB; bindfs": (small_files, SMALL_FILES, "bindfs"),
    "lines of a log; bindfs": (log_lines, LINES, "bindfs"),
    "checkpoint, MB; the source": (checkpoint, CHECKPOINT_BYTES / 1e6, "source"),
}
"""What is written, how much that is in the unit of the rate, and the contender."""


@click.command()
@click.option("--rounds", default=7, show_default=True)
def main(rounds: int) -> None:
    """Rates of both."""
    comparisons = {name: Comparison(name, 0.0) for name in JOBS}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as work:
        base = Path(work)
        source = base / "source"
        source.mkdir()
        with (
            mounted(source, base / "cachefs", base / "cache"),
            bindfs(source, base / "bindfs"),
        ):
            for number in range(rounds):
                for name, (job, amount, contender) in JOBS.items():
                    rate = {}
                    for side in sorted(("cachefs", contender), reverse=bool(number % 2)):
                        place = base / side / f"{side}-{job.__name__}-{number}"
                        place.mkdir()
                        began = time.perf_counter()
                        job(place)
                        rate[side] = amount / (time.perf_counter() - began)
                        subprocess.run(["rm", "-r", source / place.name], check=True)
                    comparisons[name].add(rate["cachefs"], rate[contender])
    report("Writing", list(comparisons.values()), "per second", ("cachefs", "contender"))


if __name__ == "__main__":
    main()
