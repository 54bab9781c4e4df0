"""A handle of the kernel: an open file, and its record in the session, by which a successor finds it."""

import os
import struct
from dataclasses import dataclass, field

from cachefs.data.fetcher import OpenFile
from cachefs.source import shares
from cachefs.source.credentials import Caller, Identity

# Value flags, open(2) flags and those below, inode, owner. The writer's identity follows.
_SAVED = struct.Struct("<2IQq")
_NO_OWNER = struct.pack("<q", shares.UNKNOWN)
_UNSYNCED, _LOST = 1 << 31, 1 << 30


@dataclass(slots=True)
class Handle:
    """An open file: either an immutable one, served from the cache, or a descriptor of the source."""

    number: int
    """The inode's."""
    file: OpenFile | None = None
    fd: int = -1
    """-1: not opened by this daemon yet. `Descriptors.use` does so."""
    writable: bool = False
    flags: int = os.O_RDONLY
    """O_RDONLY, O_WRONLY or O_RDWR: how to reopen it."""
    is_direct: bool = False
    """Was it opened with O_DIRECT?"""
    writer: Identity | None = None
    """The identity that opened it for writing; writes are made with it. None: not known."""
    handle: int = 0
    """Its number for the kernel."""
    borrowers: int = 0
    """How many calls use `fd` other than requests by this handle."""
    released: bool = False
    """Closed by the kernel, or a duplicate for one borrower: the last borrower closes `fd`."""
    owner: int = field(default_factory=shares.owner)
    """The user whose share of the descriptors it counts for (shares.py)."""
    caller: Caller | None = field(default_factory=shares.caller)
    """The process that opened it. None: not known, because a predecessor opened it."""
    generation: int = 0
    """Of the source in which `fd` was opened (`Source.generation`)."""
    changes: int = 0
    """How many writes and truncations were made by this handle."""
    unsynced_since: int | None = None
    """The generation of the source in which the oldest change that is not synced was made. None: all are synced."""
    stale: list[int] = field(default_factory=list)
    """Descriptors of before the source was remounted: calls may still use them."""

    @property
    def is_cached(self) -> bool:
        """Is it served from the cache, not by `fd`?"""
        return self.file is not None and not self.file.is_mutable

    def is_open(self, generation: int) -> bool:
        """Has it a descriptor of this generation of the source?"""
        return self.fd >= 0 and self.generation == generation

    def take_descriptors(self) -> list[int]:
        """Those that must be closed: who takes them closes them, and nothing else can any more."""
        taken, self.fd, self.stale = [fd for fd in (self.fd, *self.stale) if fd >= 0], -1, []
        return taken

    def has_lost(self, generation: int) -> bool:
        """Was the source remounted after a change that was not synced? `generation`: the present one."""
        return self.unsynced_since is not None and self.unsynced_since < generation

    def pack(self, generation: int) -> bytes:
        """Its record in the session. `generation`: the present one of the source."""
        unsynced = _UNSYNCED if self.unsynced_since is not None else 0
        lost = _LOST if self.has_lost(generation) else 0
        direct = os.O_DIRECT if self.is_direct else 0
        value = _SAVED.pack(0, self.flags | direct | unsynced | lost, self.number, self.owner)
        return value + (self.writer.pack() if self.writer else b"")

    @classmethod
    def unpack(cls, handle: int, value: bytes, generation: int) -> "Handle":
        """A handle of a predecessor. `generation`: of the source that the predecessor had when it saved the record."""
        if len(value) < _SAVED.size:  # by an earlier version
            value += _NO_OWNER
        _, flags, number, owner = _SAVED.unpack_from(value)
        writer = Identity.unpack(value[_SAVED.size :]) if len(value) > _SAVED.size else None
        mode = flags & os.O_ACCMODE
        opened = cls(
            number, writable=mode != os.O_RDONLY, flags=mode, handle=handle, owner=owner, caller=None, writer=writer
        )
        opened.is_direct = bool(flags & os.O_DIRECT)
        if flags & (_LOST | _UNSYNCED):
            opened.unsynced_since = generation - 1 if flags & _LOST else generation
        return opened
