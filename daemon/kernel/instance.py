"""One mount of ours, told from all others that ever lie on its mountpoint, and what belongs to it alone.

A mountpoint is a name. The mount that a daemon serves is known by its device number: `umount -l` may take it away from
its name while files on it are open, and another mount, of the same source and by another daemon, may lie there then.
So its runtime directory has that number in its name, and it is unmounted only where the mount table has that number.

The kernel uses a device number again once a mount is gone. A daemon that is still writing then recognizes its own
runtime directory by a descriptor; the next mount of that number has moved it aside.
"""

import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cachefs.client import locations, mount_table
from cachefs.client.locations import is_root
from cachefs.client.mount_table import FSTYPE
from cachefs.errors import CacheFsError
from cachefs.system import private_files, syscalls
from cachefs.system.claims import Claim, Taken, is_at
from cachefs.system.unix_socket import socket_address
from daemon.kernel import mounts

log = logging.getLogger(__name__)

FASTPATH_SOCKET = "fastpath"
"""In the runtime directory: where the fast path listens for daemons."""
_BIND = "source"
_END_PATIENCE_S = 15.0
"""For whoever is about to mount or to take over at the same place. Longer than that one waits for a mount to answer."""


def claim_mountpoint(mountpoint: str) -> Claim:
    """For mounting there, or taking over what is: one process at a time. Raises Taken."""
    return Claim.try_to_take(locations.runtime_root(), f"mount-{locations.path_id(mountpoint)}")


