"""Whose change: changes to the source are made with the identity of the process that asked for them (hazards 19, 29).

The identity is filesystem uid and gid, supplementary groups, and the effective capabilities. Capabilities count as much
as the uid: with CAP_FSETID a write leaves set-user-ID bits in place, with CAP_SYS_RESOURCE it takes reserved blocks and
ignores quotas. setfsuid drops CAP_FSETID but not CAP_SYS_RESOURCE, so the effective set is replaced explicitly.

What makes a file is called with the caller's umask: the source knows whether a default ACL of the directory counts
instead (FUSE_DONT_MASK, which the fast path asks for). Everything else is called with the daemon's, which is 0.
Identity and umask are changed for one thread by raw system calls, never for the process; a thread that cannot get its
own identity back ends the process rather than go on as another user.

A change is split: the daemon opens the directory, the caller makes the change in it. The kernel has checked the walk;
the caller may hold a directory open whose parents it cannot search.

WRITE and FALLOCATE carry no identity that reaches us. They are made with the identity that opened the file, which is
what NFS servers do.
"""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TypeVar

from cachefs.system import syscalls

T = TypeVar("T")

CAP_FOWNER = 1 << 3
CAP_FSETID = 1 << 4
CAP_SYS_ADMIN = 1 << 21
CAP_SYS_RESOURCE = 1 << 24
CAP_SETFCAP = 1 << 31
_FILESYSTEM_CAPABILITIES = 0x1F | 1 << 27
"""CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, MKNOD: what root has that /proc does not show."""
_TRUSTED = b"trusted."
_HEAD = struct.Struct("<2IQ")


@dataclass(frozen=True, slots=True)
class Identity:
    """What the source's permission checks look at."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    capabilities: int
    """The effective set, one bit a capability."""

    @property
    def overrides_owner(self) -> bool:
        return bool(self.capabilities & CAP_FOWNER)

    def pack(self) -> bytes:
        """For the session: an open file outlives the daemon that opened it."""
        return _HEAD.pack(self.uid, self.gid, self.capabilities) + struct.pack(f"<{len(self.groups)}I", *self.groups)

    @classmethod
    def unpack(cls, value: bytes) -> "Identity":
        uid, gid, capabilities = _HEAD.unpack_from(value)
        return cls(uid, gid, struct.unpack_from(f"<{(len(value) - _HEAD.size) // 4}I", value, _HEAD.size), capabilities)

    def run(self, function: Callable[[], T]) -> T:
        """Call `function` in this thread with this identity. An unprivileged daemon only ever has its own."""
        if os.geteuid() != 0:
            return function()
        own = own_identity()
        if self == own:
            return function()
        try:
            _take(self)
            return function()
        finally:
            try:
                syscalls.set_thread_capabilities(own.capabilities)  # the rest needs CAP_SETUID and CAP_SETGID
                _take(own)
            except BaseException:
                os.abort()


def _take(identity: Identity) -> None:
    syscalls.set_thread_groups(list(identity.groups))
    syscalls.set_thread_fs_ids(identity.uid, identity.gid)
    syscalls.set_thread_capabilities(identity.capabilities)  # last: setfsuid changes the set as well


@cache
def own_identity() -> Identity:
    """The daemon's, which never changes. First called in a thread that has taken no other identity."""
    return Identity(os.geteuid(), os.getegid(), tuple(os.getgroups()), syscalls.thread_capabilities()[0])


def unknown_writer() -> Identity:
    """For a file opened by a daemon that did not record who opened it: no exemption from what protects others."""
    own = own_identity()
    return Identity(own.uid, own.gid, own.groups, own.capabilities & ~(CAP_FSETID | CAP_SYS_RESOURCE))


@dataclass(slots=True)
class Caller:
    """The process that a request came from, as the kernel names it."""

    uid: int
    gid: int
    pid: int
    umask: int = 0
    """In requests that make a file or directory; 0 in others."""
    _identity: Identity | None = field(default=None, repr=False, compare=False)

    def identity(self) -> Identity:
        """Read once: the process waits for us."""
        if self._identity is None:
            self._identity = self._read()
        return self._identity

    def _read(self) -> Identity:
        groups, effective = self._status()
        if effective is None:  # a process of another pid namespace
            effective = _FILESYSTEM_CAPABILITIES if self.uid == 0 else 0
        elif effective and not self._shares_our_users():
            effective = 0  # they are capabilities over its own namespace, not over the source
        return Identity(self.uid, self.gid, groups, effective & syscalls.thread_capabilities()[1])

    def _status(self) -> tuple[tuple[int, ...], int | None]:
        """(supplementary groups, effective capabilities); without /proc the primary group alone, and None."""
        found: dict[bytes, list[bytes]] = {}
        try:
            with open(f"/proc/{self.pid}/status", "rb") as status:
                for line in status:
                    name, _, value = line.partition(b":")
                    found[name] = value.split()
            ids = int(found[b"Uid"][3]), int(found[b"Gid"][3])
            groups, effective = [int(group) for group in found[b"Groups"]], int(found[b"CapEff"][0], 16)
        except (OSError, LookupError, ValueError):
            return (self.gid,), None
        if ids != (self.uid, self.gid):  # the caller is gone, and its number is another process's
            return (self.gid,), None
        return tuple(groups), effective

    def _shares_our_users(self) -> bool:
        """Is it in our user namespace? Its link in /proc needs CAP_SYS_PTRACE; the map needs nothing."""
        try:
            with open(f"/proc/{self.pid}/uid_map", "rb") as theirs, open("/proc/self/uid_map", "rb") as ours:
                return theirs.read() == ours.read()
        except OSError:
            return False

    def visible(self, names: list[bytes]) -> list[bytes]:
        """Those of these extended attributes whose names the caller may see. The kernel leaves that to filesystems."""
        if not any(name.startswith(_TRUSTED) for name in names) or self.identity().capabilities & CAP_SYS_ADMIN:
            return names
        return [name for name in names if not name.startswith(_TRUSTED)]

    def run(self, function: Callable[[], T]) -> T:
        """Call `function` in this thread as the caller, with its umask."""
        return self.identity().run(partial(syscalls.with_umask, self.umask, function) if self.umask else function)
