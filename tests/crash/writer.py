"""A process that writes through a mount, and notes in a manifest what write() and fsync() said.

    python -m tests.crash.writer MOUNTPOINT MANIFEST SEED

It ends when its standard input does. The manifest has two lines for each write, with the number of bytes that were
acknowledged: 0 before it is made, then what it returned. Files are opened read-write, so that none becomes immutable.
A wrong byte that it reads is the end of it, with status 1.
"""

import errno
import json
import os
import random
import select
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MOST = 200_000
LOST = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ENOENT, errno.EBADF, errno.ESTALE}
"""Where the fast path and the daemon are killed together, the mount is gone for a while, and its handles for good."""


@dataclass
class Model:
    """What a file must contain."""

    content: bytearray = field(default_factory=bytearray)
    uncertain: list[tuple[int, int]] = field(default_factory=list)
    """Ranges whose write was not acknowledged: they may have either content, and the file may end within them."""

    def write(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        self.content.extend(bytes(max(end - len(self.content), 0)))
        self.content[offset:end] = data
        self.uncertain = [part for start, stop in self.uncertain for part in _less(start, stop, offset, end)]

    def doubt(self, offset: int, length: int) -> None:
        self.uncertain.append((offset, offset + length))

    def differs(self, found: bytes) -> str:
        """What is wrong with what was read; empty: nothing."""
        longest = max([len(self.content), *(stop for _, stop in self.uncertain)])
        if not len(self.content) <= len(found) <= longest:
            return f"{len(found)} bytes instead of {len(self.content)} to {longest}"
        certain, wanted = bytearray(found[: len(self.content)]), bytearray(self.content)
        for start, stop in self.uncertain:
            zeros = bytes(max(min(stop, len(wanted)) - start, 0))
            certain[start : start + len(zeros)] = wanted[start : start + len(zeros)] = zeros
        if certain == wanted:
            return ""
        first = next(at for at, byte in enumerate(certain) if byte != wanted[at])
        return f"wrong from byte {first}"


def _less(start: int, stop: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """What of the first range is not in the second."""
    if start < min(stop, first):
        yield start, min(stop, first)
    if max(start, last) < stop:
        yield max(start, last), stop


def data_of(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def models(manifest: Path) -> dict[str, Model]:
    """What the files of a manifest must contain."""
    found: dict[str, Model] = {}
    for line in manifest.read_text().splitlines():
        name, offset, length, seed, written = json.loads(line)
        model = found.setdefault(name, Model())
        if written:
            model.write(offset, data_of(seed, length)[:written])
        else:
            model.doubt(offset, length)
    return found


def open_on_mount(mountpoint: Path, name: str, manifest: Path) -> int:
    """Open or create a file, but not in the directory beneath the mount, which is on the manifest's disk."""
    directory = os.open(mountpoint, os.O_PATH | os.O_DIRECTORY)
    try:
        if os.fstat(directory).st_dev == manifest.stat().st_dev:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return os.open(name, os.O_RDWR | os.O_CREAT, 0o644, dir_fd=directory)
    finally:
        os.close(directory)


def read_whole(fd: int) -> bytes:
    """All of a file. A part alone proves nothing: the kernel gives what it has where the rest cannot be had."""
    found = bytearray()
    while part := os.pread(fd, MOST + 1, len(found)):
        found += part
    return bytes(found)


def main(mountpoint: Path, manifest: Path, seed: int) -> None:
    draw = random.Random(seed)
    known: dict[str, Model] = {}
    handles: dict[str, int] = {}
    with open(manifest, "w", buffering=1) as notes:
        while not select.select([sys.stdin], [], [], 0)[0]:
            name = f"writer{seed}-{draw.randrange(20)}"
            model = known.setdefault(name, Model())
            try:
                if name not in handles:
                    handles[name] = open_on_mount(mountpoint, name, manifest)
                fd = handles[name]
                if draw.random() < 0.3:
                    wrong = model.differs(read_whole(fd))
                    if wrong:
                        sys.exit(f"{name} was read wrong: {wrong}")
                    continue
                offset = draw.randint(0, min(len(model.content), MOST // 2))
                length, content = draw.choice([1, 700, 4096, 60_000]), draw.randrange(1 << 32)
                notes.write(json.dumps([name, offset, length, content, 0]) + "\n")
                model.doubt(offset, length)
                data = data_of(content, length)
                written = os.pwrite(fd, data, offset)
                if draw.random() < 0.2:
                    os.fsync(fd)
                notes.write(json.dumps([name, offset, length, content, written]) + "\n")
                model.write(offset, data[:written])
                if draw.random() < 0.1:
                    os.close(handles.pop(name))
            except OSError as error:
                if error.errno not in LOST:
                    raise
                with suppress(KeyError, OSError):
                    os.close(handles.pop(name))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
