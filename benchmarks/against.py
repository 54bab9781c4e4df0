"""The cost of a change: this checkout against another one, interleaved in one run.

    git worktree add ../before COMMIT && (cd ../before && make .venv/.run && scripts/build-fastpath)
    python -m benchmarks.against ../before [--seconds N] [--only WORD] [--source DIRECTORY]

Both mount the same source, each with its own cache. A row holds if ours is at most 3 % slower. There are many short
rounds: on a shared machine one round is off by a tenth or more, but the median of a hundred by one or two percent.
There are several pairs of mounts: the medians of two pairs of the same programs differ by some percent, for any number
of rounds.

`--source` is an empty directory of another filesystem, such as CephFS. Its files count as recent for ten minutes, so
the benchmark waits that long; the next run reads the same files and does not wait. No latency is added to it.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.fastpath import LATENCY_MS, Rate, alternate, listing, rate_of, wait_until_cached
from benchmarks.harness import CACHEFS, Comparison, make_tree, mounted, read_files, report, timed_readers
from cachefs.contract.shared import LATE_NS
from cachefs.system.clock import NANOSECONDS

BOUND = 0.97
DIRECTORIES, FILES, SIZES = 20, 4000, (25_000, 75_000)
"""Small enough for the machine to keep both caches in memory."""
STATES = (("warm", 4000, ""), ("dentries dropped", 2000, "2"), ("from SSD", 1000, "3"))
"""Name, files in one round, what the kernel drops before it."""
READERS = (1, 8, 32)
MISSES, MOST_MISSES, ROUNDS = 60, 480, 10
"""In first epochs: files that one reader reads in a round, the most that all read, rounds of each pair of mounts."""
PAIRS = 6
"""How often both are mounted again, with empty caches."""


class Trees:
    """The files that both sides read, below `root`. They are made once; a later run uses them again."""

    def __init__(self, root: Path) -> None:
        self.of_hits = root / "hits"
        self._of_misses = {readers: root / f"misses-{readers}" for readers in READERS}
        is_new = not self.of_hits.exists()
        self.hits = self._tree(self.of_hits, DIRECTORIES, FILES // DIRECTORIES, is_new)
        self._misses = {
            readers: self._tree(path, ROUNDS, min(MISSES * readers, MOST_MISSES), is_new)
            for readers, path in self._of_misses.items()
        }

    @staticmethod
    def _tree(root: Path, directories: int, files: int, is_new: bool) -> list[str]:
        if is_new:
            return make_tree(root, directories, files, SIZES)
        return sorted(str(path.relative_to(root)) for path in root.glob("*/*"))

    def misses(self, readers: int) -> tuple[Path, list[str]]:
        """Source and paths of the files for first epochs of so many readers."""
        return self._of_misses[readers], self._misses[readers]

    def wait_until_old(self) -> None:
        newest_s = max(path.stat().st_ctime for path in self._of_misses[READERS[-1]].glob("*/*"))
        time.sleep(max(0.0, newest_s + LATE_NS / NANOSECONDS + 1 - time.time()))


class Sides:
    """A mount of each checkout over the same source. `pair`: its number, which determines the order of mounting."""

    def __init__(self, stack: ExitStack, base: Path, source: Path, other: Path, pair: int, *arguments: str) -> None:
        self._mounts: dict[bool, tuple[Path, Callable[[], Any]]] = {}
        for ours in (True, False) if pair % 2 else (False, True):
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=base)))
            program = CACHEFS if ours else [str(other / ".venv" / "bin" / "cachefs")]
            mount = mounted(source, place / "mnt", place / "cache", *arguments, program=program)
            self._mounts[ours] = (place / "mnt", stack.enter_context(mount))

    @property
    def roots(self) -> tuple[Path, Path]:
        """(ours, theirs)"""
        return self._mounts[True][0], self._mounts[False][0]

    def read(self, paths: list[str]) -> None:
        """Alternate: the side that reads first gets memory that is a tenth slower."""
        for number, path in enumerate(paths):
            for root in self.roots if number % 2 else reversed(self.roots):
                read_files(str(root), [path])
        for _, status in self._mounts.values():
            wait_until_cached(status)

    def compare(self, row: Comparison, rate: Callable[[Path], Rate], paths: list[str], seconds: float) -> None:
        self.read(paths)  # load what was dropped
        ours, theirs = map(rate, self.roots)
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            row.add(*alternate(len(row.ours), ours, theirs))


def read_some(root: Path, paths: list[str], readers: int, count: int, *, drop: str = "") -> Rate:
    """Files per second for `count` files in random order. `drop`: what the kernel drops before."""
    draw = random.Random(readers)

    def run() -> float:
        share = draw.sample(paths, count)
        if drop:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text(drop)
        return count / timed_readers(readers, share, partial(read_files, str(root)))

    return run


def hit_rows(
    base: Path, source: Path, other: Path, paths: list[str], seconds: float, rows_with: str
) -> list[Comparison]:
    rows: dict[str, Comparison] = {}
    for pair in range(PAIRS):
        for name, arguments in (("read-only", ["--read-only"]), ("read-write", [])):
            with ExitStack() as stack:
                sides = Sides(stack, base, source, other, pair, *arguments)

                def compare(name: str, rate: Callable[[Path], Rate], sides: Sides = sides) -> None:
                    if rows_with in name:
                        sides.compare(rows.setdefault(name, Comparison(name, BOUND)), rate, paths, seconds / PAIRS)

                for readers in (1, 4):
                    for state, count, drop in STATES:
                        rate = partial(read_some, paths=paths, readers=readers, count=count, drop=drop)
                        compare(f"{state}, {name}, {readers} reader{'s' * (readers > 1)}", rate)
                compare(f"find -ls, {name}", listing)
    return list(rows.values())


def miss_rows(base: Path, trees: Trees, other: Path, latencies_ms: Sequence[float]) -> list[Comparison]:
    """First epochs after a scan. Local source: it is in memory, and each call takes 1 ms or nothing."""
    rows = []
    for latency_ms in latencies_ms:
        for readers in READERS:
            row = Comparison(f"first epoch, {latency_ms:.0f} ms a call, {readers} reader{'s' * (readers > 1)}", BOUND)
            source, paths = trees.misses(readers)
            for pair in range(PAIRS):
                compare_misses(row, base, source, other, pair, readers, latency_ms, paths)
            rows.append(row)
    return rows


def compare_misses(
    row: Comparison, base: Path, source: Path, other: Path, pair: int, readers: int, latency_ms: float, paths: list[str]
) -> None:
    with ExitStack() as stack:
        sides = Sides(stack, base, source, other, pair, "--read-only", "--simulate-latency", str(latency_ms))
        for root in sides.roots:
            subprocess.run(["find", str(root), "-ls"], check=True, capture_output=True)
        unread = random.Random(pair).sample(paths, len(paths))
        share = len(paths) // ROUNDS
        for start in range(0, len(paths), share):
            some = unread[start : start + share]
            read_files(str(source), some)
            ours, theirs = (rate_of(readers, some, partial(read_files, str(root))) for root in sides.roots)
            row.add(*alternate(len(row.ours), ours, theirs))


def python_version(program: str) -> str:
    return subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout.strip()


@click.command()
@click.argument("other", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--seconds", default=42.0, show_default=True, help="For each row of hits.")
@click.option("--only", default="", help="hits or misses.")
@click.option("--rows", default="", help="Rows of hits whose name contains this.")
@click.option("--source", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Empty, or of a run.")
def main(other: Path, seconds: float, only: str, rows: str, source: Path | None) -> None:
    """This checkout against the one in OTHER, which has a virtual environment and a fast path of its own."""
    if (theirs := python_version(str(other / ".venv" / "bin" / "python"))) != (ours := python_version(sys.executable)):
        raise click.ClickException(f"{other} uses {theirs}, and this checkout {ours}: make both with the same one")
    found: list[Comparison] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as work:
        base = Path(work)
        trees = Trees(source or base / "sources")
        if source:
            trees.wait_until_old()
        if only in ("", "hits"):
            found += hit_rows(base, trees.of_hits, other.resolve(), trees.hits, seconds, rows)
        if only in ("", "misses"):
            found += miss_rows(base, trees, other.resolve(), (0,) if source else (LATENCY_MS, 0))
    holds = report(f"This checkout against {other.resolve().name}", found, "files/s or entries/s", ("this", "other"))
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()
