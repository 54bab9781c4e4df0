"""Whose write: changes to the source are made with the identity of the process that asked for them (hazard 19).

The kernel has applied the caller's umask before it sends a mode, so the daemon's own umask is 0. Identity is changed
for one thread by raw system calls, never for the process; a thread that cannot get its own back ends the process
rather than go on as somebody else.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cachefs.syscalls import set_thread_fs_ids, set_thread_groups

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Caller:
    uid: int
    gid: int
    pid: int

    def groups(self) -> list[int]:
        """The supplementary groups; the primary one alone where they cannot be read."""
        try:
            with open(f"/proc/{self.pid}/status", "rb") as status:
                for line in status:
                    if line.startswith(b"Groups:"):
                        return [int(group) for group in line.split()[1:]]
        except OSError:
            pass
        return [self.gid]

    def run(self, function: Callable[[], T]) -> T:
        """Call `function` in this thread as the caller. An unprivileged daemon only ever has itself as a caller."""
        if os.geteuid() != 0 or (self.uid == 0 and self.gid == 0):
            return function()
        own_groups = os.getgroups()
        try:
            set_thread_groups(self.groups())
            set_thread_fs_ids(self.uid, self.gid)
            return function()
        finally:
            try:
                set_thread_fs_ids(0, os.getegid())
                set_thread_groups(own_groups)
            except OSError:
                os.abort()
