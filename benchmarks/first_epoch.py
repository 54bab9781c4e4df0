"""First epoch through the mount against direct reads of the same source; scan of a cold tree against `find -ls`.

    python -m benchmarks.first_epoch [--latency MS] [--rounds N]

Every call to the source takes `--latency` milliseconds on both sides. Each round reads files that were never read
through the mount before, once directly and once through it; which comes first alternates.
"""

import os
import random
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import click

from benchmarks.harness import Comparison, make_tree, mounted, read_files, read_source, report, timed_readers
from cachefs.source import Source

READERS = {1: 0.9, 4: 0.6, 8: 0.0}
SCAN_BOUND = 5.0
FILES_PER_ROUND = 400


def scan_source(root: str, latency_s: float) -> int:
    """What `find -ls` asks a parallel filesystem for: each directory's names, then the attributes of each entry."""
    source = Source(os.open(root, os.O_RDONLY | os.O_DIRECTORY), simulate_latency_s=latency_s)
    count = 0
    waiting = [b""]
    while waiting:
        directory = waiting.pop()
        for name in source.readdir(directory):
            path = directory + b"/" + name if directory else name
            count += 1
            if source.lstat(path).mode & 0o170000 == 0o040000:
                waiting.append(path)
    os.close(source.root_fd)
    return count


def scan_mount(mountpoint: Path) -> int:
    done = subprocess.run(["find", str(mountpoint), "-mindepth", "1", "-ls"], check=True, capture_output=True)
    return done.stdout.count(b"\n")


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
            comparisons = [
                Comparison(f"{n} reader{'s' * (n > 1)}", bound if mode else 0.0) for n, bound in READERS.items()
            ]
            with mounted(source, base / "mnt", base / f"cache{len(mode)}", *arguments, *mode):
                scan_mount(base / "mnt")
                files = iter(paths)
                for index in range(rounds):
                    for comparison, readers in zip(comparisons, READERS, strict=True):
                        share = [next(files) for _ in range(FILES_PER_ROUND)]
                        ours = partial(timed_readers, readers, share, partial(read_files, str(base / "mnt")))
                        theirs = partial(
                            timed_readers, readers, share, partial(read_source, str(source), latency_s=latency_s)
                        )
                        if index % 2:
                            second, first = theirs(), ours()
                        else:
                            first, second = ours(), theirs()
                        comparison.add(len(share) / first, len(share) / second)
            title = f"First epoch after a scan, {'read-only' if mode else 'read-write'} mount, {latency_ms:g} ms a call"
            holds &= report(title, comparisons, "files/s")
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