class RuntimeDirectory:
    """Of one mount; locked as long as its daemon lives."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError."""
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.is_ours = True
        """Nobody else has it locked."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.is_ours = False

    @property
    def path(self) -> Path:
        """Where it is now."""
        return Path(os.readlink(f"/proc/self/fd/{self._fd}"))

    def is_at(self, path: Path) -> bool:
        return is_at(self._fd, path)

    def remove(self) -> None:
        """With all that is in it; nothing beneath a bind is touched."""
        if self._fd < 0:
            return
        path = self.path
        try:
            if is_root():
                while mount_table.top_mount(str(path / _BIND)) is not None:
                    syscalls.umount2(str(path / _BIND), syscalls.MNT_DETACH)
            for name in os.listdir(self._fd):
                if stat.S_ISDIR(os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mode):
                    os.rmdir(name, dir_fd=self._fd)
                else:
                    os.unlink(name, dir_fd=self._fd)
            if self.is_at(path):
                path.rmdir()
        except OSError as error:
            log.warning("cannot remove the runtime directory %s: %s", path, error.strerror)
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MountInstance:
    def __init__(self, mountpoint: str, device: str) -> None:
        self.mountpoint = mountpoint
        self.device = device
        self.directory = locations.instance_directory(mountpoint, device)
        self._runtime: RuntimeDirectory | None = None

    @classmethod
    def on_top(cls, mountpoint: str) -> "MountInstance | None":
        """The one that is mounted there, if that is one of ours."""
        top = mount_table.top_mount(mountpoint)
        return cls(mountpoint, top.device) if top is not None and top.fstype == FSTYPE else None

    # --- its runtime directory; its mountpoint is claimed ----------------------------------------------------------

    def begin(self, source_fd: int) -> None:
        """It has just been mounted. As root the source is bound in the directory: it may lie under the mount."""
        remove_remains(self.mountpoint, just_mounted=self.device)
        with suppress(FileNotFoundError):  # the last mount of this number has gone, its daemon is still writing
            os.rename(self.directory, self.directory.with_name(f"{self.directory.name}-until-{os.getpid()}"))
        private_files.make_directory(self.directory)
        self._runtime = RuntimeDirectory(self.directory)
        if is_root():
            self._bind(source_fd)

    def take_over(self) -> None:
        """Its daemon has died."""
        private_files.make_directory(self.directory)
        self._runtime = RuntimeDirectory(self.directory)

    def _bind(self, source_fd: int) -> None:
        place = self.directory / _BIND
        private_files.make_directory(place)
        try:
            syscalls.mount(f"/proc/self/fd/{source_fd}", str(place), "", syscalls.MS_BIND)
            syscalls.mount("", str(place), "", syscalls.MS_PRIVATE)
        except OSError as error:
            log.warning("cannot bind the source in %s: %s", place, error.strerror)

    def has_lost_daemon(self) -> bool:
        """Its mountpoint is claimed."""
        try:
            runtime = RuntimeDirectory(self.directory)
        except OSError:
            return False  # the mount belongs to another user, who can find out
        runtime.close()
        return runtime.is_ours

    def is_abandoned(self) -> bool:
        """Its daemon has died, and nobody holds what a successor needs. Its mountpoint is claimed.

        The kernel need not know: a process that was stopped may have its /dev/fuse, and requests wait for ever.
        """
        return self.has_lost_daemon() and not _is_listened_to(self.directory / FASTPATH_SOCKET)

    # --- its end ---------------------------------------------------------------------------------------------------

    def is_on_top(self) -> bool:
        top = mount_table.top_mount(self.mountpoint)
        return top is not None and top.fstype == FSTYPE and top.device == self.device

    def mount(self) -> mount_table.Mount | None:
        """Its row of the mount table, perhaps beneath another. None: it was detached; it lives on for who uses it."""
        found = (m for m in mount_table.mounts() if m.mountpoint == self.mountpoint and m.device == self.device)
        return next(found, None)

    def is_mounted(self) -> bool:
        return self.mount() is not None

    def abort(self) -> None:
        """Abort its connection, where fusectl is mounted: waiting callers get ECONNABORTED.

        For a mount that was detached and that jobs still use. The caller has its /dev/fuse open.
        """
        number = self.device.partition(":")[2]
        with suppress(OSError):
            Path(f"/sys/fs/fuse/connections/{number}/abort").write_text("1")

    def unmount(self, claim: Claim | None) -> None:
        """Take it down if it is still there, dead or alive. `claim`: on the mountpoint, where that is held."""
        if not self.is_on_top():
            return
        try:
            with _claimed(self.directory.parent, self.mountpoint, claim):
                if self._runtime is None or self._runtime.is_at(self.directory):
                    self._unmount_if_same()
        except Taken as other:
            log.warning("%s is left to process %s, which is about to mount there", self.mountpoint, other.pid)
        except (OSError, CacheFsError) as error:
            log.warning("cannot unmount %s: %s", self.mountpoint, getattr(error, "strerror", None) or error)

    def _unmount_if_same(self) -> None:
        """What is compared is what is unmounted, whatever is done to the mountpoint meanwhile."""
        fd = os.open(self.mountpoint, os.O_PATH | os.O_CLOEXEC)  # asks nothing of the mount
        try:
            number = mount_table.number_of(fd)
            if not any(m.number == number and m.device == self.device for m in mount_table.mounts()):
                return
            if is_root():
                # It aborts the connection: waiting callers get ECONNABORTED. It fails all the same, as `fd` is open.
                with suppress(OSError):
                    syscalls.umount2(f"/proc/self/fd/{fd}", syscalls.MNT_FORCE)
                syscalls.umount2(f"/proc/self/fd/{fd}", syscalls.MNT_DETACH)
        finally:
            os.close(fd)
        if not is_root():
            self.abort()
            mounts.unmount(self.mountpoint, lazy=True)

    def let_go(self) -> None:
        """Of its runtime directory: who removes it may be another."""
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None

    def remove(self) -> None:
        """Its runtime directory, and those of earlier mounts there whose daemons could not end themselves."""
        if self._runtime is None:
            return
        self._runtime.remove()
        self._runtime = None
        with suppress(Taken, OSError, CacheFsError):  # then the next one does it
            claim = claim_mountpoint(self.mountpoint)
            try:
                remove_remains(self.mountpoint)
            finally:
                claim.release()


def detach_dead(mountpoint: str, is_dead: Callable[[MountInstance], bool], claim: Claim | None = None) -> bool:
    """Detach dead mounts and abort them, so that the kernel answers the jobs that wait for them. Were there any?

    `claim`: where it is held.
    """
    found = False
    # Where the claim is taken, the process that holds it detaches the dead mount.
    with suppress(Taken, OSError), _claimed(locations.runtime_root(), mountpoint, claim) as held:
        while (there := MountInstance.on_top(mountpoint)) is not None and is_dead(there):
            there.unmount(held)
            if there.is_on_top():
                break
            found = True
    return found


def _is_listened_to(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, suppress(OSError):
        connection.setblocking(False)
        with socket_address(path) as address:
            return connection.connect_ex(address) not in (errno.ECONNREFUSED, errno.ENOENT)
    return False


def remove_remains(mountpoint: str, *, just_mounted: str | None = None) -> None:
    """Remove the runtime directories of mounts on this mountpoint that are gone, and their daemons too.

    `just_mounted`: the device number of a mount that has no runtime directory yet.
    """
    try:
        root = locations.runtime_root()
    except FileNotFoundError:
        return
    kept = {
        locations.instance_directory(mountpoint, m.device)
        for m in mount_table.mounts()
        if m.mountpoint == mountpoint and m.fstype == FSTYPE and m.device != just_mounted
    }
    for path in root.glob(f"{locations.instance_prefix(mountpoint)}*"):
        if path in kept:
            continue
        with suppress(OSError):
            runtime = RuntimeDirectory(path)
            if runtime.is_ours:
                runtime.remove()
            else:
                runtime.close()


@contextmanager
def _claimed(root: Path, mountpoint: str, claim: Claim | None) -> Iterator[Claim]:
    """`root`: where claims lie; what was checked when a mount began serves its end. Raises Taken."""
    if claim is not None:
        yield claim
        return
    taken = Claim.take(root, f"mount-{locations.path_id(mountpoint)}", patience_s=_END_PATIENCE_S)
    try:
        yield taken
    finally:
        taken.release()
