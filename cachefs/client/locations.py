"""Default locations of caches, runtime directories and sockets."""

import contextlib
import hashlib
import os
import re
from pathlib import Path

from cachefs.client import mount_table
from cachefs.errors import CacheFsError
from cachefs.system import private_files


def path_id(path: str) -> str:
    """A readable and unique name for a path: its last component, and a digest of the whole path."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(path.rstrip("/"))).strip("-.") or "root"
    return f"{name[:24]}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}"


def user() -> int:
    return os.geteuid()


def is_root() -> bool:
    return user() == 0


def cache_root() -> Path:
    """The default directory of caches."""
    if is_root():
        return Path("/var/cache/cachefs")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "cachefs"


def default_cache_dir(source: str) -> Path:
    return cache_root() / path_id(source)


def _place_of_runtime_root() -> Path:
    if is_root():
        return Path("/run/cachefs")
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "cachefs" if base else Path(f"/tmp/cachefs-{os.geteuid()}")


def runtime_root() -> Path:
    """The directory of sockets and sessions: /run/cachefs, or the user's own runtime directory.

    It belongs to the user and is closed to others, and so is its content: only then may the content be trusted, and
    written to. Raises CacheFsError if that is not so, and FileNotFoundError if there is no such directory, which
    another user might make at any moment.
    """
    root = _place_of_runtime_root()
    try:
        private_files.check_directory(root)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CacheFsError(f"cannot use the runtime directory {root}: {error.strerror or error}") from error
    return root


def make_runtime_root() -> Path:
    with contextlib.suppress(FileNotFoundError):
        return runtime_root()
    root = _place_of_runtime_root()
    try:
        private_files.make_directory(root)
    except OSError as error:
        raise CacheFsError(f"cannot make the runtime directory {root}: {error.strerror or error}") from error
    return runtime_root()


def instance_directory(mountpoint: str, device: str) -> Path:
    """The runtime directory of one mount. It has `control` (the socket), `source` (a bind mount of the source),
    `mount.json` (the configuration) and `fastpath` (the socket for the next daemon).

    `device`: of the mount, major:minor. Other mounts on the same mountpoint have other numbers. Raises as
    `runtime_root`, and so do the functions below.
    """
    return runtime_root() / f"{instance_prefix(mountpoint)}{device.rpartition(':')[2]}"


def instance_prefix(mountpoint: str) -> str:
    """The prefix of the names of the runtime directories of all mounts on this mountpoint."""
    return f"mount-{path_id(mountpoint)}-"


def mount_directory(mountpoint: str) -> Path:
    """The runtime directory of the cachefs mount on top there. Without one, a path that does not exist (device 0)."""
    top = mount_table.top_mount(mountpoint)
    return instance_directory(mountpoint, top.device if top is not None and top.fstype == mount_table.FSTYPE else "0")


def directory_of_user(mount: mount_table.Mount) -> Path | None:
    """The runtime directory of a mount of another user, for root. None: it is not where it usually is.

    Its content is not trusted: the user may have put anything there.
    """
    name = f"{instance_prefix(mount.mountpoint)}{mount.device.rpartition(':')[2]}"
    roots = (Path(f"/run/user/{mount.user}/cachefs"), Path(f"/tmp/cachefs-{mount.user}"))
    return next((root / name for root in roots if (root / name).is_dir()), None)


def session_directory(cache_dir: Path) -> Path:
    """The directory of the session index of a cache directory, on any mountpoint."""
    return runtime_root() / f"session-{path_id(str(cache_dir.resolve()))}"
