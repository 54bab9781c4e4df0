"""The gain of the fast path: the same files are read through cachefs and in other ways, interleaved in one run.

    python -m benchmarks.fastpath [--rounds N] [--only WORD] [--plot FILE]

Each row has a contender, and a bound on the ratio of the files (or bytes) per second of both. There are 20,000 files of
25 to 75 KB, read as PyTorch's ImageFolder does: open, fstat, read, close, each once per epoch, in random order.
"""

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import (
    Comparison,
    bindfs,
    drop_caches,
    make_tree,
    mounted,
    plot,
    read_files,
    read_source,
    report,
    timed_readers,
)

FILES = 20_000
DIRECTORIES = 20
SIZES = (25_000, 75_000)
LARGE_BYTES = 4 << 30
LISTED_FILES = 200_000
PIECE_BYTES = 1 << 20
LATENCY_MS = 1.0
COLD_FILES = 4000
"""How many files of the tree a cold round reads: caches are dropped before each."""

Rate = Callable[[], float]
Status = Callable[[], dict[str, Any]]


def alternate(index: int, ours: Rate, theirs: Rate) -> tuple[float, float]:
    """Both rates of one round. Which side runs first alternates from round to round."""
    if index % 2:
        second = theirs()
        return ours(), second
    return ours(), theirs()


def interleave(name: str, bound: float, ours: Rate, theirs: Rate, rounds: int) -> Comparison:
    comparison = Comparison(name, bound)
    for index in range(rounds):
        comparison.add(*alternate(index, ours, theirs))
    return comparison


def rate_of(readers: int, paths: list[str], read: Callable[[Sequence[str]], None]) -> Rate:
    """Files per second of a number of readers of these files."""
    return lambda: len(paths) / timed_readers(readers, paths, read)


def after_drop(rate: Rate) -> Rate:
    """The same, with all caches of the machine dropped before."""

    def run() -> float:
        drop_caches()
        return rate()

    return run


def epoch(root: Path, paths: list[str], readers: int, *, cold: bool = False) -> Rate:
    """Files per second of one epoch in random order."""
    draw = random.Random(readers)

    def run() -> float:
        share = draw.sample(paths, COLD_FILES) if cold else draw.sample(paths, len(paths))
        if cold:
            drop_caches()
        return len(share) / timed_readers(readers, share, partial(read_files, str(root)))

    return run


def read_through(path: Path) -> int:
    total = 0
    buffer = bytearray(PIECE_BYTES)
    with open(path, "rb", buffering=0) as file:
        while got := file.readinto(buffer):
            total += got
    return total


def sequential(path: Path) -> Rate:
    """MB per second of reading a large file, caches dropped."""

    def run() -> float:
        drop_caches()
        started = time.perf_counter()
        total = read_through(path)
        return total / (time.perf_counter() - started) / 1e6

    return run


def listing(root: Path) -> Rate:
    """Entries per second of `find -ls`, dentries dropped."""

    def run() -> float:
        Path("/proc/sys/vm/drop_caches").write_text("2")
        started = time.perf_counter()
        done = subprocess.run(["find", str(root), "-ls"], check=True, capture_output=True)
        return done.stdout.count(b"\n") / (time.perf_counter() - started)

    return run


BINDFS = "kernel_cache,entry_timeout=86400,attr_timeout=86400,negative_timeout=86400"


def wait_until_cached(flushed: Status) -> None:
    while any(flushed()[field] for field in ("write_behind_bytes", "uncommitted")):
        time.sleep(0.2)


