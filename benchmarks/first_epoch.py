"""First epochs through the mount against direct reads of the same source; scans of a cold tree against `find -ls`.

    python -m benchmarks.first_epoch [--latency MS] [--rounds N]

Each call to the source takes `--latency` milliseconds on both sides. Each round reads files that were never read
through the mount, once directly and once through it, in alternating order. In between, the same files are read through
the filesystem of `ceiling.py`, which does the least work that is possible with pyfuse3.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click

from benchmarks.harness import Comparison, make_tree, mounted, read_files, read_source, report, timed_readers
from cachefs.source.source import Source

READERS = {1: 0.9, 4: 0.6, 8: 0.0}
SCAN_BOUND = 5.0
FILES_PER_ROUND = 400


def scan_source(root: str, latency_s: float) -> int:
    """The calls of `find -ls` to a parallel filesystem: the names of a directory, then the attributes of each entry."""
    source = Source(os.open(root, os.O_RDONLY | os.O_DIRECTORY), simulate_latency_s=latency_s)
    count = 0
    waiting = [b"."]
    while waiting:
        directory = waiting.pop()
        source.round_trip("readdir")
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY, dir_fd=source.root_fd)
        for entry in os.scandir(fd):
            source.round_trip("lstat")
            count += 1
            if entry.stat(follow_symlinks=False).st_mode & 0o170000 == 0o040000:
                waiting.append(os.path.join(directory, os.fsencode(entry.name)))
        os.close(fd)
    os.close(source.root_fd)
    return count


def scan_mount(mountpoint: Path) -> int:
    done = subprocess.run(["find", str(mountpoint), "-mindepth", "1", "-ls"], check=True, capture_output=True)
    return done.stdout.count(b"\n")


@contextmanager
def ceiling(source: Path, mountpoint: Path, latency_ms: float) -> Iterator[None]:
    """The filesystem of `ceiling.py`, mounted."""
    mountpoint.mkdir(exist_ok=True)
    ready = Path(f"{mountpoint}.ready")
    command = [sys.executable, "-m", "benchmarks.ceiling", str(source), str(mountpoint), str(latency_ms)]
    with subprocess.Popen(command) as process:
        while not ready.exists():
            if process.poll() is not None:
                raise SystemExit("benchmarks.ceiling did not start")
            time.sleep(0.05)
        ready.unlink()
        try:
            yield
        finally:
            subprocess.run(["umount", str(mountpoint)], check=True)


@click.command()
@click.option("--latency", "latency_ms", default=1.0, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--scan/--no-scan", default=True)
def main(latency_ms: float, rounds: int, scan: bool) -> None:
    """First epoch and first scan, side by side with the source."""
    latency_s = latency_ms / 1000
    arguments = ("--simulate-latency", str(latency_ms))
    holds = True
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as work:
        base = Path(work)
        source = base / "source"
        count = FILES_PER_ROUND * rounds * len(READERS)
        paths = make_tree(source, 20, -(-count // 20), (25_000, 75_000))
        random.Random(2).shuffle(paths)
        read_files(str(source), paths)  # both sides find the source in memory
        for mode in (["--read-only"], []):
            names = [f"{n} reader{'s' * (n > 1)}" for n in READERS]
            bounds = READERS.values() if mode else [0.0] * len(READERS)
            comparisons = [Comparison(name, bound) for name, bound in zip(names, bounds, strict=True)]
            ceilings = [Comparison(f"trivial pyfuse3, {name}", 0.0) for name in names]
            with (
                mounted(source, base / "mnt", base / f"cache{len(mode)}", *arguments, *mode),
                ceiling(source, base / "ceiling", latency_ms),
            ):
                scan_mount(base / "mnt")
                files = iter(paths)
                for index in range(rounds):
                    for position, readers in enumerate(READERS):
                        share = [next(files) for _ in range(FILES_PER_ROUND)]
                        contenders = {
                            "ours": partial(read_files, str(base / "mnt")),
                            "least": partial(read_files, str(base / "ceiling")),
                            "direct": partial(read_source, str(source), latency_s=latency_s),
                        }
                        order = sorted(contenders, reverse=bool(index % 2))
                        rate = {name: len(share) / timed_readers(readers, share, contenders[name]) for name in order}
                        comparisons[position].add(rate["ours"], rate["direct"])
                        ceilings[position].add(rate["least"], rate["direct"])
            title = f"First epoch after a scan, {'read-only' if mode else 'read-write'} mount, {latency_ms:g} ms a call"
            holds &= report(title, comparisons + ceilings, "files/s")
        if scan:
            tree = base / "tree"
            make_tree(tree, 100, 1000, (0, 0))
            comparison = Comparison("100 directories of 1,000 files", SCAN_BOUND)
            for index in range(2):
                started = time.perf_counter()
                direct = scan_source(str(tree), latency_s)
                between = time.perf_counter()
                with mounted(tree, base / "mnt", base / f"scan{index}", *arguments, "--read-only"):
                    begun = time.perf_counter()
                    through = scan_mount(base / "mnt")
                    ended = time.perf_counter()
                if through != direct:
                    raise SystemExit(f"the mount lists {through} entries, the source {direct}")
                comparison.add(through / (ended - begun), direct / (between - started))
            holds &= report(f"Scan of a cold tree, {latency_ms:g} ms a call", [comparison], "entries/s")
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()
