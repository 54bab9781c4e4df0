"""What runs on the mount during a soak, each job in a process of its own. Each says what went wrong, and how long its
calls took.
"""

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, TypeVar

from cachefs.stats.latency import BUCKETS, Histogram, bucket

T = TypeVar("T")
NAMES = 60
"""Of each writer's files."""


class Report:
    """Of one job."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.doubts = 0
        """Changes of names that were answered EIO: done or not (LC-3)."""
        self.longest_s = 0.0
        self.histogram: Histogram = [0] * (1 + BUCKETS)
        self.wrong = ""

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = time.monotonic_ns()
        yield
        taken = time.monotonic_ns() - began
        self.calls += 1
        self.longest_s = max(self.longest_s, taken / 1e9)
        self.histogram[1 + bucket(taken)] += 1


Job = Callable[[Report, Path, random.Random, Event], None]


def read_still(report: Report, root: Path, draw: random.Random, stop: Event) -> None:
    """Read files that nobody changes, whole or in part. The source is beside the mount, for comparison."""
    mounted, source = root / "mnt" / "still", root / "source" / "still"
    paths = sorted(path.relative_to(source) for path in source.rglob("f*"))
    while not stop.is_set():
        path = draw.choice(paths)
        with report.timed():
            fd = os.open(mounted / path, os.O_RDONLY)
            size = os.fstat(fd).st_size
            at = draw.choice([0, 0, draw.randrange(size)])
            data = os.pread(fd, size - at, at)
            if draw.random() < 0.2:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        with open(source / path, "rb") as file:
            if data != os.pread(file.fileno(), size - at, at):
                raise AssertionError(f"wrong bytes in {path} from {at} on")


def list_still(report: Report, root: Path, draw: random.Random, stop: Event) -> None:
    mounted, source = root / "mnt" / "still", root / "source" / "still"
    there = {str(path.relative_to(source)): path.lstat().st_size for path in source.rglob("*") if path.is_file()}
    while not stop.is_set():
        with report.timed():
            found = {}
            for directory, _, names in os.walk(mounted):
                for name in names:
                    path = os.path.join(directory, name)
                    found[os.path.relpath(path, mounted)] = os.lstat(path).st_size
        if found != there:
            raise AssertionError(f"listed otherwise: {sorted(found.items() ^ there.items())[:5]}")
        stop.wait(draw.uniform(0, 1))


def write_own(report: Report, root: Path, draw: random.Random, stop: Event) -> None:
    """Write, append, rename, unlink and read back. A name that is in doubt may be either; data never are."""
    place = root / "mnt" / "own" / report.name
    place.mkdir(parents=True)
    may_be: dict[str, set[bytes | None]] = {f"w{number:03}": {None} for number in range(NAMES)}

    def change(function: Callable[[], T], then: dict[str, set[bytes | None]]) -> T | None:
        """None: in doubt."""
        try:
            with report.timed():
                result = function()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            report.doubts += 1
            for name, contents in then.items():
                may_be[name] |= contents
            return None
        may_be.update(then)
        return result

    def check(name: str) -> None:
        try:
            with report.timed():
                found: bytes | None = (place / name).read_bytes()
        except FileNotFoundError:
            found = None
        if found not in may_be[name]:
            length = None if found is None else len(found)
            raise AssertionError(f"{name} is not what was written: {length} bytes")
        may_be[name] = {found}

    while not stop.is_set():
        name, other = draw.sample(sorted(may_be), 2)
        check(name)
        (content,) = may_be[name]
        kind = draw.random()
        if content is None or kind < 0.4:
            data = draw.randbytes(draw.choice([10, 5000, 200_000]))
            fd = change(partial(os.open, place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), {name: {b""}})
            if fd is not None:
                with report.timed():
                    os.write(fd, data)
                    os.fsync(fd)
                    os.close(fd)
                may_be[name] = {data}
        elif kind < 0.6:
            with report.timed(), open(place / name, "ab") as file:
                file.write(b"more")
            may_be[name] = {content + b"more"}
        elif kind < 0.8:
            check(other)
            change(partial(os.rename, place / name, place / other), {name: {None}, other: {content}})
        else:
            change(partial(os.unlink, place / name), {name: {None}})
    for name in may_be:
        check(name)


def run(job: Job, name: str, root: Path, seed: int, stop: Event, reports: Any) -> None:
    report = Report(name)
    try:
        job(report, root, random.Random(seed), stop)
    except Exception as error:
        report.wrong = repr(error)
    reports.put(report)
