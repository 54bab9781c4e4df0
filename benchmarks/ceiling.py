"""The least work that is possible with pyfuse3: a filesystem that knows all names, and only fetches in threads.

    python -m benchmarks.ceiling SOURCE MOUNTPOINT LATENCY_MS

It has no index, blob, checksums, comparisons or policies: OPEN wakes a thread that opens and reads the file, and READ
waits for it. Its rate is the upper bound of any first epoch through pyfuse3 on the same machine.
"""

import errno
import os
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import outcome
import pyfuse3
import trio

from cachefs.source.source import Source

THREADS = 16


class Ceiling(pyfuse3.Operations):
    def __init__(self, root: str, latency_s: float) -> None:
        super().__init__()
        self.source = Source(os.open(root, os.O_RDONLY | os.O_DIRECTORY), simulate_latency_s=latency_s)
        self.entries: dict[tuple[int, bytes], int] = {}
        self.paths = {pyfuse3.ROOT_INODE: b""}
        self.attributes = {pyfuse3.ROOT_INODE: self.describe(os.lstat(root), pyfuse3.ROOT_INODE)}
        waiting = [pyfuse3.ROOT_INODE]
        while waiting:
            parent = waiting.pop()
            for entry in os.scandir(os.fsencode(root) + b"/" + self.paths[parent]):
                found = entry.stat(follow_symlinks=False)
                number = found.st_ino
                self.entries[parent, entry.name] = number
                self.paths[number] = os.path.join(self.paths[parent], entry.name)
                self.attributes[number] = self.describe(found, number)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(number)
        self.jobs: SimpleQueue[int] = SimpleQueue()
        self.fetched: dict[int, bytes] = {}
        self.readers: dict[int, Any] = {}

    @staticmethod
    def describe(found: os.stat_result, number: int) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino, entry.st_mode, entry.st_size, entry.st_nlink = (
            number,
            found.st_mode,
            found.st_size,
            found.st_nlink,
        )
        entry.entry_timeout = entry.attr_timeout = float("inf")
        return entry

    def work(self, token: trio.lowlevel.TrioToken) -> None:
        while True:
            number = self.jobs.get()
            self.source.round_trip("open")
            fd = os.open(self.paths[number], os.O_RDONLY, dir_fd=self.source.root_fd)
            data = self.source.pread(fd, self.attributes[number].st_size, 0)
            os.close(fd)
            token.run_sync_soon(self.done, number, data)

    def done(self, number: int, data: bytes) -> None:
        task = self.readers.pop(number, None)
        if task is None:
            self.fetched[number] = data
        else:
            trio.lowlevel.reschedule(task, outcome.Value(data))

    async def lookup(self, parent_inode, name, ctx):  # type: ignore[no-untyped-def]
        number = self.entries.get((parent_inode, name))
        if number is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self.attributes[number]

    async def getattr(self, inode, ctx):  # type: ignore[no-untyped-def]
        return self.attributes[inode]

    async def open(self, inode, flags, ctx):  # type: ignore[no-untyped-def]
        self.jobs.put(inode)
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    async def read(self, fh, off, size):  # type: ignore[no-untyped-def]
        if fh in self.fetched:
            return self.fetched.pop(fh)
        self.readers[fh] = trio.lowlevel.current_task()
        return await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)

    async def release(self, fh):  # type: ignore[no-untyped-def]
        pass

    async def forget(self, inode_list):  # type: ignore[no-untyped-def]
        pass


def main(source: str, mountpoint: str, latency_ms: str) -> None:
    operations = Ceiling(source, float(latency_ms) / 1000)
    pyfuse3.init(operations, mountpoint, {"fsname=ceiling", "default_permissions"})

    async def serve() -> None:
        for _ in range(THREADS):
            threading.Thread(target=operations.work, args=(trio.lowlevel.current_trio_token(),), daemon=True).start()
        Path(mountpoint + ".ready").touch()
        await pyfuse3.main()

    trio.run(serve)
    pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main(*sys.argv[1:4])
