"""How much a greedy user slows down the hits and misses of another one, in interleaved rounds without and with it.

Needs root: both users are threads with filesystem uids of their own.
"""

import contextlib
import fcntl
import math
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import click

from benchmarks.harness import make_tree, mounted
from cachefs.system.syscalls import set_thread_fs_ids

GREEDY, OTHER = 12345, 23456
LATENCY_MS = 200
HIT_BOUND_MS, MISS_BOUND_MS = 50, 100
HITS, MISSES = 60, 8
BLOCK = 4096


class Crowd:
    """Calls of greedy users, repeated until stopped."""

    def __init__(self, calls: Sequence[Callable[[], object]], users: int = 1) -> None:
        self._stop = threading.Event()
        threading.stack_size(128 << 10)
        self._threads = [
            threading.Thread(target=self._run, args=(call, GREEDY + number % users), daemon=True)
            for number, call in enumerate(calls)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, call: Callable[[], object], uid: int) -> None:
        set_thread_fs_ids(uid, uid)
        while not self._stop.is_set():
            with contextlib.suppress(OSError):
                call()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def read_at(directory: int, name: str) -> None:
    fd = os.open(name, os.O_RDONLY, dir_fd=directory)
    try:
        os.read(fd, 1 << 20)
    finally:
        os.close(fd)


@contextmanager
def crowd_of(calls: Sequence[Callable[[], object]]) -> Iterator[None]:
    crowd = Crowd(calls)
    time.sleep(1.0)  # until it is under way
    try:
        yield
    finally:
        crowd.end()


@contextmanager
def looks_up(source: Path, mounted_fd: int, round_number: int) -> Iterator[None]:
    """2,300 threads look up missing names."""
    names = (f"missing-{round_number}-{number}" for number in range(1 << 30))

    def look_up() -> None:
        os.stat(next(names), dir_fd=mounted_fd)

    with crowd_of([look_up] * 2300):
        yield


@contextmanager
def opens_fifos(source: Path, mounted_fd: int, round_number: int) -> Iterator[None]:
    """Opens FIFOs that were made at the source under names that are absent on the mount."""

    def open_fifo(number: int) -> None:
        name = f"fifo-{round_number}-{number}-{time.monotonic_ns()}"
        with contextlib.suppress(OSError):
            os.stat(name, dir_fd=mounted_fd)
        os.mkfifo(source / "open" / name, 0o666)
        os.close(os.open(f"open/{name}", os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666, dir_fd=mounted_fd))

    with crowd_of([partial(open_fifo, number) for number in range(100)]):
        yield


@contextmanager
def reads_leased(source: Path, mounted_fd: int, round_number: int, files: int = 90, users: int = 1) -> Iterator[None]:
    """Reads 90 files on which it holds leases; two users read 200 files."""
    names = [f"leased/{round_number}-{number}" for number in range(files)]
    holders = []
    for name in names:
        (source / name).write_bytes(b"leased")
        holders.append(os.open(source / name, os.O_RDWR))
        fcntl.fcntl(holders[-1], fcntl.F_SETLEASE, fcntl.F_WRLCK)
    crowd = Crowd([partial(read_at, mounted_fd, name) for name in names], users)
    time.sleep(1.0)
    try:
        yield
    finally:
        for holder in holders:
            fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            os.close(holder)
        crowd.end()


@contextmanager
def opens_many(source: Path, mounted_fd: int, round_number: int) -> Iterator[None]:
    """Keeps 20,000 files open for writing, or as many as possible."""
    opened: list[int] = []
    lock = threading.Lock()

    def open_one() -> None:
        with lock:
            name = f"open/{round_number}-{len(opened)}-{time.monotonic_ns()}"
            if len(opened) >= 20_000:
                time.sleep(0.01)
                return
        fd = os.open(name, os.O_WRONLY | os.O_CREAT, 0o666, dir_fd=mounted_fd)
        with lock:
            opened.append(fd)

    try:
        with crowd_of([open_one] * 64):
            yield
    finally:
        for fd in opened:
            os.close(fd)


