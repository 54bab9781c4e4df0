"""A node: the filesystem's objects over a real source directory and cache directory, under a kernel of our own.

What `daemon/serving.py` does at start and end, without /dev/fuse, processes, sockets and signals.
"""

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import trio
import trio.testing
from outcome import Outcome, capture

from cachefs.contract.index import ROOT_INODE
from cachefs.data.shared_files import close_all
from cachefs.options import Options
from cachefs.source.directories import ROOT
from cachefs.store.cache_directory import CacheDirectory, OpenedIndex
from cachefs.store.index.records import Inode
from daemon.wiring import Components
from tests.model.clocks import AgeingSource, Clocks
from tests.model.kernel import File, Kernel

T = TypeVar("T")
FLUSH_S = 30.0


class TrioThread:
    """Runs asynchronous functions for code that is not, on clocks that can jump."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks

    @contextmanager
    def running(self) -> Iterator[Callable[..., Any]]:
        """Yields `call(function, *arguments)`, which waits for the result."""
        started = threading.Event()

        async def main() -> None:
            self._token = trio.lowlevel.current_trio_token()
            self._stop = trio.Event()
            started.set()
            await self._stop.wait()

        thread = threading.Thread(target=partial(trio.run, main, clock=self._clocks.trio))
        thread.start()
        started.wait()
        try:
            yield partial(trio.from_thread.run, trio_token=self._token)
        finally:
            trio.from_thread.run_sync(self._stop.set, trio_token=self._token)
            thread.join()


class Node:
    """A mount. Its methods are system calls and commands; `call` runs them."""

    def __init__(self, source: Path, place: Path, options: Options, clocks: Clocks, draw: random.Random) -> None:
        """`place`: an empty directory for the cache and the session."""
        self._source_fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
        self._cache, self._session = place / "cache", place / "session"
        self._source, self._options, self._clocks, self._draw = source, options, clocks, draw
        self.kernel = Kernel(clocks, draw)
        self._parts: Components
        self._is_killed: bool
        self._ended: trio.Event
        self._stopped: trio.Event

    # --- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Mount."""
        ready: list[Outcome[None]] = []
        is_ready = trio.Event()
        self._ended = trio.Event()

        async def serve() -> None:
            try:
                await self._serve(is_ready)
            except BaseException as error:
                if is_ready.is_set():
                    raise
                ready.append(capture(_raise, error))
                is_ready.set()
            finally:
                self._ended.set()

        trio.lowlevel.spawn_system_task(serve)
        await is_ready.wait()
        for outcome in ready:
            outcome.unwrap()

    async def _serve(self, is_ready: trio.Event) -> None:
        directory = CacheDirectory(self._cache, str(self._source))
        blob = directory.open_blob()
        source = AgeingSource(os.dup(self._source_fd), self._clocks)
        opened = OpenedIndex(
            directory.open_durable(blob),
            self._session,
            self._options.revalidate,
            b"",
            mutable=self._options.mutable.patterns,
        )
        flushed = False
        self._stopped, self._is_killed = trio.Event(), False
        try:
            async with trio.open_nursery() as nursery:
                self.kernel = Kernel(self._clocks, self._draw)
                parts = Components(source, opened, blob, self._options, nursery, -1, None, self.kernel)  # type: ignore[arg-type]
                self._parts = parts
                self.kernel.attach(parts, await self._look_at_root(parts))
                nursery.start_soon(parts.writes.run)
                nursery.start_soon(parts.young.run)
                if parts.limit is not None:
                    nursery.start_soon(parts.invalidation.limit_metadata, parts.limit, parts.metrics)
                is_ready.set()
                await self._stopped.wait()
                if self._is_killed:
                    close_all(each.fd for each in parts.descriptors.opened_at_source())
                else:
                    flushed = await parts.writes.flush(FLUSH_S)
                    await parts.files.close()
                nursery.cancel_scope.cancel()
            parts.call_pool.close()
        finally:
            if self._is_killed:
                opened.index.close()
            else:
                opened.close(flushed=flushed)
            blob.close()
            directory.close()
            source.directories.clear()
            os.close(source.root_fd)

    async def _look_at_root(self, parts: Components) -> Inode:
        metadata, index = parts.metadata, parts.opened.index
        with index.view() as view:
            root = metadata.inode(view, ROOT_INODE)
        now = await parts.call_pool.run(partial(parts.source.lstat, ROOT)) if root is None else None
        with index.update() as update:
            metadata.drop_unlinked(update)
            if now is not None:
                root = metadata.apply_root(update, now, pin=parts.filesystem.pins(b""))
        assert root is not None
        return root

    async def stop(self) -> None:
        """Unmount."""
        self._stopped.set()
        await self._ended.wait()

    async def kill(self) -> None:
        """As SIGKILL: nothing is flushed, and nothing is told."""
        self._is_killed = True
        await self.stop()

    async def remount(self) -> None:
        await self.stop()
        await self.start()

    async def crash(self) -> None:
        await self.kill()
        await self.start()

    async def lose_index(self) -> None:
        await self.stop()
        shutil.rmtree(self._cache / "index")
        await self.start()

    async def end(self) -> None:
        await self.stop()
        os.close(self._source_fd)

    # --- system calls ----------------------------------------------------------------------------------------------

    async def stat(self, path: str) -> tuple[int, int]:
        """(mode, size)"""
        found = await self.kernel.stat(path)
        return found.mode, found.size

    async def open(self, path: str, flags: int) -> File:
        return await self.kernel.open(path, flags)

    async def read(self, file: File, offset: int, length: int) -> bytes:
        return await self.kernel.read(file, offset, length)

    async def write(self, file: File, offset: int, data: bytes) -> int:
        return await self.kernel.write(file, offset, data)

    async def close(self, file: File) -> None:
        await self.kernel.close(file)

    async def listdir(self, path: str) -> list[str]:
        return await self.kernel.listdir(path)

    async def truncate(self, path: str, size: int) -> None:
        await self.kernel.truncate(path, size)

    async def mkdir(self, path: str) -> None:
        await self.kernel.mkdir(path)

    async def unlink(self, path: str) -> None:
        await self.kernel.unlink(path)

    async def rmdir(self, path: str) -> None:
        await self.kernel.rmdir(path)

    async def rename(self, old: str, new: str) -> None:
        await self.kernel.rename(old, new)

    async def link(self, old: str, new: str) -> None:
        await self.kernel.link(old, new)

    # --- commands --------------------------------------------------------------------------------------------------

    async def invalidate(self, path: str) -> None:
        await self._parts.filesystem.invalidate(path.encode())

    async def evict(self, path: str) -> None:
        await self._parts.invalidation.evict([path.encode()])

    async def unpin(self, path: str) -> None:
        await self._parts.invalidation.unpin([path.encode()])

    async def flush(self) -> None:
        await self._parts.writes.flush_queued(FLUSH_S)

    async def shrink(self, share: float) -> None:
        await self.kernel.shrink(share)

    async def pass_time(self, seconds: float) -> None:
        self._clocks.jump(seconds)
        await trio.testing.wait_all_tasks_blocked()


class Synchronous:
    """A node whose methods wait."""

    def __init__(self, node: Node, call: Callable[..., Any]) -> None:
        self._node, self._call = node, call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, getattr(self._node, name))


def _raise(error: BaseException) -> None:
    raise error
