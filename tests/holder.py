"""A process that has files open on a mount.

A test must not have them open itself while its mount has no daemon: the children that it starts would close copies of
them, which sends a FLUSH to the daemon and waits for the answer.
"""

import os
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import mmap, os, sys
maps = {}
fds = [os.open(path, int(sys.argv[1])) for path in sys.argv[2:]]
print("open", flush=True)
for line in sys.stdin:
    command, number, data = line.split()
    fd = fds[int(number)]
    try:
        if command == "write":
            os.pwrite(fd, data.encode(), 0)
            answer = data
        elif command == "fsync":
            os.fsync(fd)
            answer = data
        elif command == "truncate":
            os.ftruncate(fd, int(data))
            answer = data
        elif command == "chmod":
            os.fchmod(fd, int(data, 8))
            answer = f"{os.fstat(fd).st_mode & 0o777:o}"
        elif command == "links":
            answer = os.fstat(fd).st_nlink
        elif command == "kinds":
            if fd not in maps:
                maps[fd] = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
            answer = "".join(sorted(set(maps[fd][:].decode())))
        else:
            answer = os.pread(fd, len(data), 0).decode()
    except OSError as error:
        answer = error.errno
    print(answer, flush=True)
"""


class Holder:
    def __init__(self, *paths: Path, flags: int = os.O_RDWR | os.O_CREAT) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(flags), *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None and self._process.stdout.readline() == "open\n"

    def ask(self, command: str, number: int, data: str = "-") -> str:
        """What was read or written, or the errno.

        `read` reads as many bytes as `data` has. `kinds`: which different characters the file consists of, read
        through a mapping that stays: dropping caches does not drop its pages.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{command} {number} {data}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        self._process.communicate(timeout=60)

    def __enter__(self) -> "Holder":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
