"""A kernel: entries, attributes and pages with their time-outs, and what it asks a filesystem when they have run out.

As fs/fuse of Linux 6.18 with `default_permissions`, readdirplus and automatic invalidation of pages, without writeback
cache; single-threaded. It forgets at random, when it is told to. An errno is an OSError, as the caller of the system
call sees it. An assertion fails where a filesystem breaks what the kernel relies on.
"""

import errno
import os
import random
import stat
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import trio
from outcome import acapture

from cachefs.contract.index import ROOT_INODE
from cachefs.fs.attributes import Changes
from cachefs.source import shares
from cachefs.source.credentials import Caller
from cachefs.store.index.records import Inode
from daemon.wiring import Components
from tests.model.clocks import Clocks

T = TypeVar("T")
PAGE = 4096
REPLY_ENTRIES = 7
"""Of one READDIRPLUS: few, so that most listings need several."""


def failed(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@dataclass
class KernelInode:
    number: int
    record: Inode
    attributes_until: float
    size: int
    lookups: int = 0
    opens: int = 0
    pages: dict[int, bytes] = field(default_factory=dict)

    @property
    def kind(self) -> int:
        return stat.S_IFMT(self.record.mode)


@dataclass
class File:
    """An open file."""

    inode: KernelInode
    handle: int
    flags: int


class Kernel:
    def __init__(self, clocks: Clocks, draw: random.Random) -> None:
        self._clocks = clocks
        self._dropped_ns: dict[int, int] = {}
        self._draw = draw
        self._inodes: dict[int, KernelInode] = {}
        self._entries: dict[tuple[int, bytes], tuple[int, float]] = {}
        """(directory, name) → (inode, until when it counts); inode 0: there is none."""
        self._forgotten: list[tuple[int, int]] = []
        """(inode, look-ups) of what was dropped. The filesystem has not heard of it yet."""
        self._caller = Caller(0, 0, os.getpid())
        self.parts: Components

    def attach(self, parts: Components, root: Inode) -> None:
        """A new mount, or a new daemon for the one that there is."""
        self.parts = parts
        if ROOT_INODE not in self._inodes:
            self._inodes[ROOT_INODE] = KernelInode(ROOT_INODE, root, 0.0, 0, lookups=1)

    def _now(self) -> float:
        return self._clocks.clock.monotonic_s()

    # --- what the filesystem says ----------------------------------------------------------------------------------

    def _learn(self, record: Inode, timeout_s: float, *, lookup: bool) -> KernelInode:
        until = self._now() + timeout_s
        inode = self._inodes.get(record.number)
        if inode is None:
            inode = self._inodes[record.number] = KernelInode(record.number, record, until, record.size)
        else:
            assert inode.kind == stat.S_IFMT(record.mode), f"inode {record.number} changed its type"
            if inode.size != record.size or inode.record.mtime_ns != record.mtime_ns:
                inode.pages.clear()
            inode.record, inode.size, inode.attributes_until = record, record.size, until
        inode.lookups += lookup
        return inode

    def _enter(self, parent: int, name: bytes, record: Inode, timeout_s: float) -> KernelInode:
        inode = self._learn(record, timeout_s, lookup=True)
        before = self._entries.get((parent, name), (0, 0.0))[0]
        if before not in (0, inode.number):
            self._drop_entry(parent, name)
        self._entries[parent, name] = inode.number, self._now() + timeout_s
        return inode

    def _drop_entry(self, parent: int, name: bytes) -> None:
        """With everything beneath it that is a directory's."""
        number = self._entries.pop((parent, name), (0, 0.0))[0]
        if number and not self._names_of(number):
            for beneath in [key for key in self._entries if key[0] == number]:
                self._drop_entry(*beneath)

    def _names_of(self, number: int) -> list[tuple[int, bytes]]:
        return [key for key, (inode, _) in self._entries.items() if inode == number]

    def _changed(self, *numbers: int) -> None:
        """By a request of ours: the attributes are asked for again."""
        for number in numbers:
            if number in self._inodes:
                self._inodes[number].attributes_until = 0.0

    # --- notifications (see cachefs/fuse/notifier.py) -----------------------------------------------------------------

    def drop_soon(self, entries: Sequence[tuple[int, bytes]], numbers: Sequence[int] = ()) -> None:
        for parent, name in entries:
            self._drop_entry(parent, name)
            self._changed(parent)
        for number in numbers:
            self.attributes(number)
            if number in self._inodes:
                self._inodes[number].pages.clear()

    async def drop(self, entries: Sequence[tuple[int, bytes]], numbers: Sequence[int]) -> None:
        self.drop_soon(entries, numbers)

    async def pages(self, numbers: Iterable[int]) -> None:
        self.drop_soon((), list(numbers))

    def attributes(self, number: int) -> bool:
        self._changed(number)
        if number in self._inodes:
            self._dropped_ns[number] = self._clocks.monotonic_ns()
        return number in self._inodes

    def dropped_between(self, number: int, since_ns: int, until_ns: int) -> bool:
        return since_ns <= self._dropped_ns.get(number, 0) <= until_ns

    # --- memory ----------------------------------------------------------------------------------------------------

    async def shrink(self, share: float) -> None:
        """Memory is short: forget a share of what nobody uses, children before their directories."""
        for key in sorted(self._entries, reverse=True):
            if self._draw.random() < share:
                number = self._entries[key][0]
                if not any(parent == number for parent, _ in self._entries):
                    del self._entries[key]
        for inode in self._inodes.values():
            if self._draw.random() < share:
                inode.pages.clear()
        used = {number for number, _ in self._entries.values()} | {parent for parent, _ in self._entries} | {ROOT_INODE}
        gone = [inode for inode in self._inodes.values() if inode.number not in used and not inode.opens]
        for inode in gone:
            del self._inodes[inode.number]
        self._forgotten += [(inode.number, inode.lookups) for inode in gone]
        if self._draw.random() < 0.5:
            await self._send_forgets()

    async def _forget_meanwhile(self) -> None:
        """While a request is under way, memory may be short."""
        for _ in range(self._draw.choice([0, 0, 1, 10])):
            for _ in range(self._draw.randrange(20)):
                await trio.lowlevel.checkpoint()
            await self.shrink(0.5)
            await self._send_forgets()

    async def _send_forgets(self) -> None:
        """Some time after an inode was dropped. It may have been looked up again by then."""
        forgotten, self._forgotten = self._forgotten, []
        await self.parts.files.forget(forgotten)

    # --- paths -----------------------------------------------------------------------------------------------------

    async def _lookup(self, parent: int, name: bytes) -> KernelInode | None:
        shares.act_for(0)
        filesystem = self.parts.filesystem
        looked_up = filesystem.lookup(parent, name, self._caller)
        found = await filesystem.repetitions.look_up(looked_up, self._caller, (parent, name))
        await self._send_forgets()
        if found.inode is None:
            self._drop_entry(parent, name)
            self._entries[parent, name] = 0, self._now() + found.timeout_s
            return None
        return self._enter(parent, name, found.inode, found.timeout_s)

    async def _step(self, parent: int, name: bytes, *, again: bool) -> KernelInode | None:
        known = self._entries.get((parent, name))
        if known is not None and not again and self._now() < known[1]:
            return self._inodes[known[0]] if known[0] else None
        if known is not None and known[0]:
            with suppress(OSError):
                found = await self._lookup(parent, name)
                if found is not None and found.number == known[0]:
                    return found
            self._drop_entry(parent, name)
        return await self._lookup(parent, name)

    async def _attributes(self, inode: KernelInode) -> Inode:
        if self._now() >= inode.attributes_until:
            shares.act_for(0)
            found = await self.parts.attributes.getattr(inode.number)
            assert found.inode is not None
            self._learn(found.inode, found.timeout_s, lookup=False)
        return inode.record

    async def _directory(self, path: str, *, again: bool) -> KernelInode:
        """The one in which the last name of a path is."""
        inode = self._inodes[ROOT_INODE]
        for name in path.encode().split(b"/")[:-1]:
            inode = await self._directory_in(inode, name, again=again)
        await self._attributes(inode)
        return inode

    async def _directory_in(self, inode: KernelInode, name: bytes, *, again: bool) -> KernelInode:
        await self._attributes(inode)
        found = await self._step(inode.number, name, again=again)
        if found is None:
            raise failed(errno.ENOENT)
        if found.kind != stat.S_IFDIR:
            raise failed(errno.ENOTDIR)
        return found

    async def _walk(self, path: str, call: Callable[[KernelInode, bytes, bool], Awaitable[T]]) -> T:
        """`call(directory, name, everything is looked up again)`; once more where that says ESTALE."""
        name = path.rpartition("/")[2].encode()
        try:
            return await call(await self._directory(path, again=False), name, False)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        return await call(await self._directory(path, again=True), name, True)

    async def _existing(self, directory: KernelInode, name: bytes, again: bool) -> KernelInode:
        found = await self._step(directory.number, name, again=again) if name else directory
        if found is None:
            raise failed(errno.ENOENT)
        return found

    # --- system calls ----------------------------------------------------------------------------------------------

    async def stat(self, path: str) -> Inode:
        async def call(directory: KernelInode, name: bytes, again: bool) -> Inode:
            return await self._attributes(await self._existing(directory, name, again))

        return await self._walk(path, call)

    async def open(self, path: str, flags: int) -> File:
        async def call(directory: KernelInode, name: bytes, again: bool) -> File:
            found = await self._step(directory.number, name, again=again)
            if found is None and flags & os.O_CREAT:
                return await self._create(directory, name, flags)
            if found is None:
                raise failed(errno.ENOENT)
            if flags & os.O_EXCL:
                raise failed(errno.EEXIST)
            if found.kind != stat.S_IFREG:
                raise failed(errno.EISDIR)
            await self._attributes(found)
            return await self._open(found, flags)

        return await self._walk(path, call)

    async def _create(self, directory: KernelInode, name: bytes, flags: int) -> File:
        mutations, filesystem = self.parts.mutations, self.parts.filesystem
        shares.act_for(0)
        with self.parts.descriptors.opening():
            handle, record = await mutations.create(directory.number, name, 0o644, flags, self._caller)
        inode = self._enter(directory.number, name, record, filesystem.timeout_s(record))
        inode.opens += 1
        inode.pages.clear()
        self._changed(directory.number)
        return File(inode, handle, flags)

    async def _open(self, inode: KernelInode, flags: int) -> File:
        files = self.parts.files
        shares.act_for(0)
        with self.parts.descriptors.opening():
            is_read = not flags & (os.O_ACCMODE | os.O_TRUNC)
            async with self.parts.filesystem.repetitions.by_path(self._caller, opens=inode.number if is_read else 0):
                if not is_read:
                    handle = await self.parts.mutations.open_for_writing(inode.number, flags, self._caller)
                    keeps = False
                else:
                    handle, keeps = await files.open_for_reading(inode.number, self._caller)
        if not keeps:
            inode.pages.clear()
        if flags & os.O_TRUNC:
            inode.size = 0
            self._changed(inode.number)
        inode.opens += 1
        return File(inode, handle, flags)

    async def close(self, file: File) -> None:
        file.inode.opens -= 1
        if not self.parts.options.read_only:
            await self.parts.files.flush(file.handle)
        await self.parts.files.release(file.handle)

    async def read(self, file: File, offset: int, length: int) -> bytes:
        shares.act_for(0)
        await self._attributes(file.inode)
        inode = file.inode
        end = min(offset + length, inode.size)
        if offset >= end:
            return b""
        wanted = range(offset // PAGE, -(-end // PAGE))
        for page in wanted:
            if page not in inode.pages:
                await self._read_pages(file, page, min(wanted[-1], page + 31))
        data = b"".join(inode.pages.get(page, b"").ljust(PAGE, b"\0") for page in wanted)
        start = wanted[0] * PAGE
        return data[offset - start : min(end, inode.size) - start]

    async def _read_pages(self, file: File, first: int, last: int) -> None:
        inode, length = file.inode, (last - first + 1) * PAGE
        data = bytes(await self.parts.files.read(file.handle, first * PAGE, length))
        assert len(data) <= length
        if len(data) < length and first * PAGE + len(data) < inode.size:
            inode.size = first * PAGE + len(data)
        for page in range(first, last + 1):
            start = (page - first) * PAGE
            inode.pages.setdefault(page, data[start : start + PAGE])

    async def write(self, file: File, offset: int, data: bytes) -> int:
        shares.act_for(0)
        inode = file.inode
        await self._attributes(inode)
        try:
            written = await self.parts.mutations.write(file.handle, offset, data)
        finally:
            self._changed(inode.number)
        for page in range(offset // PAGE, (offset + written + PAGE - 1) // PAGE):
            self._write_page(inode, page, offset, data[:written])
        inode.size = max(inode.size, offset + written)
        return written

    @staticmethod
    def _write_page(inode: KernelInode, page: int, offset: int, data: bytes) -> None:
        start, end = max(offset, page * PAGE), min(offset + len(data), (page + 1) * PAGE)
        whole = end - start == PAGE
        if whole or page in inode.pages:
            old = inode.pages.get(page, b"").ljust(PAGE, b"\0")
            part = data[start - offset : end - offset]
            inode.pages[page] = old[: start - page * PAGE] + part + old[end - page * PAGE :]

    async def fsync(self, file: File) -> None:
        shares.act_for(0)
        await self.parts.mutations.fsync(file.handle, False)

    async def listdir(self, path: str) -> list[str]:
        async def call(directory: KernelInode, name: bytes, again: bool) -> list[str]:
            inode = await self._existing(directory, name, again)
            if inode.kind != stat.S_IFDIR:
                raise failed(errno.ENOTDIR)
            await self._attributes(inode)
            return await self._list(inode)

        return await self._walk(path, call)

    async def _list(self, inode: KernelInode) -> list[str]:
        directories = self.parts.directories
        shares.act_for(0)
        handle = directories.opendir(inode.number)
        inode.opens += 1
        names: list[str] = []
        position = 0
        try:
            while True:
                reply: list[tuple[bytes, Inode | None, float, int]] = []

                def emit(
                    name: bytes, record: Inode | None, timeout_s: float, position: int, reply: list = reply
                ) -> bool:
                    if len(reply) == REPLY_ENTRIES:
                        return False
                    reply.append((name, record, timeout_s, position))
                    return True

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._forget_meanwhile)
                    outcome = await acapture(directories.readdir, handle, position, emit)
                outcome.unwrap()
                if not reply:
                    return names
                for name, record, timeout_s, next_position in reply:
                    assert next_position > position
                    position = next_position
                    if name in (b".", b".."):
                        continue
                    names.append(name.decode())
                    if record is not None:
                        self._enter(inode.number, name, record, timeout_s)
        finally:
            inode.opens -= 1
            directories.releasedir(handle)

    async def truncate(self, path: str, size: int) -> None:
        async def call(directory: KernelInode, name: bytes, again: bool) -> None:
            inode = await self._existing(directory, name, again)
            if inode.kind != stat.S_IFREG:
                raise failed(errno.EISDIR)
            await self._attributes(inode)
            shares.act_for(0)
            async with self.parts.filesystem.repetitions.by_path(self._caller):
                record = await self.parts.mutations.setattr(inode.number, Changes(size=size), None, self._caller)
            self._learn(record, self.parts.filesystem.timeout_s(record), lookup=False)
            inode.pages.clear()

        await self._walk(path, call)

    async def mkdir(self, path: str) -> None:
        async def call(directory: KernelInode, name: bytes, again: bool) -> None:
            if await self._step(directory.number, name, again=True) is not None:
                raise failed(errno.EEXIST)
            shares.act_for(0)
            record = await self.parts.mutations.mkdir(directory.number, name, 0o755, self._caller)
            self._enter(directory.number, name, record, self.parts.filesystem.timeout_s(record))
            self._changed(directory.number)

        await self._walk(path, call)

    async def unlink(self, path: str) -> None:
        await self._remove(path, is_directory=False)

    async def rmdir(self, path: str) -> None:
        await self._remove(path, is_directory=True)

    async def _remove(self, path: str, *, is_directory: bool) -> None:
        async def call(directory: KernelInode, name: bytes, again: bool) -> None:
            inode = await self._existing(directory, name, again)
            if is_directory != (inode.kind == stat.S_IFDIR):
                raise failed(errno.ENOTDIR if is_directory else errno.EISDIR)
            shares.act_for(0)
            try:
                await self.parts.mutations.remove(directory.number, name, self._caller, is_directory=is_directory)
            except OSError as error:
                if error.errno == errno.ENOENT:
                    self._drop_entry(directory.number, name)
                raise
            self._drop_entry(directory.number, name)
            self._changed(directory.number, inode.number)

        await self._walk(path, call)

    async def rename(self, old: str, new: str, flags: int = 0) -> None:
        async def call(directory: KernelInode, name: bytes, again: bool) -> None:
            target = await self._directory(new, again=again)
            new_name = new.rpartition("/")[2].encode()
            inode = await self._existing(directory, name, again)
            replaced = await self._step(target.number, new_name, again=True)
            if replaced is inode:
                return  # two names of one file, or the same name: rename(2) does nothing
            self._check_rename(inode, target, replaced)
            shares.act_for(0)
            try:
                await self.parts.mutations.rename(directory.number, name, target.number, new_name, flags, self._caller)
            except OSError as error:
                if error.errno == errno.ENOENT:
                    self._drop_entry(directory.number, name)
                    self._drop_entry(target.number, new_name)
                raise
            self._drop_entry(target.number, new_name)
            moved = self._entries.pop((directory.number, name), None)
            if moved is not None:
                self._entries[target.number, new_name] = moved
            self._changed(directory.number, target.number, inode.number, *([replaced.number] if replaced else []))

        await self._walk(old, call)

    def _check_rename(self, inode: KernelInode, target: KernelInode, replaced: KernelInode | None) -> None:
        """What fs/namei.c refuses itself."""
        above: set[int] = set()
        todo = [target.number]
        while todo:
            number = todo.pop()
            if number not in above:
                above.add(number)
                todo += [parent for parent, _ in self._names_of(number)]
        if inode.number in above:
            raise failed(errno.EINVAL)
        if replaced is not None and (replaced.kind == stat.S_IFDIR) != (inode.kind == stat.S_IFDIR):
            raise failed(errno.EISDIR if replaced.kind == stat.S_IFDIR else errno.ENOTDIR)

    async def link(self, old: str, new: str) -> None:
        async def call(directory: KernelInode, name: bytes, again: bool) -> None:
            inode = await self._existing(directory, name, again)
            if inode.kind == stat.S_IFDIR:
                raise failed(errno.EPERM)
            target = await self._directory(new, again=again)
            new_name = new.rpartition("/")[2].encode()
            if await self._step(target.number, new_name, again=True) is not None:
                raise failed(errno.EEXIST)
            shares.act_for(0)
            async with self.parts.filesystem.repetitions.by_path(self._caller, link=(target.number, new_name)):
                record = await self.parts.mutations.link(inode.number, target.number, new_name, self._caller)
            self._enter(target.number, new_name, record, self.parts.filesystem.timeout_s(record))
            self._changed(target.number, inode.number)

        await self._walk(old, call)
