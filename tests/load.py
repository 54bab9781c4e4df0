"""Readers and a writer that go on while something happens to the mount, and notice what goes wrong."""

import hashlib
import multiprocessing
import os
import random
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from tests.conftest import contents

KILLS = 20
READERS = 4
fork = multiprocessing.get_context("fork")


def sums_of(root: Path) -> dict[str, bytes]:
    return {str(path): hashlib.sha256(data).digest() for path, data in contents(root).items()}


def read_epochs(root: Path, sums: dict[str, bytes], seed: int, stop: Event, results: Any) -> None:
    """Read files in random order until told to stop; (files, seconds of the longest wait, what went wrong)."""
    draw = random.Random(seed)
    paths = list(sums)
    files, longest, wrong = 0, 0.0, ""
    try:
        while not stop.is_set():
            path = draw.choice(paths)
            started = time.monotonic()
            fd = os.open(root / path, os.O_RDONLY)
            size = os.fstat(fd).st_size
            data = os.read(fd, size)
            os.close(fd)
            longest = max(longest, time.monotonic() - started)
            files += 1
            if hashlib.sha256(data).digest() != sums[path]:
                wrong = f"wrong bytes in {path}"
                break
    except OSError as error:
        wrong = repr(error)
    results.put(("reader", files, longest, wrong))


def write_files(root: Path, doubts: int, stop: Event, results: Any) -> None:
    """Write, close, read back what was written before. What returned must be there; EIO may be said of new names,
    `doubts` times."""
    written: dict[Path, bytes] = {}
    in_doubt = 0
    longest, wrong = 0.0, ""
    log = os.open(root / "log", os.O_WRONLY | os.O_APPEND)
    lines = b""
    number = 0
    while not stop.is_set() and not wrong:
        number += 1
        path, data = root / f"w{number:05}", os.urandom(20_000)
        started = time.monotonic()
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            if "Input/output" not in str(error):
                wrong = repr(error)
            in_doubt += 1
            continue
        try:
            os.write(fd, data)
            os.fsync(fd)
            os.close(fd)
            line = f"{number}\n".encode()
            os.write(log, line)
            lines += line
        except OSError as error:
            wrong = f"{error!r} while writing {path}"
        longest = max(longest, time.monotonic() - started)
        written[path] = data
    os.close(log)
    for path, data in written.items():
        if not wrong and path.read_bytes() != data:
            wrong = f"{path} is not what was written"
    if not wrong and (root / "log").read_bytes() != lines:
        wrong = "the log is not what was written"
    results.put(("writer", len(written), longest, wrong or f"{in_doubt} in doubt" * (in_doubt > doubts)))


class Load:
    """Four readers and a writer, as processes."""

    def __init__(
        self, readers_root: Path, sums: dict[str, bytes], writer_root: Path | None, doubts: int = KILLS
    ) -> None:
        self.stop = fork.Event()
        self.results: Any = fork.Queue()
        self.processes = [
            fork.Process(target=read_epochs, args=(readers_root, sums, seed, self.stop, self.results))
            for seed in range(READERS)
        ]
        if writer_root is not None:
            (writer_root / "log").touch()  # here, before anything is killed: EIO is the answer to a new name in doubt
            self.processes.append(fork.Process(target=write_files, args=(writer_root, doubts, self.stop, self.results)))
        for process in self.processes:
            process.start()

    def finish(self) -> float:
        """The longest wait of all, in seconds. Fails with whatever went wrong."""
        self.stop.set()
        found = [self.results.get(timeout=60) for _ in self.processes]
        for process in self.processes:
            process.join(20)
        assert not [wrong for _, _, _, wrong in found if wrong], found
        assert all(count > 0 for _, count, _, _ in found), found
        return max(longest for _, _, longest, _ in found)
