"""`make demo`: three epochs over a real tree, directly and through cachefs, with the latency of a parallel filesystem.

Both sides start from the same state: the tree was listed once (`find -ls`), and nothing was read. Each call to the
source takes the latency: open and read on both sides, and all other calls of cachefs. These calls are counted.

DEMO_SOURCE=DIR   the tree (default: /usr/share)
DEMO_FILES=N      how many of its files (default: 4000)
DEMO_LATENCY=MS   of every call to the source, on both sides (default: 1)
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.harness import mounted

SOURCE = Path(os.environ.get("DEMO_SOURCE", "/usr/share")).resolve()
FILES = int(os.environ.get("DEMO_FILES", "4000"))
LATENCY_MS = float(os.environ.get("DEMO_LATENCY", "1"))
EPOCHS = 3
LARGEST = 256 << 10


def choose(root: Path) -> list[bytes]:
    """Regular, readable files that are neither empty nor large; paths relative to the root."""
    found = []
    for directory, _, files, fd in os.fwalk(os.fsencode(root)):
        for name in files:
            info = os.lstat(name, dir_fd=fd)
            if (
                info.st_mode & 0o170000 == 0o100000
                and 0 < info.st_size <= LARGEST
                and os.access(name, os.R_OK, dir_fd=fd)
            ):
                found.append(os.path.relpath(os.path.join(directory, name), os.fsencode(root)))
    random.Random(0).shuffle(found)
    return found[:FILES]


class Reader:
    """Reads files beneath a root. Each call to the parallel filesystem waits, and is counted."""

    def __init__(self, root: Path, latency_s: float = 0.0) -> None:
        self._root = os.fsencode(root)
        self._latency_s = latency_s
        self.calls = 0

    def _ask(self) -> None:
        self.calls += 1
        if self._latency_s:
            time.sleep(self._latency_s)

    def read(self, path: bytes) -> int:
        self._ask()
        fd = os.open(self._root + b"/" + path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            self._ask()
            return len(os.read(fd, size))
        finally:
            os.close(fd)


def epochs(paths: list[bytes], read: Any, ops: Any, label: str, progress: Progress) -> Iterator[tuple[float, int, int]]:
    """(files/s, bytes, calls to the source) of each epoch, each in a new random order."""
    for epoch in range(1, EPOCHS + 1):
        order = list(paths)
        random.Random(epoch).shuffle(order)
        task = progress.add_task(f"{label}, epoch {epoch}", total=len(order))
        before = ops()
        size = 0
        started = time.perf_counter()
        for index, path in enumerate(order, 1):
            size += read(path)
            if index % 50 == 0 or index == len(order):
                progress.update(task, completed=index)
        elapsed = time.perf_counter() - started
        yield len(order) / elapsed, size, ops() - before


@contextmanager
def workplace() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="cachefs-demo-"))
    try:
        yield base
    finally:
        shutil.rmtree(base, ignore_errors=True)


def main() -> None:
    console = Console()
    if not SOURCE.is_dir():
        raise SystemExit(f"demo: {SOURCE} is not a directory; set DEMO_SOURCE")
    paths = choose(SOURCE)
    if not paths:
        raise SystemExit(f"demo: {SOURCE} has no files of 1 byte to {LARGEST >> 10} KiB; set DEMO_SOURCE")
    console.print(
        f"{len(paths):,} files of {SOURCE}, every call to the source takes {LATENCY_MS:g} ms", highlight=False
    )
    table = Table()
    for heading in ("epoch", "direct, files/s", "calls", "cachefs, files/s", "calls", "ratio", "hit ratio"):
        table.add_column(heading, justify="right")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with workplace() as base, Progress(*columns, console=console, transient=True) as progress:
        subprocess.run(["find", str(SOURCE), "-ls"], check=True, stdout=subprocess.DEVNULL)
        arguments = ("--read-only", "--simulate-latency", str(LATENCY_MS))
        try:
            with mounted(SOURCE, base / "mnt", base / "cache", *arguments) as status:
                subprocess.run(["find", str(base / "mnt"), "-ls"], check=True, stdout=subprocess.DEVNULL)

                def calls() -> int:
                    asked = status()["source_ops"]  # an fstat of an open file and its close cost no round trip
                    return sum(count for name, count in asked.items() if name not in ("fstat", "close"))

                source, mounted_reader = Reader(SOURCE, LATENCY_MS / 1000), Reader(base / "mnt")
                direct = epochs(paths, source.read, lambda: source.calls, "direct", progress)
                cached = epochs(paths, mounted_reader.read, calls, "cachefs", progress)
                before = status()
                for epoch in range(1, EPOCHS + 1):
                    direct_rate, direct_bytes, direct_calls = next(direct)
                    rate, size, made = next(cached)
                    if size != direct_bytes:
                        raise SystemExit("demo: the mount and the source differ")
                    after = status()
                    fetched = after["miss_bytes"] - before["miss_bytes"]
                    before = after
                    # The page cache answered what reached neither the source nor the daemon.
                    hits = 1 - fetched / size
                    table.add_row(
                        str(epoch), f"{direct_rate:,.0f}", f"{direct_calls:,}", f"{rate:,.0f}", f"{made:,}",
                        f"{rate / direct_rate:.2f}", f"{100 * hits:.1f} %",
                    )  # fmt: skip
        except subprocess.CalledProcessError as error:
            raise SystemExit(error.returncode) from None
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
