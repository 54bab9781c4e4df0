"""A write() that takes as long as a test needs."""

import mmap
import os
import threading
from pathlib import Path

from tests.conftest import wait_for

HALF = 512 << 10


class StalledWrite:
    """One write() whose second half comes from a mapped file that does not answer. In the block the kernel has set the
    times and copied the first half; after it the write has ended."""

    def __init__(self, path: Path, first: bytes, rest: Path, faults: Path) -> None:
        self._hang = faults / "hang"
        self._path = path
        self._before_ns = path.stat().st_mtime_ns
        self._file = os.open(path, os.O_WRONLY)
        self._rest_file = os.open(rest, os.O_RDONLY)
        self._rest = mmap.mmap(self._rest_file, 0, prot=mmap.PROT_READ)
        self._hang.write_text("/rest")
        self._thread = threading.Thread(target=self._write, args=(first,))
        self._thread.start()
        self._release = threading.Timer(4, self.go_on)  # some filesystems block readers meanwhile
        self._release.start()

    def __enter__(self) -> "StalledWrite":
        try:
            wait_for(lambda: self._path.stat().st_mtime_ns, lambda mtime_ns: mtime_ns != self._before_ns)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _write(self, first: bytes) -> None:
        os.writev(self._file, [first, self._rest])

    def go_on(self) -> None:
        self._hang.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        self._release.cancel()
        self.go_on()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._rest.close()
        os.close(self._rest_file)
        os.close(self._file)
