"""`--prefetch all` in a first epoch: files/s against direct reads, and waiting times against no prefetching."""

import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from benchmarks.harness import Comparison, make_tree, mounted, read_files, read_source, report, timed_readers

READERS = 4
BOUND, WAIT_BOUND = 1.5, 1 / 1.2
FILES = 20_000


def read_and_time(root: str, out: str, paths: Sequence[str]) -> None:
    """As `read_files`; writes down how long each file took, in seconds."""
    waits = []
    for path in paths:
        started = time.perf_counter()
        read_files(root, [path])
        waits.append(time.perf_counter() - started)
    Path(out, str(os.getpid())).write_text(json.dumps(waits))


def quantile(out: Path, share: float) -> float:
    waits = sorted(wait for file in out.iterdir() for wait in json.loads(file.read_text()))
    return float(waits[int(len(waits) * share)])


@click.command()
@click.option("--latency", "latency_ms", default=1.0, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(latency_ms: float, rounds: int) -> None:
    """A first epoch, cold, in random order, names included."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as work:
        base = Path(work)
        source = base / "source"
        paths = make_tree(source, 20, FILES // 20, (25_000, 75_000))
        random.Random(3).shuffle(paths)
        read_files(str(source), paths)
        speed = Comparison(f"prefetch all: direct, {READERS} readers", BOUND)
        without = Comparison(f"no prefetch: direct, {READERS} readers", 0.0)
        waits = Comparison("1/p99 of a file: without prefetch", WAIT_BOUND)
        for number in range(rounds):
            rates, p99 = {}, {}
            read = partial(read_source, str(source), latency_s=latency_ms / 1000)
            rates["direct"] = FILES / timed_readers(READERS, paths, read)
            for kind in ("none", "all") if number % 2 else ("all", "none"):
                out = base / "waits"
                out.mkdir()
                arguments = ("--read-only", "--simulate-latency", str(latency_ms), "--prefetch", kind)
                with mounted(source, base / "mnt", base / f"{kind}{number}", *arguments):
                    read = partial(read_and_time, str(base / "mnt"), str(out))
                    rates[kind] = FILES / timed_readers(READERS, paths, read)
                p99[kind] = quantile(out, 0.99)
                print(f"{kind}: p50 {1e3 * quantile(out, 0.5):.2f} ms, p99 {1e3 * p99[kind]:.2f} ms")
                shutil.rmtree(out)
            speed.add(rates["all"], rates["direct"])
            without.add(rates["none"], rates["direct"])
            waits.add(1 / p99["all"], 1 / p99["none"])
        holds = report(f"Prefetching, {latency_ms:g} ms a call", [speed, without, waits], "files/s, 1/s")
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()
