"""A source that others change while a mount serves it, and readers that write down what they saw.

Every file consists of one block of 512 bytes, repeated: its number, its version, and whether it is a secret. A number
belongs to one inode for ever. The processes that change something log when they began and ended, which file came to
which name of which directory, and which directory to which path; the readers log which number and version they got from
which path. `judge` compares the logs afterwards. A directory is the same under another path (hazard 23): a path may
show what was ever in a directory that was ever there.
"""

import errno
import json
import multiprocessing
import os
import random
import shutil
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

BLOCK = 512
_HEADER = struct.Struct("<QQQ")  # number, version, secret
STRANGER = 65534
"""User and group of the readers. Secrets are root's, with mode 0600."""
PAIRS = 3
NAMES = 12
WINDOW_S = 10.0
"""For how long after a write a reader may still see some of the file before it, and some after it: such data is not
kept, but it is only dropped once the file has come of age."""
TOLERATED = {errno.ENOENT, errno.ESTALE, errno.EACCES, errno.ENOTDIR}
fork = multiprocessing.get_context("fork")


def block(number: int, version: int, secret: bool) -> bytes:
    return _HEADER.pack(number, version, secret).ljust(BLOCK, b"\xa5")


def size_of(number: int, version: int) -> int:
    """Bytes of a version. Every third file keeps its size, so that sizes alone give nothing away."""
    draw = random.Random(number if number % 3 == 0 else f"{number} {version}")
    return BLOCK * (draw.choice([1, 20, 200, 1000]) if number % 40 else 9000)


class Log:
    """JSON lines of one process; appended to after a kill of the mount, never after the end of the process."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", buffering=1 << 16)

    def write(self, **fields: Any) -> None:
        self._file.write(json.dumps(fields) + "\n")

    def flush(self) -> None:
        """Before a fork: what is buffered would be written twice."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def directories() -> list[str]:
    """Of the tree; the two of a pair change places now and then."""
    return [f"pair{pair}/{side}" for pair in range(PAIRS) for side in ("current", "previous")]