def steady_state(base: Path, source: Path, paths: list[str], rounds: int) -> list[Comparison]:
    """Warm epochs and epochs from the SSD."""
    results = []
    with ExitStack() as stack:
        places = {}
        for name, arguments in (
            ("ro", ["--read-only"]),
            ("rw", []),
            ("python", ["--read-only", "--no-fastpath"]),
        ):
            places[name] = base / name
            status = stack.enter_context(mounted(source, places[name], base / f"cache-{name}", *arguments))
            read_files(str(places[name]), paths)
            wait_until_cached(status)
        stack.enter_context(bindfs(source, base / "bindfs", "-o", BINDFS))
        read_files(str(base / "bindfs"), paths)
        for readers in (1, 4):
            who = f"{readers} reader{'s' * (readers > 1)}"
            for root in (source, *places.values()):
                epoch(root, paths, readers)()
            warm = {root: epoch(root, paths, readers) for root in (source, *places.values(), base / "bindfs")}
            cold = {root: epoch(root, paths, readers, cold=True) for root in (source, *places.values())}
            pairs = [
                (f"warm, read-only, {who}: ext4", 0.95, warm, "ro", source),
                (f"warm, read-write, {who}: ext4", 0.30, warm, "rw", source),
                (f"warm, read-write, {who}: bindfs", 1.5, warm, "rw", base / "bindfs"),
                (f"from SSD, read-only, {who}: ext4", 1.0, cold, "ro", source),
                (f"from SSD, read-only, {who}: pyfuse3", 3.0, cold, "ro", places["python"]),
            ]
            for name, bound, rates, ours, theirs in pairs:
                if rates is warm:  # load what was dropped
                    rates[places[ours]]()
                    rates[theirs]()
                results.append(interleave(name, bound, rates[places[ours]], rates[theirs], rounds))
    return results


