"""The pyfuse3 adapter: translates requests and answers, and maps errors to errno. The semantics are in `cachefs/fs`.

A handler may raise FUSEError only: anything else would end the mount (pyfuse3). An exception other than OSError is a
bug: it is logged with its traceback and answered with EIO, and the mount goes on.
"""

import errno
import functools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import pyfuse3
import trio

from cachefs.client.client import ALIVE
from cachefs.contract.messages import FAST_HANDLE, OPEN_REPORT
from cachefs.errors import IndexDamaged, errno_of, met_damage
from cachefs.fs.attributes import VIRTUAL, Attributes, Changes
from cachefs.fs.descriptors import Descriptors
from cachefs.fs.directories import Directories
from cachefs.fs.handles import OpenFiles
from cachefs.fs.mutations import Mutations
from cachefs.fs.names import Entry, FileSystem
from cachefs.source import shares
from cachefs.source.credentials import Caller
from cachefs.source.shares import UNKNOWN, Shares
from cachefs.stats.latency import Latencies
from cachefs.store.index.records import Inode
from cachefs.system.clock import NANOSECONDS

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


_KINDS = {
    "lookup": "lookup", "getattr": "getattr", "open": "open", "opendir": "open", "create": "open",
    "readdir": "readdir", "write": "write", "setattr": "write", "fsync": "write", "flush": "write",
}  # fmt: skip
_READ = "read"
"""fetcher.py measures it: it knows whether a READ is a hit."""
_OF_FILES = frozenset({"read", "write", "fsync", "flush", "release"})
"""Requests with a handle and without a caller: they count for the user who opened the handle."""
_OF_DIRECTORIES = frozenset({"readdir", "fsyncdir", "releasedir"})
_REPEATABLE = frozenset({"lookup", "getattr", "readlink", "open", "read", "readdir", "getxattr", "listxattr"})
"""They change nothing at the source; an open may make a file immutable, or truncate it, twice."""
_RELEASES = frozenset({"release", "releasedir"})
"""Never refused: they free something."""
MAX_REQUESTS = 16384
"""Tasks of pyfuse3. A waiting task costs only memory, and hits need tasks, too."""
RESERVED_REQUESTS = 1024
"""Of those, reserved for users with few requests (shares.py). As many more are for the refusal of requests."""


