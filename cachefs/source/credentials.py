"""Credentials: changes to the source are made with the identity of the requesting process (hazards 19, 29).

The identity is filesystem uid and gid, supplementary groups, and the effective capabilities. Capabilities matter as
much as the uid: with CAP_FSETID a write keeps set-user-ID bits, with CAP_SYS_RESOURCE it takes reserved blocks and
ignores quotas. setfsuid drops CAP_FSETID but not CAP_SYS_RESOURCE, so the effective set is replaced explicitly.

Calls that create a file are made with the caller's umask: the source knows whether a default ACL of the directory
applies instead (FUSE_DONT_MASK, which the fast path negotiates). All other calls are made with the daemon's umask, 0.
Identity and umask are changed for one thread by raw system calls, never for the process. A thread that cannot restore
its own identity aborts the process, because it must not continue as another user.

A change has two parts: the daemon opens the directory, and the change in it is made as the caller. The kernel has
checked the walk; the caller may have a directory open whose parents it cannot search.

The WRITE and FALLOCATE requests that reach us carry no usable identity. They are made with the identity that opened the
file, as NFS servers do.

Everything else is read as the daemon. A source that squashes root (NFS with root_squash, the default there) refuses the
daemon what only the owner may read. Then the same system call is made once more, as a process that waits for the answer
(`as_admitted`). The kernel has let that process in by mode and ACL, and by these it shows others what is cached then.
"""

import os
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
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
"""CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, MKNOD: assumed for a root process that /proc does not show."""
_TRUSTED = b"trusted."
_HEAD = struct.Struct("<2IQ")
Process = tuple[int, int]
"""(process id, start time in clock ticks); (-1, uid) for a process that /proc does not show."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything that permission checks of the source depend on."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    capabilities: int
    """The effective set, one bit a capability."""

    @property
    def overrides_owner(self) -> bool:
        return bool(self.capabilities & CAP_FOWNER)

    def pack(self) -> bytes:
        """For the session, because an open file outlives the daemon that opened it."""
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
        waiting, _thread.waiting = _thread.waiting, ()
        try:
            _take(self)
            return function()
        finally:
            _thread.waiting = waiting
            try:
                syscalls.set_thread_capabilities(own.capabilities)  # the rest needs CAP_SETUID and CAP_SETGID
                _take(own)
            except BaseException:
                os.abort()


class _Thread(threading.local):
    waiting: Sequence["Caller"] = ()
    """Processes that wait for the present call of this thread. Empty while it has the identity of one of them."""


_thread = _Thread()


def call_for(waiting: Sequence["Caller"], function: Callable[[], T]) -> T:
    """Call `function` in this thread for these processes."""
    _thread.waiting = waiting
    try:
        return function()
    finally:
        _thread.waiting = ()


def as_admitted(function: Callable[[], T], accepts: Callable[[T], bool] = lambda _: True) -> T:
    """Make a system call that changes nothing as the daemon or, if the source refuses that, as a process that waits.

    `accepts`: may the answer that such a process gets be used for others?
    """
    try:
        return function()
    except PermissionError:
        for caller in tuple(_thread.waiting):
            with suppress(PermissionError):
                answer = caller.identity().run(function)
                if accepts(answer):
                    return answer
        raise


def _take(identity: Identity) -> None:
    syscalls.set_thread_groups(list(identity.groups))
    syscalls.set_thread_fs_ids(identity.uid, identity.gid)
    syscalls.set_thread_capabilities(identity.capabilities)  # last: setfsuid changes the set as well


@cache
def own_identity() -> Identity:
    """The daemon's, which never changes. First called in a thread that has taken no other identity."""
    return Identity(os.geteuid(), os.getegid(), tuple(os.getgroups()), syscalls.thread_capabilities()[0])


def unknown_writer() -> Identity:
    """For a file whose opener was not recorded: no capability that bypasses the protection of others."""
    own = own_identity()
    return Identity(own.uid, own.gid, own.groups, own.capabilities & ~(CAP_FSETID | CAP_SYS_RESOURCE))


@dataclass(slots=True)
class Caller:
    """The process that sent a request, according to the kernel."""

    uid: int
    gid: int
    pid: int
    umask: int = 0
    """Of requests that create something; otherwise 0."""
    _identity: Identity | None = field(default=None, repr=False, compare=False)

    def identity(self) -> Identity:
        """Read only once: the process waits for the answer, so that it does not change."""
        if self._identity is None:
            self._identity = self._read()
        return self._identity

    def process(self) -> Process:
        """The process that the calling thread belongs to: the kernel sends the id of the thread.

        Ids of processes are used again, so the start time is part of the answer.
        """
        try:
            with open(f"/proc/{self.pid}/status", "rb") as status:
                (process,) = (int(line.split()[1]) for line in status if line.startswith(b"Tgid:"))
            with open(f"/proc/{process}/stat", "rb") as stat:
                return process, int(stat.read().rpartition(b")")[2].split()[19])  # starttime, field 22 of proc(5)
        except (OSError, LookupError, ValueError):
            return -1, self.uid

    def _read(self) -> Identity:
        groups, effective = self._status()
        if effective is None:  # a process of another pid namespace
            effective = _FILESYSTEM_CAPABILITIES if self.uid == 0 else 0
        elif effective and not self._shares_our_users():
            effective = 0  # valid in its own namespace, not for the source
        return Identity(self.uid, self.gid, groups, effective & syscalls.thread_capabilities()[1])

    def _status(self) -> tuple[tuple[int, ...], int | None]:
        """(supplementary groups, effective capabilities); if /proc does not show the process: primary group, None."""
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
        if ids != (self.uid, self.gid):  # the caller has ended, and another process has its pid
            return (self.gid,), None
        return tuple(groups), effective

    def _shares_our_users(self) -> bool:
        """Is it in our user namespace?

        Two namespaces may have the same map, so their links in /proc decide. Without CAP_SYS_PTRACE, root can read the
        links of processes with no more capabilities than its own, and of those in namespaces that root has made. A link
        that cannot be read is ours, or of another user's namespace, to which only root can have given the same map.
        """
        try:
            return os.readlink(f"/proc/{self.pid}/ns/user") == os.readlink("/proc/self/ns/user")
        except PermissionError:
            pass
        except OSError:
            return False
        try:
            with open(f"/proc/{self.pid}/uid_map", "rb") as theirs, open("/proc/self/uid_map", "rb") as ours:
                return theirs.read() == ours.read()
        except OSError:
            return False

    def visible(self, names: list[bytes]) -> list[bytes]:
        """The names of extended attributes that the caller may see. The kernel leaves this check to filesystems."""
        if not any(name.startswith(_TRUSTED) for name in names) or self.identity().capabilities & CAP_SYS_ADMIN:
            return names
        return [name for name in names if not name.startswith(_TRUSTED)]

    def run(self, function: Callable[[], T]) -> T:
        """Call `function` in this thread as the caller, with its umask."""
        return self.identity().run(partial(syscalls.with_umask, self.umask, function) if self.umask else function)
