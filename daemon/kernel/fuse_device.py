"""Mounting without libfuse: /dev/fuse is opened here, and may outlive the process that serves it.

Root calls mount(2). Other users need fusermount3, which mounts and sends the descriptor over the socket in
`_FUSE_COMMFD` (the protocol of libfuse's `fuse_mount_fusermount`).
"""

import os
import socket
import subprocess
from collections.abc import Sequence

from cachefs.client.locations import is_root
from cachefs.errors import CacheFsError
from cachefs.system import syscalls

MAX_READ_BYTES = 1 << 20
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
MORE_FLAGS = {"noexec": 8, "nosymfollow": 256}
"""MS_NOEXEC, MS_NOSYMFOLLOW (since Linux 5.10; fusermount3 may not know it, and then refuses)."""


def mount(source: str, mountpoint: str, *, read_only: bool, allow_other: bool, more_flags: Sequence[str] = ()) -> int:
    """Mount a fuse.cachefs, and return the descriptor of its /dev/fuse. Raises CacheFsError with the reason."""
    options = ["default_permissions", f"max_read={MAX_READ_BYTES}"]
    if allow_other:
        options.append("allow_other")
    if is_root():
        return _mount_as_root(source, mountpoint, options, read_only, more_flags)
    return _mount_as_user(source, mountpoint, [*more_flags, *options], read_only)


def _mount_as_root(source: str, mountpoint: str, options: list[str], read_only: bool, more_flags: Sequence[str]) -> int:
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = [f"fd={device}", "rootmode=40000", "user_id=0", "group_id=0", *options]
    flags = _MS_NOSUID | _MS_NODEV | (_MS_RDONLY if read_only else 0) | sum(MORE_FLAGS[each] for each in more_flags)
    try:
        syscalls.mount(source, mountpoint, "fuse.cachefs", flags, ",".join(options))
    except OSError as error:
        os.close(device)
        raise CacheFsError(f"cannot mount on {mountpoint}: {error.strerror}") from error
    return device


def _mount_as_user(source: str, mountpoint: str, options: list[str], read_only: bool) -> int:
    name = source.replace("\\", "\\\\").replace(",", "\\,")
    options = [f"fsname={name}", "subtype=cachefs", "nosuid", "nodev", "ro" if read_only else "rw", *options]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        done = subprocess.run(
            ["fusermount3", "-o", ",".join(options), "--", mountpoint],
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            check=False,
        )
        said = done.stderr.strip().replace("\n", "; ")
        if done.returncode != 0:
            raise CacheFsError(f"cannot mount on {mountpoint}: {said or 'fusermount3 failed'}")
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    if not fds:
        raise CacheFsError(f"cannot mount on {mountpoint}: fusermount3 sent no descriptor")
    os.set_inheritable(fds[0], False)
    return fds[0]
