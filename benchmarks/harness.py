"""Shared by the benchmarks: a tree of files, a mount, readers in processes, ratios with their spread."""

import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CACHEFS = [sys.executable, "-m", "daemon"]


def make_tree(root: Path, directories: int, files: int, sizes: tuple[int, int], seed: int = 1) -> list[str]:
    """`directories` times `files` files of random bytes, sizes in bytes drawn evenly. Paths relative to the root."""
    draw = random.Random(seed)
    paths = []
    for d in range(directories):
        (root / f"d{d:03}").mkdir(parents=True, exist_ok=True)
        for f in range(files):
            path = f"d{d:03}/f{f:05}"
            (root / path).write_bytes(draw.randbytes(draw.randint(*sizes)))
            paths.append(path)
    time.sleep(2.1)  # files younger than two seconds are compared once more (hazard 11)
    return paths


@contextmanager
def mounted(
    source: Path, mountpoint: Path, cache: Path, *arguments: str, program: Sequence[str] = CACHEFS
) -> Iterator[Callable[[], dict[str, Any]]]:
    """A mount; yields a function that returns its status. `program` may be the cachefs of another checkout."""
    mountpoint.mkdir(exist_ok=True)
    command = [*program, "mount", str(source), str(mountpoint), "--cache-dir", str(cache), *arguments]
    subprocess.run(command, check=True)

    def status() -> dict[str, Any]:
        done = subprocess.run([*program, "status", str(mountpoint), "--json"], check=True, capture_output=True)
        return dict(json.loads(done.stdout))

    try:
        yield status
    finally:
        subprocess.run([*program, "umount", str(mountpoint)], check=True)


@contextmanager
def bindfs(source: Path, mountpoint: Path, *options: str) -> Iterator[None]:
    mountpoint.mkdir(exist_ok=True)
    subprocess.run(["bindfs", *options, source, mountpoint], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", mountpoint], check=True)


def read_files(root: str, paths: Sequence[str]) -> None:
    """As PyTorch's ImageFolder does: open, fstat, read, close."""
    for path in paths:
        fd = os.open(f"{root}/{path}", os.O_RDONLY)
        size = os.fstat(fd).st_size
        if len(os.read(fd, size)) != size:
            raise SystemExit(f"short read of {path}")
        os.close(fd)


def read_source(root: str, paths: Sequence[str], latency_s: float) -> None:
    """The same with plain system calls on a source with the latency of a parallel filesystem.

    Open and read wait `latency_s` each; fstat and close do not, as with a client that holds capabilities.
    """
    for path in paths:
        time.sleep(latency_s)
        fd = os.open(f"{root}/{path}", os.O_RDONLY)
        size = os.fstat(fd).st_size
        time.sleep(latency_s)
        if len(os.read(fd, size)) != size:
            raise SystemExit(f"short read of {path}")
        os.close(fd)


def timed_readers(count: int, paths: Sequence[str], read: Callable[[Sequence[str]], None]) -> float:
    """Seconds until `count` processes, started together, have read their shares of `paths`."""
    gate_out, gate_in = os.pipe()
    children = []
    for index in range(count):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(gate_in)
                os.read(gate_out, 1)
                read(paths[index::count])
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    os.close(gate_out)
    started = time.perf_counter()
    os.close(gate_in)
    failures = [pid for pid in children if os.waitpid(pid, 0)[1] != 0]
    elapsed = time.perf_counter() - started
    if failures:
        raise SystemExit("a reader failed")
    return elapsed


def drop_caches() -> None:
    """Page cache, dentries and inodes of this machine. Needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


@dataclass
class Comparison:
    """Rates of two contenders over interleaved rounds."""

    name: str
    bound: float
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def add(self, ours: float, theirs: float) -> None:
        self.ours.append(ours)
        self.theirs.append(theirs)

    @property
    def ratios(self) -> list[float]:
        return sorted(a / b for a, b in zip(self.ours, self.theirs, strict=True))

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the median: two order statistics, for any distribution."""
        ratios = self.ratios
        rank = max(0, math.floor((len(ratios) - 1.96 * math.sqrt(len(ratios))) / 2))
        return ratios[rank], ratios[-1 - rank]

    @property
    def holds(self) -> bool:
        return self.ratio >= self.bound

    def row(self) -> tuple[str, ...]:
        ratios = self.ratios
        return (
            self.name,
            f"{statistics.median(self.ours):,.0f}",
            f"{statistics.median(self.theirs):,.0f}",
            f"{self.ratio:.2f}",
            "{:.2f} to {:.2f}".format(*self.interval),
            f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            f"{self.bound:.2f}" if self.bound else "",
            "" if not self.bound else "yes" if self.holds else "NO",
        )


def report(
    title: str, comparisons: Sequence[Comparison], unit: str, sides: tuple[str, str] = ("mounted", "direct")
) -> bool:
    """Print a table, with the interval in which the median lies at 95 %. True if all bounds hold."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in ("", *(f"{side}, {unit}" for side in sides), "ratio", "95 %", "spread", "at least", "holds"):
        table.add_column(heading, justify="left" if not heading else "right")
    for comparison in comparisons:
        table.add_row(*comparison.row())
    console = Console(width=110)
    console.print(table)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    console.print(f"Linux {platform.release()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
                  f"commit {commit.stdout.strip() or 'unknown'}", highlight=False)  # fmt: skip
    return all(c.holds for c in comparisons)


def plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """Ratios with their spread and their bounds, as horizontal bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.4 * len(comparisons) + 1), layout="constrained")
    axes = figure.subplots()
    for row, comparison in enumerate(reversed(comparisons)):
        low, high = comparison.ratios[0], comparison.ratios[-1]
        axes.barh(row, comparison.ratio, color="tab:blue" if comparison.holds else "tab:red")
        axes.plot([low, high], [row, row], color="black", linewidth=1)
        if comparison.bound:
            axes.plot([comparison.bound] * 2, [row - 0.4, row + 0.4], color="black", linestyle=":")
    axes.set_yticks(range(len(comparisons)), [c.name for c in reversed(comparisons)])
    axes.set_xlabel("ratio of the rates (median, spread); dotted: at least")
    figure.savefig(path)
