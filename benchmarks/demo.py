"""`make demo`: three epochs over a real tree, directly and through cachefs, with the latency of a parallel filesystem.

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
from cachefs.source import Source

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


def read_directly(source: Source, path: bytes) -> int:
    fd = source.open_file(path)
    try:
        return len(source.pread(fd, os.fstat(fd).st_size, 0))
    finally:
        os.close(fd)


def read_mounted(root: bytes, path: bytes) -> int:
    fd = os.open(root + b"/" + path, os.O_RDONLY)
    try:
        return len(os.read(fd, os.fstat(fd).st_size))
    finally:
        os.close(fd)


def epochs(paths: list[bytes], read: Any, ops: Any, label: str, progress: Progress) -> Iterator[tuple[float, int, int]]:
    """(files/s, bytes, calls to the source) of each epoch; a new random order each time."""
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
    for heading in ("epoch", "direct, files/s", "cachefs, files/s", "ratio", "hit ratio", "calls to the source"):
        table.add_column(heading, justify="right")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with workplace() as base, Progress(*columns, console=console, transient=True) as progress:
        root_fd = os.open(SOURCE, os.O_RDONLY | os.O_DIRECTORY)
        source = Source(root_fd, simulate_latency_s=LATENCY_MS / 1000)
        arguments = ("--read-only", "--simulate-latency", str(LATENCY_MS))
        try:
            with mounted(SOURCE, base / "mnt", base / "cache", *arguments) as status:
                root = os.fsencode(base / "mnt")

                def ours() -> int:
                    return sum(status()["source_ops"].values())

                def theirs() -> int:
                    return sum(source.counters.snapshot().values())

                direct = epochs(paths, lambda path: read_directly(source, path), theirs, "direct", progress)
                cached = epochs(paths, lambda path: read_mounted(root, path), ours, "cachefs", progress)
                before = status()
                for epoch in range(1, EPOCHS + 1):
                    direct_rate, direct_bytes, _ = next(direct)
                    rate, size, calls = next(cached)
                    if size != direct_bytes:
                        raise SystemExit("demo: the mount and the source differ")
                    after = status()
                    fetched = after["miss_bytes"] - before["miss_bytes"]
                    before = after
                    # What neither went to the source nor to the daemon came from the kernel's page cache.
                    hits = 1 - fetched / size
                    table.add_row(
                        str(epoch), f"{direct_rate:,.0f}", f"{rate:,.0f}", f"{rate / direct_rate:.2f}",
                        f"{100 * hits:.1f} %", f"{calls:,}",
                    )  # fmt: skip
        except subprocess.CalledProcessError as error:
            raise SystemExit(error.returncode) from None
        finally:
            os.close(root_fd)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