Behaviour = Callable[[Path, int, int], AbstractContextManager[None]]
BEHAVIOURS: dict[str, Behaviour] = {
    "FIFOs": opens_fifos,
    "Look-ups": looks_up,
    "Leases": reads_leased,
    "Leases, two users": partial(reads_leased, files=200, users=2),
    "Open files": opens_many,
}


def measured_ms(mounted_fd: int, cached: Sequence[str], name: str) -> tuple[list[float], list[float]]:
    """The times of hits and misses of the other user."""
    hits, misses = [], []
    set_thread_fs_ids(OTHER, OTHER)
    try:
        buffer = [bytearray(BLOCK)]
        for number in range(HITS):
            began = time.perf_counter()
            fd = os.open(cached[number % len(cached)], os.O_RDONLY | os.O_DIRECT, dir_fd=mounted_fd)
            os.preadv(fd, buffer, 0)
            os.close(fd)
            hits.append((time.perf_counter() - began) * 1000)
        for number in range(MISSES):
            began = time.perf_counter()
            with contextlib.suppress(FileNotFoundError):
                os.stat(f"missing-{name}-{number}", dir_fd=mounted_fd)
            misses.append((time.perf_counter() - began) * 1000)
    finally:
        set_thread_fs_ids(0, 0)
    return hits, misses


def late(times: Sequence[float]) -> float:
    """The 90th percentile, which a user notices."""
    return sorted(times)[math.ceil(0.9 * len(times)) - 1]


def row(name: str, bound: int, added: Sequence[float], before: Sequence[float]) -> tuple[bool, tuple[str, ...]]:
    median = statistics.median(added)
    holds = median <= bound
    spread = f"{min(added):.1f} to {max(added):.1f}"
    return holds, (
        name,
        f"{statistics.median(before):.1f}",
        f"{median:.1f}",
        spread,
        str(bound),
        "yes" if holds else "NO",
    )


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--fastpath/--no-fastpath", default=True)
@click.option("--only", default="", help="Behaviours whose name contains this.")
def main(rounds: int, fastpath: bool, only: str) -> None:
    from rich.console import Console
    from rich.table import Table

    signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel asks the holder to give up a lease
    table = Table(
        title="What one user adds to another, ms: nine of ten, median and spread of the rounds", title_justify="left"
    )
    for heading in ("", "alone", "added", "spread", "at most", "holds"):
        table.add_column(heading, justify="left" if not heading else "right")
    good = True
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as work:
        source = Path(work) / "source"
        cached = make_tree(source, 2, 20, (BLOCK, 4 * BLOCK))
        for name in ("open", "leased"):
            (source / name).mkdir()
            (source / name).chmod(0o777)
        more = [] if fastpath else ["--no-fastpath"]
        more += ["--simulate-latency", str(LATENCY_MS), "--source-timeout", "20"]
        mountpoint = Path(work) / "mnt"
        for title, behaviour in BEHAVIOURS.items():
            if only not in title:
                continue
            added: dict[str, list[float]] = {"hit": [], "miss": []}
            alone: dict[str, list[float]] = {"hit": [], "miss": []}
            with mounted(source, mountpoint, Path(work) / "cache", *more):
                fd = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
                for path in cached[:20]:
                    read_at(fd, path)
                measured_ms(fd, cached[:20], f"{title}-first")
                for number in range(rounds):
                    before = measured_ms(fd, cached[:20], f"{title}-{number}-alone")
                    with behaviour(source, fd, number):
                        now = measured_ms(fd, cached[:20], f"{title}-{number}-crowd")
                    for kind, first, second in zip(("hit", "miss"), before, now, strict=True):
                        alone[kind].append(late(first))
                        added[kind].append(late(second) - late(first))
                os.close(fd)
            for kind, bound in (("hit", HIT_BOUND_MS), ("miss", MISS_BOUND_MS)):
                holds, cells = row(f"{title}, {kind}", bound, added[kind], alone[kind])
                good = good and holds
                table.add_row(*cells)
    Console(width=110).print(table)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