class Changer:
    """Changes the source directly, as another node would."""

    def __init__(self, root: Path, log: Log, seed: int) -> None:
        self.root, self.log, self.draw = root, log, random.Random(seed)
        self.next_number = 1
        self.version_of: dict[int, int] = {}
        self.directory_at: dict[str, int] = {}

    def build(self) -> None:
        for path in directories():
            (self.root / path).mkdir(parents=True)
            self.placed(path, self.number())
            for name in range(NAMES):
                self.create(f"{path}/f{name:02}")

    def number(self) -> int:
        self.next_number += 1
        return self.next_number

    def placed(self, path: str, directory: int) -> None:
        """Log, before it happens, that a directory comes to a path."""
        self.log.write(kind="placed", path=path, directory=directory)
        self.directory_at[path] = directory

    def came(self, path: str, number: int) -> None:
        """Log, before it happens, that a file comes to a path."""
        parent, name = path.rsplit("/", 1)
        self.log.write(kind="came", directory=self.directory_at[parent], name=name, number=number)

    def create(self, path: str) -> None:
        """A new file, renamed over what has the name."""
        number = self.number()
        secret = self.draw.random() < 0.2
        self.version_of[number] = 1
        new = self.root / f"{path}.new"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, block(number, 1, secret) * (size_of(number, 1) // BLOCK))
        if not secret:
            os.fchmod(fd, 0o644)
        os.close(fd)
        self.came(path, number)
        os.rename(new, self.root / path)

    def rewrite(self, path: str) -> None:
        """In place, in one write."""
        fd = os.open(self.root / path, os.O_RDWR)
        try:
            number, _, secret = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
            version = self.version_of[number] = self.version_of[number] + 1
            size = size_of(number, version)
            began = time.monotonic()
            os.pwrite(fd, block(number, version, bool(secret)) * (size // BLOCK), 0)
            os.ftruncate(fd, size)
            self.log.write(kind="changed", number=number, began=began, ended=time.monotonic())
        finally:
            os.close(fd)

    def link(self, path: str, other: str) -> None:
        new = self.root / f"{other}.link"
        os.link(self.root / path, new)
        fd = os.open(new, os.O_RDONLY)
        number = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))[0]
        os.close(fd)
        self.came(other, number)
        os.rename(new, self.root / other)  # does nothing where both are links of one file
        new.unlink(missing_ok=True)

    def swap(self, pair: int) -> None:
        """The two directories of a pair change places."""
        one, two = (f"pair{pair}/{side}" for side in ("current", "previous"))
        first, second = self.directory_at[one], self.directory_at[two]
        self.placed(one, second)
        self.placed(two, first)
        aside = self.root / f"pair{pair}/aside"
        os.rename(self.root / one, aside)
        os.rename(self.root / two, self.root / one)
        os.rename(aside, self.root / two)

    def replace(self, pair: int) -> None:
        """`current` becomes `previous`, and a new one takes its place (hazard 23)."""
        current, previous = f"pair{pair}/current", f"pair{pair}/previous"
        gone, new = self.root / f"pair{pair}/gone{self.number()}", self.root / f"pair{pair}/new"
        os.rename(self.root / previous, gone)
        self.placed(previous, self.directory_at[current])
        os.rename(self.root / current, self.root / previous)
        new.mkdir()
        self.placed(current, self.number())
        os.rename(new, self.root / current)
        for name in range(NAMES):
            self.create(f"{current}/f{name:02}")
        shutil.rmtree(gone, ignore_errors=True)

    def change(self) -> None:
        """One change at random."""
        path, other = (f"{self.draw.choice(directories())}/f{self.draw.randrange(NAMES):02}" for _ in range(2))
        kind = self.draw.random()
        if kind < 0.04:
            self.replace(self.draw.randrange(PAIRS))
        elif kind < 0.08:
            self.swap(self.draw.randrange(PAIRS))
        elif kind < 0.4:
            self.create(path)
        else:
            with suppress(FileNotFoundError, struct.error):  # it was unlinked here or through the mount, or is empty
                if kind < 0.8:
                    self.rewrite(path)
                elif kind < 0.9:
                    self.link(path, other)
                else:
                    (self.root / path).unlink()


def change_source(changer: Changer, stop: Event, pause_s: float) -> None:
    while not stop.wait(pause_s * changer.draw.uniform(0, 2)):
        changer.change()
    changer.log.close()


def change_through(mountpoint: Path, log_path: Path, seed: int, stop: Event) -> None:
    """Renames, links and unlinks through the mount, as root."""
    draw, log = random.Random(seed), Log(log_path)
    while not stop.wait(draw.uniform(0, 0.1)):
        directory = draw.choice(directories())
        path, other = (f"{directory}/f{draw.randrange(NAMES):02}" for _ in range(2))
        kind = draw.random()
        try:
            if kind < 0.4:
                log.write(kind="moved", path=directory, source=path[-3:], target=other[-3:])
                os.rename(mountpoint / path, mountpoint / other)
            elif kind < 0.7:
                log.write(kind="moved", path=directory, source=path[-3:], target=other[-3:])
                os.link(mountpoint / path, mountpoint / other)
            elif kind < 0.85:
                os.unlink(mountpoint / path)
            else:
                (mountpoint / directory / f"scratch{seed}").mkdir()
                (mountpoint / directory / f"scratch{seed}").rmdir()
        except OSError as error:
            log.write(kind="failed", errno=error.errno, at=time.monotonic(), path=path)
    log.close()


@contextmanager
def call(name: str) -> Iterator[None]:
    """An error says in which call it came."""
    try:
        yield
    except OSError as error:
        error.add_note(name)
        raise


def read_whole(path: Path, pieces: int) -> bytes:
    with call("open"):
        fd = os.open(path, os.O_RDONLY)
    try:
        with call("fstat"):
            size = os.fstat(fd).st_size
        step = -(-size // pieces // BLOCK) * BLOCK or BLOCK
        parts = []
        for offset in range(0, size, step):
            end = min(offset + step, size)
            with call(f"pread {offset} of {size}"):
                while offset < end and (part := os.pread(fd, end - offset, offset)):  # short: the rest may be an error
                    parts.append(part)
                    offset += len(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def look(path: Path, pieces: int = 1) -> list[tuple[int, int, int]]:
    """The (number, version, secret) of what a file holds, one entry where it holds one version as a whole.

    A size that is not that of the version counts as a mix: the version is there twice.
    """
    data = read_whole(path, pieces)
    if not data:
        return []
    head = data[:BLOCK]
    if len(head) == BLOCK and data == head * (len(data) // BLOCK):
        found = _HEADER.unpack_from(head)
        return [found] if len(data) == size_of(found[0], found[1]) else [found, found]
    heads = {data[at : at + BLOCK] for at in range(0, len(data), BLOCK)}
    return sorted(_HEADER.unpack_from(each.ljust(BLOCK, b"\0")) for each in heads)


def read_mount(mountpoint: Path, log_path: Path, seed: int, stop: Event) -> None:
    """Read at random as a stranger, and log what was new about what was seen."""
    os.setgroups([])
    os.setresgid(STRANGER, STRANGER, STRANGER)
    os.setresuid(STRANGER, STRANGER, STRANGER)
    draw, log = random.Random(seed), Log(log_path)
    seen: set[tuple[str, int]] = set()
    reads = 0
    while not stop.is_set():
        path = f"{draw.choice(directories())}/f{draw.randrange(NAMES):02}"
        started = time.monotonic()
        try:
            if draw.random() < 0.05:
                with call("listdir"):
                    os.listdir((mountpoint / path).parent)
            found = look(mountpoint / path, draw.choice([1, 1, 3]))
        except OSError as error:
            if error.errno not in TOLERATED:
                failed = getattr(error, "__notes__", [])
                log.write(kind="failed", errno=error.errno, call=failed, began=started, at=time.monotonic(), path=path)
                stop.wait(0.05)
            continue
        reads += 1
        if len(found) > 1 or any((path, number) not in seen or secret for number, _, secret in found):
            log.write(kind="read", path=path, began=started, ended=time.monotonic(), found=found)
            seen.update((path, number) for number, _, _ in found)
    log.write(kind="total", reads=reads)
    log.close()


def entries(paths: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def judge(
    changes: list[dict[str, Any]], reads: list[dict[str, Any]], *, mutable: bool, window_s: float = WINDOW_S
) -> list[str]:
    """What no reader may have seen, one line each.

    `mutable`: some files are, by their names or since an unpin. Where such a file is cut off while it is read the
    kernel shows zeros where the end was, as it does on any FUSE filesystem (bindfs too): one more version then.
    """
    files: dict[tuple[int, str], set[int]] = defaultdict(set)
    places: dict[str, set[int]] = defaultdict(set)
    writes: dict[int, list[tuple[float, float]]] = defaultdict(list)
    moves: set[tuple[str, str, str]] = set()
    for entry in changes:
        if entry["kind"] == "came":
            files[entry["directory"], entry["name"]].add(entry["number"])
        elif entry["kind"] == "placed":
            places[entry["path"]].add(entry["directory"])
        elif entry["kind"] == "moved":
            moves.add((entry["path"], entry["source"], entry["target"]))
        elif entry["kind"] == "changed":
            writes[entry["number"]].append((entry["began"], entry["ended"]))
    steps = {((d, old), (d, new)) for path, old, new in moves for d in places[path]}
    grown = True
    while grown:  # moves race with the changes: whatever may have the one name may get the other
        grown = False
        for old, new in steps:
            if not files[old] <= files[new]:
                files[new] |= files[old]
                grown = True
    wrong = []
    for entry in reads:
        if entry["kind"] != "read":
            continue
        found = [tuple(each) for each in entry["found"]]
        numbers = {number for number, _, _ in found}
        if mutable and any(
            began <= entry["ended"] and ended >= entry["began"] for number in numbers for began, ended in writes[number]
        ):
            numbers.discard(0)
        parent, name = entry["path"].rsplit("/", 1)
        told = f"{entry['path']} at {entry['began']:.3f}: {found}"
        if any(secret for _, _, secret in found):
            wrong.append(f"a secret, {told}")
        elif len(numbers) > 1:
            wrong.append(f"several files in one, {told}")
        elif not any(numbers <= files[directory, name] for directory in places[parent]):
            wrong.append(f"another file, {told}")
        elif len(found) > 1 and not any(
            began <= entry["ended"] and ended + window_s >= entry["began"] for began, ended in writes[min(numbers)]
        ):
            wrong.append(f"a mix of versions, {told}")
    return wrong


def start(target: Callable[..., None], *arguments: Any) -> Any:
    process = fork.Process(target=target, args=arguments)
    process.start()
    return process
