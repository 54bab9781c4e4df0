"""`cachefs warmup --jobs 8` against eight direct readers, and a reader with and without hints (`will_read`)."""

import json
import os
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import CACHEFS, Comparison, make_tree, mounted, read_files, read_source, report, timed_readers
from cachefs.client.client import Client

JOBS = 8
WARM_UP_BOUND, HINTS_BOUND = 0.9, 2.0
MEMORY_BOUND_MB = 200
DIRECTORIES = 100
SIZES = (25_000, 75_000)


def memory_mb(pids: list[int]) -> float:
    """The memory of processes except page cache, in MB."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue  # it has ended
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))
    return total / 1024


@contextmanager
def watched(pids: list[int]) -> Iterator[list[float]]:
    """The most memory that these had while the block ran."""
    most = [0.0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            most[0] = max(most[0], memory_mb(pids))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def warm_up(place: Path, *arguments: str) -> tuple[dict[str, Any], int]:
    command = [*CACHEFS, "warmup", str(place), "--json", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate()
        return json.loads(said), process.returncode


@click.command()
@click.option("--latency", "latency_ms", default=1.0, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--files", default=100_000, show_default=True)
def main(latency_ms: float, rounds: int, files: int) -> None:
    """Names included in either; interleaved."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as work:
        base = Path(work)
        source = base / "source"
        paths = make_tree(source, DIRECTORIES, files // DIRECTORIES, SIZES)
        random.Random(3).shuffle(paths)
        read_files(str(source), paths)
        warmed = Comparison(f"warm-up, {JOBS} jobs: {JOBS} direct readers", WARM_UP_BOUND)
        hinted = Comparison("first epoch of a reader: with will_read, without", HINTS_BOUND)
        memory = []
        part = paths[: files // 10]
        arguments = ("--read-only", "--simulate-latency", str(latency_ms))
        read = partial(read_source, str(source), latency_s=latency_ms / 1000)
        for number in range(rounds):
            direct = files / timed_readers(JOBS, paths, read)
            with mounted(source, base / "mnt", base / "cache", *arguments) as status:
                now = status()
                with watched([now["pid"], now["fastpath"]["pid"]]) as most:
                    started = time.perf_counter()
                    said, code = warm_up(base / "mnt", "--jobs", str(JOBS))
                    rate = files / (time.perf_counter() - started)
                if code or said["fetched_files"] != files:
                    raise SystemExit(f"not everything was fetched: {said}")
                if warm_up(base / "mnt", "--check")[1]:
                    raise SystemExit("--check reports missing files")
                memory.append(most[0])
            warmed.add(rate, direct)
            print(f"warm-up {rate:,.0f} files/s, direct {direct:,.0f}, {most[0]:.0f} MB", flush=True)
            subprocess.run(["rm", "-rf", base / "cache"], check=True)
            rates = {}
            for hints in (True, False) if number % 2 else (False, True):
                with mounted(source, base / "mnt", base / "cache", *arguments):
                    if hints:
                        Client(base / "mnt").will_read([base / "mnt" / path for path in part])
                    seconds = timed_readers(1, part, partial(read_files, str(base / "mnt")))
                    rates[hints] = len(part) / seconds
                subprocess.run(["rm", "-rf", base / "cache"], check=True)
            hinted.add(rates[True], rates[False])
        holds = report(f"Warm-up and hints, {latency_ms:g} ms a call", [warmed, hinted], "files/s")
        print(f"daemon and fast path: {max(memory):.0f} MB at most (bound {MEMORY_BOUND_MB})")
    raise SystemExit(0 if holds and max(memory) <= MEMORY_BOUND_MB else 1)


if __name__ == "__main__":
    main()
