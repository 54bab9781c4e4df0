"""This checkout against another one, interleaved in one run: what does a change cost?

    git worktree add ../before COMMIT && (cd ../before && make .venv/.run && scripts/build-fastpath)
    python -m benchmarks.against ../before [--rounds N] [--only WORD]

Both mount the same source, with caches of their own. A row holds if ours is at most 3 % slower.
"""

import os
import random
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import click

from benchmarks.fastpath import (
    DIRECTORIES,
    FILES,
    LATENCY_MS,
    SIZES,
    Rate,
    alternate,
    epoch,
    interleave,
    listing,
    rate_of,
    wait_until_cached,
)
from benchmarks.harness import CACHEFS, Comparison, make_tree, mounted, read_files, report

BOUND = 0.97


class Sides:
    """A mount of each checkout over the same source."""

    def __init__(self, stack: ExitStack, base: Path, source: Path, other: Path, name: str, *arguments: str) -> None:
        self.statuses = []
        self.roots = []
        for side, program in (("ours", CACHEFS), ("theirs", [str(other / ".venv" / "bin" / "cachefs")])):
            root = base / f"{name}-{side}"
            mount = mounted(source, root, base / f"{name}-cache-{side}", *arguments, program=program)
            self.statuses.append(stack.enter_context(mount))
            self.roots.append(root)

    def read(self, paths: list[str]) -> None:
        for root, status in zip(self.roots, self.statuses, strict=True):
            read_files(str(root), paths)
            wait_until_cached(status)

    def compare(self, name: str, rate: Callable[[Path], Rate], rounds: int) -> Comparison:
        ours, theirs = (rate(root) for root in self.roots)
        ours(), theirs()  # whatever was dropped is back
        return interleave(name, BOUND, ours, theirs, rounds)


def hit_rows(base: Path, source: Path, other: Path, paths: list[str], rounds: int) -> list[Comparison]:
    rows = []
    for name, arguments in (("read-only", ["--read-only"]), ("read-write", [])):
        with ExitStack() as stack:
            sides = Sides(stack, base, source, other, name, *arguments)
            sides.read(paths)
            for readers in (1, 4):
                who = f"{name}, {readers} reader{'s' * (readers > 1)}"
                warm = partial(epoch, paths=paths, readers=readers)
                rows.append(sides.compare(f"warm, {who}", warm, rounds))
                rows.append(sides.compare(f"from SSD, {who}", partial(warm, cold=True), rounds))
            rows.append(sides.compare(f"find -ls, {name}", listing, rounds))
    return rows


def miss_rows(base: Path, source: Path, other: Path, paths: list[str], rounds: int) -> list[Comparison]:
    """First epochs after a scan; the source lies in memory, each call takes 1 ms or nothing."""
    rows = []
    for latency_ms in (LATENCY_MS, 0):
        for readers in (1, 8, 32):
            name = f"first epoch, {latency_ms:.0f} ms a call, {readers} reader{'s' * (readers > 1)}"
            unread = iter(random.Random(readers).sample(paths, len(paths)))
            arguments = ("--read-only", "--simulate-latency", str(latency_ms))
            row = Comparison(name, BOUND)
            with ExitStack() as stack:
                sides = Sides(stack, base, source, other, f"first-{latency_ms:.0f}-{readers}", *arguments)
                for root in sides.roots:
                    subprocess.run(["find", str(root), "-ls"], check=True, capture_output=True)
                for index in range(rounds):
                    share = [next(unread) for _ in range(min(300 * readers, len(paths) // rounds))]
                    read_files(str(source), share)
                    ours, theirs = (rate_of(readers, share, partial(read_files, str(root))) for root in sides.roots)
                    row.add(*alternate(index, ours, theirs))
            rows.append(row)
    return rows


@click.command()
@click.argument("other", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", default=11, show_default=True)
@click.option("--only", default="", help="hits or misses.")
def main(other: Path, rounds: int, only: str) -> None:
    """This checkout against the one in OTHER, which has a virtual environment and a fast path of its own."""
    rows: list[Comparison] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as work:
        base = Path(work)
        paths = make_tree(base / "source", DIRECTORIES, FILES // DIRECTORIES, SIZES)
        if only in ("", "hits"):
            rows += hit_rows(base, base / "source", other.resolve(), paths, rounds)
        if only in ("", "misses"):
            rows += miss_rows(base, base / "source", other.resolve(), paths, rounds)
    holds = report(f"This checkout against {other.resolve().name}", rows, "files/s or entries/s", ("this", "other"))
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()