def _handler(function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    name = function.__name__
    kind = _KINDS.get(name, "other")
    refusable = name not in _RELEASES

    @functools.wraps(function)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        operations: Any = args[0]
        if operations.recovering is not None:
            await operations.recovering.wait()
        owner, caller = _owner_of(operations, name, args)
        requests = operations.requests
        if refusable and requests.is_full(owner):
            raise pyfuse3.FUSEError(errno.EAGAIN)
        shares.act_for(owner, caller)
        requests.take(owner)
        began_ns = time.monotonic_ns()
        try:
            return await function(*args, **kwargs)
        except OSError as error:
            raise pyfuse3.FUSEError(errno_of(error)) from None
        except Exception as error:
            if met_damage(error):  # logged: from now on what cannot be read counts as unknown
                return await _repeated(function, *args, **kwargs)
            log.exception("bug in %s, answered EIO", name)
            raise pyfuse3.FUSEError(errno.EIO) from None
        finally:
            requests.give(owner)
            if name != _READ:
                operations.latencies.note(kind, time.monotonic_ns() - began_ns)

    return wrapped


async def _repeated(function: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
    """A request has met damage of the index, and is answered without what was lost. A change may have been made."""
    operations: Any = args[0]
    if operations.recovering is not None:
        await operations.recovering.wait()
    try:
        if function.__name__ in _REPEATABLE:
            return await function(*args, **kwargs)
    except OSError as error:
        raise pyfuse3.FUSEError(errno_of(error)) from None
    except Exception as error:
        if not met_damage(error):
            log.exception("bug in %s, answered EIO", function.__name__)
    raise pyfuse3.FUSEError(errno.EIO)


def _owner_of(operations: "Operations", name: str, args: tuple[Any, ...]) -> tuple[int, Caller | None]:
    """The uid that a request counts for, and the process that waits for its answer."""
    if isinstance(args[-1], pyfuse3.RequestContext):
        return int(args[-1].uid), _caller(args[-1])
    if name in _OF_FILES:
        return operations.files.owner_of(args[1])
    if name in _OF_DIRECTORIES:
        return operations.directories.owner_of(args[1])
    return UNKNOWN, None


def _attributes(inode: Inode, timeout_s: float) -> pyfuse3.EntryAttributes:
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = inode.number
    entry.st_mode, entry.st_nlink, entry.st_rdev = inode.mode, inode.nlink, inode.rdev
    entry.st_uid, entry.st_gid = inode.uid, inode.gid
    entry.st_size, entry.st_blocks, entry.st_blksize = inode.size, inode.blocks or inode.allocated_blocks, inode.blksize
    entry.st_atime_ns, entry.st_mtime_ns, entry.st_ctime_ns = inode.atime_ns, inode.mtime_ns, inode.ctime_ns
    entry.entry_timeout = entry.attr_timeout = timeout_s
    return entry


def _name_only() -> pyfuse3.EntryAttributes:
    """For a listing: the kernel shows the name, of unknown type, and looks it up when its attributes are requested.

    Number 0 would do as well, but pyfuse3 would show it as d_ino, and older C libraries skip such names. The root's
    number is the other one for which the kernel makes no entry (invalid_nodeid in fs/fuse).
    """
    name_only = pyfuse3.EntryAttributes()
    name_only.st_ino = pyfuse3.ROOT_INODE
    name_only.st_mode = 0
    name_only.entry_timeout = name_only.attr_timeout = 0
    return name_only


def _entry(entry: Entry) -> pyfuse3.EntryAttributes:
    if entry.inode is not None:
        return _attributes(entry.inode, entry.timeout_s)
    absent = pyfuse3.EntryAttributes()
    absent.st_ino = 0
    absent.entry_timeout = entry.timeout_s
    return absent


def _caller(context: pyfuse3.RequestContext) -> Caller:
    return Caller(context.uid, context.gid, context.pid, context.umask)


@dataclass(eq=False)
class Operations(pyfuse3.Operations):
    supports_dot_lookup = False
    enable_acl = True  # hazard 18
    enable_writeback_cache = False

    # dependencies
    fs: FileSystem
    descriptors: Descriptors
    files: OpenFiles
    directories: Directories
    mutations: Mutations
    attributes: Attributes
    latencies: Latencies

    def __post_init__(self) -> None:
        # state
        self.requests = Shares(MAX_REQUESTS - 2 * RESERVED_REQUESTS, RESERVED_REQUESTS)
        self.recovering: trio.Event | None = None
        """Set when requests can be served from a damaged index (wiring.py). None: it is not known to be damaged."""
        self.initialized = trio.Event()
        """Set when the kernel has negotiated the connection."""

    def init(self) -> None:
        self.initialized.set()

    def _made(self, inode: Inode) -> pyfuse3.EntryAttributes:
        return _attributes(inode, self.fs.timeout_s(inode))

    # --- reading ---------------------------------------------------------------------------------------------------

    @_handler
    async def lookup(self, parent_inode, name, ctx):  # type: ignore[no-untyped-def]
        caller = _caller(ctx)
        found = self.fs.lookup(parent_inode, name, caller)
        entry = await self.fs.repetitions.look_up(found, caller, (parent_inode, name))
        return _entry(entry)

    @_handler
    async def getattr(self, inode, ctx):  # type: ignore[no-untyped-def]
        caller = _caller(ctx)
        with self.fs.repetitions.on_the_way(caller, inode):
            entry = await self.attributes.getattr(inode)
        if entry.inode is not None:
            self.fs.repetitions.answered(entry.inode, caller)
        return _entry(entry)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        try:
            await self.files.forget(inode_list)
        except IndexDamaged:
            pass
        except Exception:  # a FORGET has no answer
            log.exception("bug in forget")

    @_handler
    async def readlink(self, inode, ctx):  # type: ignore[no-untyped-def]
        return await self.attributes.readlink(inode)

    @_handler
    async def open(self, inode, flags, ctx):  # type: ignore[no-untyped-def]
        if flags & OPEN_REPORT:
            await self.files.opened_unseen(inode, flags)
            return pyfuse3.FileInfo(fh=FAST_HANDLE | inode, keep_cache=False)
        caller = _caller(ctx)
        if flags & (os.O_ACCMODE | os.O_TRUNC):
            with self.descriptors.opening():
                async with self.fs.repetitions.by_path(caller):
                    handle = await self.mutations.open_for_writing(inode, flags, caller)
            return pyfuse3.FileInfo(fh=handle, keep_cache=False)
        with self.descriptors.opening():
            async with self.fs.repetitions.by_path(caller, opens=inode):
                handle, keep_cache = await self.files.open_for_reading(inode, caller, executes=bool(flags & _EXECUTE))
        return pyfuse3.FileInfo(fh=handle, keep_cache=keep_cache)

    @_handler
    async def read(self, fh, off, size):  # type: ignore[no-untyped-def]
        return await self.files.read(fh, off, size)

    @_handler
    async def flush(self, fh):  # type: ignore[no-untyped-def]
        if self.fs.options.read_only:
            raise OSError(errno.ENOSYS, "nothing to flush")  # the kernel sends no other FLUSH (hazard 4)
        await self.files.flush(fh)

    @_handler
    async def release(self, fh):  # type: ignore[no-untyped-def]
        await self.files.release(fh)

    @_handler
    async def opendir(self, inode, ctx):  # type: ignore[no-untyped-def]
        return self.directories.opendir(inode)

    @_handler
    async def readdir(self, fh, start_id, token):  # type: ignore[no-untyped-def]
        emitted = False

        def emit(name: bytes, inode: Inode | None, timeout_s: float, position: int) -> bool:
            nonlocal emitted
            emitted = True
            entry = _name_only() if inode is None else _attributes(inode, timeout_s)
            return pyfuse3.readdir_reply(token, name, entry, position)

        try:
            await self.directories.readdir(fh, start_id, emit)
        except IndexDamaged:
            if not emitted:  # else the kernel asks for the rest again
                raise

    @_handler
    async def releasedir(self, fh):  # type: ignore[no-untyped-def]
        self.directories.releasedir(fh)

    @_handler
    async def statfs(self, ctx):  # type: ignore[no-untyped-def]
        found = await self.attributes.statfs()
        data = pyfuse3.StatvfsData()
        for field in _STATFS_FIELDS:
            setattr(data, field, getattr(found, field))
        return data

    @_handler
    async def getxattr(self, inode, name, ctx):  # type: ignore[no-untyped-def]
        if name == ALIVE:
            return b"1"
        if name.startswith(VIRTUAL):
            return self.attributes.virtual(inode, name)
        caller = _caller(ctx)
        with self.fs.repetitions.on_the_way(caller, inode):
            return await self.attributes.getxattr(inode, name, caller)

    @_handler
    async def listxattr(self, inode, ctx):  # type: ignore[no-untyped-def]
        return _caller(ctx).visible(await self.attributes.listxattr(inode))

    @_handler
    async def access(self, inode, mode, ctx):  # type: ignore[no-untyped-def]
        return True  # default_permissions: the kernel has checked

    # --- writing ---------------------------------------------------------------------------------------------------

    @_handler
    async def create(self, parent_inode, name, mode, flags, ctx):  # type: ignore[no-untyped-def]
        with self.descriptors.opening():
            handle, inode = await self.mutations.create(parent_inode, name, mode, flags, _caller(ctx))
        return pyfuse3.FileInfo(fh=handle, keep_cache=False), self._made(inode)

    @_handler
    async def write(self, fh, off, buf):  # type: ignore[no-untyped-def]
        return await self.mutations.write(fh, off, buf)

    @_handler
    async def fsync(self, fh, datasync):  # type: ignore[no-untyped-def]
        await self.mutations.fsync(fh, datasync)

    @_handler
    async def fsyncdir(self, fh, datasync):  # type: ignore[no-untyped-def]
        await self.mutations.fsync_directory(self.directories.number_of(fh))

    @_handler
    async def setattr(self, inode, attr, fields, fh, ctx):  # type: ignore[no-untyped-def]
        changes = Changes(
            size=attr.st_size if fields.update_size else None,
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
            now=_now(attr.st_ctime_ns) if fields.update_ctime else None,
        )
        caller = _caller(ctx)
        async with self.fs.repetitions.by_path(caller):
            made = await self.mutations.setattr(inode, changes, fh, caller)
        self.fs.repetitions.changed(inode, caller)
        return self._made(made)

    @_handler
    async def mkdir(self, parent_inode, name, mode, ctx):  # type: ignore[no-untyped-def]
        return self._made(await self.mutations.mkdir(parent_inode, name, mode, _caller(ctx)))

    @_handler
    async def mknod(self, parent_inode, name, mode, rdev, ctx):  # type: ignore[no-untyped-def]
        return self._made(await self.mutations.mknod(parent_inode, name, mode, rdev, _caller(ctx)))

    @_handler
    async def symlink(self, parent_inode, name, target, ctx):  # type: ignore[no-untyped-def]
        return self._made(await self.mutations.symlink(parent_inode, name, target, _caller(ctx)))

    @_handler
    async def link(self, inode, new_parent_inode, new_name, ctx):  # type: ignore[no-untyped-def]
        caller = _caller(ctx)
        async with self.fs.repetitions.by_path(caller, link=(new_parent_inode, new_name)):
            return self._made(await self.mutations.link(inode, new_parent_inode, new_name, caller))

    @_handler
    async def unlink(self, parent_inode, name, ctx):  # type: ignore[no-untyped-def]
        await self.mutations.remove(parent_inode, name, _caller(ctx), is_directory=False)

    @_handler
    async def rmdir(self, parent_inode, name, ctx):  # type: ignore[no-untyped-def]
        await self.mutations.remove(parent_inode, name, _caller(ctx), is_directory=True)

    @_handler
    async def rename(self, parent_inode_old, name_old, parent_inode_new, name_new, flags, ctx):  # type: ignore[no-untyped-def]
        await self.mutations.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags, _caller(ctx))

    @_handler
    async def setxattr(self, inode, name, value, ctx):  # type: ignore[no-untyped-def]
        if name.startswith(VIRTUAL):
            raise OSError(errno.EPERM, "it is no attribute of the source")
        caller = _caller(ctx)
        async with self.fs.repetitions.by_path(caller):
            await self.mutations.setxattr(inode, name, value, caller)

    @_handler
    async def removexattr(self, inode, name, ctx):  # type: ignore[no-untyped-def]
        caller = _caller(ctx)
        async with self.fs.repetitions.by_path(caller):
            await self.mutations.removexattr(inode, name, caller)


def _now(mark_ns: int) -> tuple[bool, bool]:
    """Which of atime and mtime a SETATTR sets to "now". The fast path marks it in the ctime, which the kernel never
    sets without a writeback cache (relay.c)."""
    mark = mark_ns // NANOSECONDS
    return bool(mark & 1), bool(mark & 2)


_EXECUTE = 0o40
"""In the flags of an OPEN by execve(2), which needs permission to execute, not to read."""
_STATFS_FIELDS = (
    "f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_namemax",
)  # fmt: skip
