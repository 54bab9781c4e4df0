"""A client of a mount's daemon, for the command line and for training scripts.

    from cachefs.client import Client

    client = Client("/data/imagenet")
    client.warm_up(["/data/imagenet/train"])
    client.will_read(paths_of_this_epoch)     # in the order in which they will be read
    print(client.status()["hits"])

Needs only the standard library. Only the user who mounted may connect; root may ask for the status. Paths are those
that the job opens; relative paths start at the working directory; symlinks are not followed. All failures raise
CacheFsError, with a message of one line: also that nothing is mounted there. docs/CONTROL.md has the protocol.
"""

import json
import os
import pathlib
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, BinaryIO

from cachefs.client import mount_table
from cachefs.client.hand_over import Handed, read_line
from cachefs.client.locations import mount_directory, user
from cachefs.errors import CacheFsError
from cachefs.system.claims import is_dying
from cachefs.system.unix_socket import socket_address

PROTOCOL = 1
_PEER = struct.Struct("i2I")  # pid, uid, gid
ALIVE = b"security.cachefs.alive"
"""The extended attribute of a mount that shows whether its daemon answers (daemon/kernel/probe.py)."""
TIMEOUT_S = 120.0
"""How long to wait for the next line of the daemon."""
BATCH_BYTES = 2 << 20
"""Of paths in one request, about."""
HINTS_A_REQUEST = 4096
"""Paths: the daemon parses a request between two answers to the kernel."""
MAX_LINE = 16 << 20
"""Bytes of an answer (docs/CONTROL.md)."""
Path = str | os.PathLike[str]


class DaemonDied(CacheFsError):
    """A mount has no daemon. Its message says what to do."""

    def __init__(self, mountpoint: str) -> None:
        super().__init__(
            f"the daemon of {mountpoint} has died: run cachefs restart {mountpoint}, or cachefs umount {mountpoint}"
        )


class DaemonOfOtherVersion(CacheFsError):
    """The answer of a daemon is not one of this version."""

    def __init__(self, mountpoint: str) -> None:
        super().__init__(f"the daemon of {mountpoint} runs another version: run cachefs restart {mountpoint}")