def first_epochs(base: Path, source: Path, paths: list[str], rounds: int) -> list[Comparison]:
    """First epochs after a scan: each round reads files that were never read through the mount."""
    results = []
    arguments = ("--read-only", "--simulate-latency", str(LATENCY_MS))
    unread = iter(random.Random(3).sample(paths, len(paths)))
    with mounted(source, base / "first", base / "cache-first", *arguments):
        subprocess.run(["find", str(base / "first"), "-ls"], check=True, capture_output=True)
        for readers, bound in ((1, 0.9), (8, 0.95), (32, 0.45)):
            comparison = Comparison(f"first epoch, 1 ms a call, {readers} readers: direct", bound)
            direct = partial(read_source, str(source), latency_s=LATENCY_MS / 1000)
            through = partial(read_files, str(base / "first"))
            for index in range(rounds):
                share = [next(unread) for _ in range(min(150 * readers, 4000 // rounds))]
                read_files(str(source), share)  # both sides find the source in memory
                comparison.add(*alternate(index, *(rate_of(readers, share, read) for read in (through, direct))))
            results.append(comparison)
    unread = iter(random.Random(4).sample(paths, len(paths)))
    with mounted(source, base / "disk", base / "cache-disk", "--read-only"):
        subprocess.run(["find", str(base / "disk"), "-ls"], check=True, capture_output=True)
        comparison = Comparison("first epoch, local disk, 4 readers: direct", 0.5)
        for index in range(rounds):
            share = [next(unread) for _ in range(2000)]
            ours, theirs = (rate_of(4, share, partial(read_files, str(root))) for root in (base / "disk", source))
            comparison.add(*alternate(index, after_drop(ours), after_drop(theirs)))
        results.append(comparison)
    return results


def large_file(base: Path, rounds: int) -> list[Comparison]:
    source = base / "large"
    source.mkdir()
    block = random.Random(5).randbytes(64 << 20)
    with open(source / "file", "wb") as file:
        for _ in range(LARGE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    time.sleep(2.1)
    first = Comparison("first read of a 4 GB file: direct", 0.9)
    for index in range(rounds):
        with mounted(source, base / "large-mnt", base / f"cache-large{index}", "--read-only") as status:
            first.add(*alternate(index, sequential(base / "large-mnt" / "file"), sequential(source / "file")))
            if index < rounds - 1:
                continue
            for _ in range(2):  # what was not admitted the first time
                drop_caches()
                read_through(base / "large-mnt" / "file")
                wait_until_cached(status)
            ours, direct = sequential(base / "large-mnt" / "file"), sequential(source / "file")
            again = interleave("a 4 GB file from SSD: ext4", 0.95, ours, direct, rounds)
        shutil.rmtree(base / f"cache-large{index}")
    return [first, again]


def listings(base: Path, rounds: int) -> list[Comparison]:
    source = base / "listed"
    make_tree(source, LISTED_FILES // 1000, 1000, (0, 0))
    with mounted(source, base / "listed-mnt", base / "cache-listed", "--read-only"):
        listing(base / "listed-mnt")()
        return [interleave("find -ls, 200,000 files: ext4", 0.8, listing(base / "listed-mnt"), listing(source), rounds)]


def hits(root: Path, paths: list[str], status: Status, *, read: bool) -> Rate:
    """Requests per second that the fast path answers, dentries dropped. Look-ups of directories count as well."""
    draw = random.Random(1)

    def run() -> float:
        share = draw.sample(paths, len(paths))
        Path("/proc/sys/vm/drop_caches").write_text("2")
        before = status()["fastpath"]["answered"]
        started = time.perf_counter()
        if read:
            read_files(str(root), share)
        else:
            for path in share:
                os.lstat(f"{root}/{path}")
        elapsed = time.perf_counter() - started
        return float(status()["fastpath"]["answered"] - before) / elapsed

    return run


def scale(base: Path, rounds: int) -> list[Comparison]:
    """The cost of a hit among a million pinned files, against ten thousand."""
    with ExitStack() as stack:
        looks, reads = [], []
        for directories in (1000, 10):
            source, mountpoint = base / f"scale{directories}", base / f"scale{directories}-mnt"
            paths = make_tree(source, directories, 1000, (100, 100))
            status = stack.enter_context(mounted(source, mountpoint, base / f"cache-{directories}", "--read-only"))
            subprocess.run(["find", str(mountpoint), "-ls"], check=True, capture_output=True)
            sample = random.Random(2).sample(paths, 10_000)
            read_files(str(mountpoint), sample)
            wait_until_cached(status)
            looks.append(hits(mountpoint, sample, status, read=False))
            reads.append(hits(mountpoint, sample, status, read=True))
            looks[-1](), reads[-1]()
            memory = Path(f"/proc/{status()['fastpath']['pid']}/status").read_text().split("RssAnon:")[1].split()[0]
            print(f"{status()['pinned_inodes']:,} pinned inodes: RssAnon of the fast path {int(memory) / 1024:.1f} MiB")
        what = "1,000,000 pinned files: 10,000"
        return [
            interleave(f"look-up, {what}", 1 / 1.2, looks[0], looks[1], rounds),
            interleave(f"look-up and read, {what}", 1 / 1.2, reads[0], reads[1], rounds),
        ]


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--only", default="", help="steady, first, large, list or scale.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Draw the ratios, PNG or SVG.")
def main(rounds: int, only: str, plot_path: Path | None) -> None:
    """The fast path against ext4, bindfs, pyfuse3 alone and direct reads."""
    results: list[Comparison] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as work:
        base = Path(work)
        if only in ("", "steady", "first"):
            source = base / "source"
            paths = make_tree(source, DIRECTORIES, FILES // DIRECTORIES, SIZES)
            if only in ("", "steady"):
                results += steady_state(base, source, paths, rounds)
            if only in ("", "first"):
                results += first_epochs(base, source, paths, rounds)
        if only in ("", "large"):
            results += large_file(base, min(rounds, 3))
        if only in ("", "list"):
            results += listings(base, rounds)
        if only in ("", "scale"):
            results += scale(base, rounds)
    holds = report("The fast path, side by side", results, "files/s, entries/s or MB/s")
    if plot_path is not None:
        plot(results, plot_path)
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()
