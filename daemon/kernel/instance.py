"""One cachefs mount, as distinct from other mounts on its mountpoint, and its runtime directory.

A mountpoint is a name. The mount that a daemon serves is identified by its device number: `umount -l` may detach it
while files on it are open, and another daemon may then mount the same source there. So the name of its runtime
directory has that number, and it is unmounted only if the mount table has that number.

The kernel reuses a device number when a mount is gone. A daemon that is still writing then recognizes its own runtime
directory by a descriptor; the next mount with that number has moved it aside.
"""

import errno
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cachefs.client import locations, mount_table
from cachefs.client.client import server
from cachefs.client.locations import is_root
from cachefs.client.mount_table import FSTYPE
from cachefs.errors import CacheFsError
from cachefs.system import private_files, syscalls
from cachefs.system.claims import Claim, Taken, is_at, is_dying, try_to_lock
from cachefs.system.descriptors import closing
from cachefs.system.unix_socket import socket_address
from daemon.kernel import mounts

log = logging.getLogger(__name__)

FASTPATH_SOCKET = "fastpath"
"""The socket in the runtime directory on which the fast path listens for daemons."""
_BIND = "source"
_END_PATIENCE_S = 15.0
"""How long to wait for a process that is mounting or taking over there. It waits less long for a mount to answer."""


def claim_mountpoint(mountpoint: str) -> Claim:
    """The right to mount there, or to take over a mount: for one process at a time. Raises Taken."""
    return Claim.try_to_take(locations.runtime_root(), f"mount-{locations.path_id(mountpoint)}")


class RuntimeDirectory:
    """The runtime directory of one mount. Its daemon keeps it locked."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError."""
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.is_ours = try_to_lock(self._fd)
        """No other process has locked it."""

    @property
    def path(self) -> Path:
        """Its current path."""
        return Path(os.readlink(f"/proc/self/fd/{self._fd}"))

    def is_at(self, path: Path) -> bool:
        return is_at(self._fd, path)

    def remove(self) -> None:
        """Remove it and its contents. A bind mount in it is detached first."""
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
        """The topmost mount there, if that is a cachefs. None: it is not."""
        top = mount_table.top_mount(mountpoint)
        return cls(mountpoint, top.device) if top is not None and top.fstype == FSTYPE else None

    # --- the runtime directory; the mountpoint is claimed ------------------------------------------------------------

    def begin(self, source_fd: int) -> None:
        """After mounting: make the runtime directory. Root binds the source in it, which the mount may cover."""
        remove_remains(self.mountpoint, just_mounted=self.device)
        with suppress(FileNotFoundError):  # the last mount of this number is gone, but its daemon still writes
            os.rename(self.directory, self.directory.with_name(f"{self.directory.name}-until-{os.getpid()}"))
        self.take_over()
        if not is_root():
            return
        place = self.directory / _BIND
        private_files.make_directory(place)
        try:
            syscalls.mount(f"/proc/self/fd/{source_fd}", str(place), "", syscalls.MS_BIND)
            syscalls.mount("", str(place), "", syscalls.MS_PRIVATE)
        except OSError as error:
            log.warning("cannot bind the source in %s: %s", place, error.strerror)

    def take_over(self) -> None:
        """Lock the runtime directory, which has no daemon."""
        private_files.make_directory(self.directory)
        self._runtime = RuntimeDirectory(self.directory)

    def has_lost_daemon(self) -> bool:
        """Is there no daemon? The mountpoint is claimed."""
        try:
            runtime = RuntimeDirectory(self.directory)
        except OSError:
            return False  # the mount belongs to another user
        runtime.close()
        if runtime.is_ours:
            return True
        pid = server(self.mountpoint, self.directory)
        return pid is not None and is_dying(pid)  # it was killed, and its source hangs

    def is_abandoned(self) -> bool:
        """Has the daemon died, and no fast path holds the descriptors for a successor? The mountpoint is claimed.

        The kernel may not know: a stopped process may have /dev/fuse open, and requests wait for ever.
        """
        return self.has_lost_daemon() and not _is_listened_to(self.directory / FASTPATH_SOCKET)

    # --- the end ---------------------------------------------------------------------------------------------------

    def is_on_top(self) -> bool:
        top = mount_table.top_mount(self.mountpoint)
        return top is not None and top.fstype == FSTYPE and top.device == self.device

    def mount(self) -> mount_table.Mount | None:
        """Its row of the mount table, perhaps beneath another mount. None: it is detached, and lives while used."""
        found = (m for m in mount_table.mounts() if m.mountpoint == self.mountpoint and m.device == self.device)
        return next(found, None)

    def is_mounted(self) -> bool:
        return self.mount() is not None

    def abort(self, has_ended: Callable[[], bool]) -> None:
        """Abort its connection, if fusectl is mounted: waiting callers get ECONNABORTED.

        `has_ended`: has the kernel closed the connection? Then another mount may have its device number. It is asked
        when the control file is open. If the connection ends after that, a write to this file has no effect.
        """
        number = self.device.partition(":")[2]
        with suppress(OSError), open(f"/sys/fs/fuse/connections/{number}/abort", "wb", buffering=0) as control:
            if not has_ended():
                control.write(b"1")

    def unmount(self, claim: Claim | None) -> None:
        """Unmount it if it is still on top, dead or alive. `claim`: on the mountpoint, if this process has it."""
        if not self.is_on_top():
            return
        try:
            with _claimed(self.directory.parent, self.mountpoint, claim):
                if self._runtime is None or self._runtime.is_at(self.directory):
                    self._unmount_if_same()
        except Taken as other:
            log.warning("not unmounting %s: process %s is mounting there", self.mountpoint, other.pid)
        except (OSError, CacheFsError) as error:
            log.warning("cannot unmount %s: %s", self.mountpoint, getattr(error, "strerror", None) or error)

    def _unmount_if_same(self) -> None:
        """Unmount exactly the mount that is compared, whatever happens to the mountpoint meanwhile."""
        with closing(os.open(self.mountpoint, os.O_PATH | os.O_CLOEXEC)) as fd:  # does not access the mount
            number = mount_table.number_of(fd)
            if not any(m.number == number and m.device == self.device for m in mount_table.mounts()):
                return
            if is_root():
                # Aborts the connection: waiting callers get ECONNABORTED. Returns an error, because `fd` is open.
                with suppress(OSError):
                    syscalls.umount2(f"/proc/self/fd/{fd}", syscalls.MNT_FORCE)
                syscalls.umount2(f"/proc/self/fd/{fd}", syscalls.MNT_DETACH)
                return
            self.abort(lambda: False)  # `fd` keeps the connection
        mounts.unmount(self.mountpoint, lazy=True)

    def close(self) -> None:
        """Unlock its runtime directory, so that another process can remove it."""
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None

    def remove(self) -> None:
        """Remove its runtime directory, and those of earlier mounts there whose daemons could not."""
        if self._runtime is None:
            return
        self._runtime.remove()
        self._runtime = None
        # If another process has the claim, the next mount does it.
        with suppress(Taken, OSError, CacheFsError), _claimed(locations.runtime_root(), self.mountpoint, patience_s=0):
            remove_remains(self.mountpoint)


def detach_dead(mountpoint: str, is_dead: Callable[[MountInstance], bool], claim: Claim | None = None) -> bool:
    """Detach and abort dead mounts, so that the kernel answers the jobs that wait for them. Were there any?

    `claim`: on the mountpoint, if this process has it.
    """
    found = False
    # If another process has the claim, it detaches the dead mount.
    with suppress(Taken, OSError), _claimed(locations.runtime_root(), mountpoint, claim) as ours:
        while (there := MountInstance.on_top(mountpoint)) is not None and is_dead(there):
            there.unmount(ours)
            if there.is_on_top():
                break
            found = True
    return found


def remove_unfinished(mountpoint: str) -> None:
    """Remove a mount whose daemon was killed before it was ready. Nothing was mounted there before it."""

    def is_dead(there: MountInstance) -> bool:
        return not there.directory.exists() or there.has_lost_daemon()

    with suppress(CacheFsError, FileNotFoundError):  # the daemon has not come so far
        detach_dead(mountpoint, is_dead)
        remove_remains(mountpoint)


def _is_listened_to(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, suppress(OSError):
        connection.setblocking(False)
        with socket_address(path) as address:
            return connection.connect_ex(address) not in (errno.ECONNREFUSED, errno.ENOENT)
    return False


def remove_remains(mountpoint: str, *, just_mounted: str | None = None) -> None:
    """Remove the runtime directories of mounts on this mountpoint that are gone, if their daemons are gone as well.

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
def _claimed(
    root: Path, mountpoint: str, claim: Claim | None = None, patience_s: float = _END_PATIENCE_S
) -> Iterator[Claim]:
    """Claim the mountpoint, unless `claim` is given. `root`: where claims lie, checked at mount time. Raises Taken."""
    if claim is not None:
        yield claim
        return
    taken = Claim.take(root, f"mount-{locations.path_id(mountpoint)}", patience_s=patience_s)
    try:
        yield taken
    finally:
        taken.release()