class OtherUser(CacheFsError):
    """A mount whose runtime directory is not this user's. The message says how to reach its daemon."""

    def __init__(self, mount: mount_table.Mount) -> None:
        if mount.user != user():
            reason = f"was mounted by another user: run the command as user {mount.user}"
        else:
            reason = "was mounted by a process with another XDG_RUNTIME_DIR: set it as it was there"
        super().__init__(f"{mount.mountpoint} {reason}")


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a warm-up."""

    files: int = 0
    """Found so far."""
    bytes: int = 0
    cached_files: int = 0
    """Of those found."""
    cached_bytes: int = 0
    scanned: bool = False
    """All files have been found: `files` will not grow."""


OnProgress = Callable[[Progress], None]


def _ignore(_: Progress) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a warm-up or a check."""

    files: int = 0
    bytes: int = 0
    cached_files: int = 0
    cached_bytes: int = 0
    fetched_files: int = 0
    """Of the cached files: those that were not cached before."""
    fetched_bytes: int = 0
    mutable_files: int = 0
    """Skipped: written through this mount, or matched by --mutable."""
    errors: int = 0
    """Directories and names that could not be read."""
    problems: tuple[str, ...] = ()
    """The first few missing files, with the reason, a line each."""

    @property
    def is_complete(self) -> bool:
        return self.files == self.cached_files and not self.errors

    def __add__(self, other: "Report") -> "Report":
        return Report(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Dropped:
    """What was evicted from the cache."""

    files: int = 0
    bytes: int = 0


class Client:
    """The daemon of one mount. Each method opens and closes a connection of its own."""

    def __init__(
        self,
        mountpoint: Path,
        *,
        timeout_s: float = TIMEOUT_S,
        directory: pathlib.Path | None = None,
        owner: int | None = None,
    ) -> None:
        """Does not connect yet: a client may be made before the mount.

        `directory`: the runtime directory of the mount; None: that of the mount on top at the time of each request.
        `owner`: the uid that its daemon must have. None: only this user can write to the runtime directory.
        """
        self.mountpoint = mount_table.absolute(os.fspath(mountpoint))
        self._timeout_s = timeout_s
        self._directory = directory
        self._owner = owner

    def status(self) -> dict[str, Any]:
        """Counters and sizes, as listed in docs/CONTROL.md."""
        return self._ask("status")

    def cache_dir(self) -> pathlib.Path:
        """Where the daemon stores its cache."""
        try:
            return pathlib.Path(self.status()["cache_dir"])
        except (KeyError, TypeError):
            raise DaemonOfOtherVersion(self.mountpoint) from None

    def settings(self) -> dict[str, dict[str, Any]]:
        """By option name: {"value": …, "origin": …}."""
        return dict(self._ask("config")["settings"])

    def warm_up(
        self,
        paths: Iterable[Path],
        *,
        jobs: int | None = None,
        metadata_only: bool = False,
        on_progress: OnProgress = _ignore,
    ) -> Report:
        """Cache and pin files, and all files beneath directories. Returns when that is done.

        `jobs`: how many files are fetched at once. An exception in `on_progress`, for example KeyboardInterrupt,
        ends the warm-up; what was fetched stays cached.
        """
        return self._warm_up("warmup", paths, on_progress, jobs=jobs, metadata_only=metadata_only)

    def start_warm_up(
        self, paths: Iterable[Path], *, jobs: int | None = None, metadata_only: bool = False
    ) -> list[int]:
        """Start a warm-up in the daemon, and return at once; `status` has its progress.

        Returns its number for `wait_for_warm_up` and `cancel_warm_up`; several for more paths than fit one request.
        """
        arguments = {"jobs": jobs, "metadata_only": metadata_only, "background": True}
        answers = [self._ask("warmup", paths=part, **arguments) for part in self._batches(paths)]
        return [int(answer["id"]) for answer in answers if "id" in answer]  # older daemons give no number

    def wait_for_warm_up(self, number: int, *, on_progress: OnProgress = _ignore) -> Report:
        """Wait for the end of a warm-up in the background. One that has ended is known for a while."""
        with self._connected() as connection:
            answer = connection.ask("wait", lambda said: on_progress(Progress(**said)), id=number)
        return Report(**{**answer, "problems": tuple(answer["problems"])})

    def cancel_warm_up(self, number: int) -> None:
        """End a warm-up in the background. What it has fetched stays cached."""
        self._ask("cancel", id=number)

    def check(self, paths: Iterable[Path], *, metadata_only: bool = False, on_progress: OnProgress = _ignore) -> Report:
        """Find out how much of these is cached. Fetches no data, but names that are not known."""
        return self._warm_up("check", paths, on_progress, metadata_only=metadata_only)

    def will_read(self, paths: Iterable[Path], *, replace: bool = True) -> int:
        """Announce files that will be read, in this order: they are fetched ahead of the reader, while there is room.

        Returns at once, with the number of files. `replace`: forget the files of earlier calls, of other processes too;
        an empty list cancels them. Otherwise these follow them. Only for the user who mounted, and root: the daemon
        takes requests from nobody else, and other users get CacheFsError.
        """
        inside = self._inside(paths)
        batch = list(islice(inside, HINTS_A_REQUEST))
        with self._connected() as connection:
            noted = connection.ask("will_read", paths=batch, anew=replace)["noted"]
            while batch := list(islice(inside, HINTS_A_REQUEST)):
                noted += connection.ask("will_read", paths=batch, anew=False)["noted"]
        return int(noted)

    def invalidate(self, paths: Iterable[Path]) -> int:
        """Drop metadata and data, in the kernel too; the next use asks the source. Returns the number of inodes."""
        return sum(int(self._ask("invalidate", path=path)["dropped"]) for path in self._inside(paths))

    def evict(self, paths: Iterable[Path]) -> Dropped:
        """Free the disk space of cached data. The files stay pinned, and are fetched again when read."""
        answers = [self._ask("evict", paths=part) for part in self._batches(paths)]
        return Dropped(sum(a["files"] for a in answers), sum(a["bytes"] for a in answers))

    def pin(self, paths: Iterable[Path], *, on_progress: OnProgress = _ignore) -> Report:
        """Make files immutable as if they had been read, also files written through this mount. Fetches no data."""
        return self._warm_up("pin", paths, on_progress)

    def unpin(self, paths: Iterable[Path]) -> int:
        """Make files writable, and uncached, until they are pinned, also after a remount. Returns their number."""
        return sum(int(self._ask("unpin", paths=part)["files"]) for part in self._batches(paths))

    def info(self, path: Path) -> dict[str, Any]:
        """The cache state of one file or directory, as listed in docs/CONTROL.md."""
        (inside,) = self._inside([path])
        return self._ask("info", path=inside)

    def drop(self, records: Iterable[tuple[int, int, int]]) -> None:
        """Remove corrupt records from the index: (inode, offset in the file, offset in the blob)."""
        self._ask("drop", records=list(records))
        self.flush()

    def flush(self) -> None:
        """Return when everything that is pinned and cached by now is in the index."""
        self._ask("flush")

    def leave(self) -> Handed:
        """Make the daemon end and leave the mount to this process, which may receive its open source files."""
        with self._connected() as connection:
            return connection.ask_for_descriptors("leave", descriptors=True)

    # --- the conversation ------------------------------------------------------------------------------------------

    def _warm_up(self, command: str, paths: Iterable[Path], on_progress: OnProgress, **arguments: Any) -> Report:
        total = Report()
        for part in self._batches(paths):

            def report(said: dict[str, Any], before: Report = total) -> None:
                sums = {name: value + getattr(before, name) for name, value in said.items() if name != "scanned"}
                on_progress(Progress(**sums, scanned=said["scanned"]))

            with self._connected() as connection:
                answer = connection.ask(command, report, paths=part, **arguments)
            total += Report(**{**answer, "problems": tuple(answer["problems"])})
        return total

    def _inside(self, paths: Iterable[Path]) -> Iterator[str]:
        """Relative to the mountpoint."""
        for path in paths:
            inside = mount_table.beneath(self.mountpoint, os.path.abspath(path))
            if inside is None:
                raise CacheFsError(f"{os.fspath(path)} is not on {self.mountpoint}")
            yield inside

    def _batches(self, paths: Iterable[Path]) -> Iterator[list[str]]:
        batch: list[str] = []
        size = 0
        for path in self._inside(paths):
            batch.append(path)
            size += len(path)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        with self._connected() as connection:
            return connection.ask(command, **arguments)

    @contextmanager
    def _connected(self) -> Iterator["_Connection"]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(self._timeout_s)
            try:
                with socket_address((self._directory or mount_directory(self.mountpoint)) / "control") as address:
                    connection.connect(address)
                pid, uid = peer(connection)
                if is_dying(pid):
                    raise ConnectionRefusedError
                if self._owner not in (None, uid):
                    raise PermissionError(f"it belongs to user {uid}, and the mount to user {self._owner}")
            except FileNotFoundError:
                top = mount_table.top_mount(self.mountpoint)
                if top is not None and top.fstype == mount_table.FSTYPE:
                    raise OtherUser(top) from None
                raise CacheFsError(f"no cachefs is mounted on {self.mountpoint}") from None
            except ConnectionRefusedError:
                raise DaemonDied(self.mountpoint) from None
            except OSError as error:
                raise CacheFsError(f"the daemon of {self.mountpoint} does not answer: {error}") from None
            with connection.makefile("rb") as lines:
                yield _Connection(self.mountpoint, connection, lines)


@dataclass(frozen=True, slots=True)
class _Connection:
    mountpoint: str
    connection: socket.socket
    lines: BinaryIO

    def ask(
        self, command: str, on_progress: Callable[[dict[str, Any]], None] = lambda progress: None, **arguments: Any
    ) -> dict[str, Any]:
        with self._failing():
            self._send(command, arguments)
            while "progress" in (answer := _parsed(self.lines.readline(MAX_LINE))):
                on_progress(answer["progress"])
        return self._checked(answer)

    def ask_for_descriptors(self, command: str, **arguments: Any) -> Handed:
        """Returns the descriptors that follow the answer. The last request of a connection."""
        with self._failing():
            self._send(command, arguments)
            answer = _parsed(read_line(self.connection, MAX_LINE))
        sends = bool(self._checked(answer).get("descriptors"))  # an older daemon sends none
        return Handed(self.connection.dup()) if sends else Handed()

    def _send(self, command: str, arguments: dict[str, Any]) -> None:
        request = {"protocol": PROTOCOL, "command": command, **arguments}
        self.connection.sendall(json.dumps(request).encode() + b"\n")

    def _checked(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer without its status. Raises CacheFsError if the request failed."""
        if not answer.pop("ok", False):
            where = f"{os.path.join(self.mountpoint, answer['path'])}: " if "path" in answer else ""
            raise CacheFsError(f"{where}{answer.get('error', 'unknown error')}")
        return answer

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            reason = str(error) if isinstance(error, OSError) else "it has ended"
            raise CacheFsError(f"the daemon of {self.mountpoint} does not answer: {reason}") from None


def _parsed(line: bytes) -> dict[str, Any]:
    """Raises ValueError: root may ask the daemon of another user, which may answer anything."""
    try:
        answer = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(answer, dict):
        raise ValueError("not an object")
    return answer


def is_served(mountpoint: str, directory: pathlib.Path | None = None) -> bool:
    """Is there a daemon that takes commands for this mount? Arguments as for `Client`."""
    pid = server(mountpoint, directory)
    return pid is not None and not is_dying(pid)


def server(mountpoint: str, directory: pathlib.Path | None = None) -> int | None:
    """The process that has the control socket of this mount. Arguments as for `Client`.

    A process that was killed keeps the socket, and accepts connections, while one of its threads waits in the kernel
    for a source that hangs (`is_dying`).
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, suppress(OSError):
        with socket_address((directory or mount_directory(mountpoint)) / "control") as address:
            connection.connect(address)
        return peer(connection)[0]
    return None


def peer(connection: Any) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of a socket, of the standard library or of trio."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid
