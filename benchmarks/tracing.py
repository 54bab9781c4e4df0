"""The cost of `cachefs trace record` for a job that reads small files and does some work on each."""

import os
import random
import signal
import subprocess
import tempfile
import time
import zlib
from pathlib import Path

import click

from benchmarks.harness import CACHEFS, Comparison, make_tree, mounted, read_files, report

BOUND = 0.98
FILES = 4000
WORK_S = 0.001
"""Per file: less than decoding a small JPEG takes."""


def epoch(root: str, paths: list[str]) -> float:
    """Seconds: each file is read and worked on, for as many rounds as take WORK_S on an idle core."""
    block = bytes(1 << 20)
    started = time.perf_counter()
    for path in paths:
        read_files(root, [path])
        for _ in range(ROUNDS):
            zlib.crc32(block)
    return time.perf_counter() - started


def _rounds() -> int:
    block = bytes(1 << 20)
    started = time.perf_counter()
    for _ in range(20):
        zlib.crc32(block)
    return max(1, round(WORK_S / ((time.perf_counter() - started) / 20)))


ROUNDS = _rounds()


@click.command()
@click.option("--rounds", default=9, show_default=True)
def main(rounds: int) -> None:
    """Warm epochs, every other one recorded."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as work:
        base = Path(work)
        paths = make_tree(base / "source", 10, FILES // 10, (25_000, 75_000))
        random.Random(3).shuffle(paths)
        comparison = Comparison(f"recorded: not recorded, {1e3 * WORK_S:g} ms of work a file", BOUND)
        with mounted(base / "source", base / "mnt", base / "cache", "--read-only"):
            read_files(str(base / "mnt"), paths)
            for number in range(rounds):
                seconds = {}
                for recorded in (True, False) if number % 2 else (False, True):
                    if recorded:
                        command = [*CACHEFS, "trace", "record", str(base / "mnt"), "--output", str(base / "trace")]
                        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as recorder:
                            assert recorder.stderr is not None
                            recorder.stderr.readline()
                            seconds[recorded] = epoch(str(base / "mnt"), paths)
                            recorder.send_signal(signal.SIGINT)
                    else:
                        seconds[recorded] = epoch(str(base / "mnt"), paths)
                comparison.add(FILES / seconds[True], FILES / seconds[False])
        holds = report("Recording a trace", [comparison], "files/s")
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()
