"""Talk to the daemon of a mount. The command line uses nothing else; a training script may use it too.

    from cachefs.client import Client

    client = Client("/data/imagenet")
    client.warm_up(["/data/imagenet/train"])
    client.will_read(paths_of_this_epoch)     # in the order in which they will be read
    print(client.status()["hits"])

Needs no more than the standard library. Only root and the user who mounted may ask. Paths are those that the job opens,
relative ones count from the working directory, symlinks are not followed. Whatever cannot be had raises CacheFsError,
whose message is one line. docs/CONTROL.md has the protocol.
"""

import json
import os
import pathlib
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any, BinaryIO

from cachefs.client import mount_table
from cachefs.client.hand_over import Handed, receive
from cachefs.client.locations import mount_directory
from cachefs.errors import CacheFsError
from cachefs.system.claims import is_dying
from cachefs.system.unix_socket import socket_address

PROTOCOL = 1
ALIVE = b"security.cachefs.alive"
"""The extended attribute of a mount by which a command sees that its daemon answers (daemon/kernel/probe.py)."""
TIMEOUT_S = 120.0
"""Without a word from the daemon."""
BATCH_BYTES = 2 << 20
"""About so many bytes of paths go into one request."""
HINTS_A_REQUEST = 4096

Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a warm-up is."""

    files: int = 0
    """Found so far."""
    bytes: int = 0
    cached_files: int = 0
    """Of those: in the cache, or just fetched."""
    cached_bytes: int = 0
    scanned: bool = False
    """Everything has been found: `files` will not grow."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a warm-up, or a check, came to."""

    files: int = 0
    bytes: int = 0
    cached_files: int = 0
    cached_bytes: int = 0
    fetched_files: int = 0
    """Of the cached ones: those that were not cached before."""
    fetched_bytes: int = 0
    mutable_files: int = 0
    """Left out: they were written here, or --mutable has them."""
    errors: int = 0
    """Directories and names that could not be looked at."""
    problems: tuple[str, ...] = ()
    """What is missing and why, a line each; the first few."""

    @property
    def is_complete(self) -> bool:
        return self.files == self.cached_files and not self.errors

    def __add__(self, other: "Report") -> "Report":
        return Report(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Dropped:
    """What left the cache."""

    files: int = 0
    bytes: int = 0


class Client:
    """The daemon of one mount. Each method is a conversation of its own: nothing stays open in between."""

    def __init__(
        self, mountpoint: Path, *, timeout_s: float = TIMEOUT_S, directory: pathlib.Path | None = None
    ) -> None:
        """Nothing is asked yet: a client may be made before the mount is.

        `directory`: the runtime directory of the mount that is meant; None: the one that is on top when it is asked.
        """
        self.mountpoint = mount_table.absolute(os.fspath(mountpoint))
        self._timeout_s = timeout_s
        self._directory = directory

    def status(self) -> dict[str, Any]:
        """Counters and sizes; docs/CONTROL.md lists them."""
        return self._ask("status")

    def settings(self) -> dict[str, dict[str, Any]]:
        """By the names of the options: {"value": …, "origin": …}."""
        return dict(self._ask("config")["settings"])

    def warm_up(
        self,
        paths: Iterable[Path],
        *,
        jobs: int | None = None,
        metadata_only: bool = False,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> Report:
        """Have files, and all that is beneath directories, cached and pinned; returns when they are.

        `jobs`: how many files are fetched at once. An exception in `on_progress`, KeyboardInterrupt for example,
        ends the warm-up; what it has fetched stays.
        """
        return self._warm_up("warmup", paths, on_progress, jobs=jobs, metadata_only=metadata_only)

    def start_warm_up(self, paths: Iterable[Path], *, jobs: int | None = None, metadata_only: bool = False) -> None:
        """The same in the background of the daemon; `status` says how far it is."""
        for part in self._batches(paths):
            self._ask("warmup", paths=part, jobs=jobs, metadata_only=metadata_only, background=True)

    def check(
        self,
        paths: Iterable[Path],
        *,
        metadata_only: bool = False,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> Report:
        """How much of this is cached. Nothing is fetched, but names are that are not known."""
        return self._warm_up("check", paths, on_progress, metadata_only=metadata_only)

    def will_read(self, paths: Iterable[Path]) -> int:
        """Files that will be read, in this order: they are fetched ahead of the reader, as long as there is room.

        Returns at once; how many were noted. Call it again with an empty list to have what was noted forgotten.
        """
        noted = 0
        with self._connected() as connection:
            batch: list[str] = []
            first = True
            for path in self._inside(paths):
                batch.append(path)
                if len(batch) == HINTS_A_REQUEST:
                    noted += connection.ask("will_read", paths=batch, anew=first)["noted"]
                    batch, first = [], False
            noted += connection.ask("will_read", paths=batch, anew=first)["noted"]
        return int(noted)

    def invalidate(self, paths: Iterable[Path]) -> int:
        """Forget what is known and cached, in the kernel too; the next use asks the source. How many inodes."""
        return sum(int(self._ask("invalidate", path=path)["dropped"]) for path in self._inside(paths))

    def evict(self, paths: Iterable[Path]) -> Dropped:
        """Give back the room that data take on the local disk; they stay pinned, and are fetched again when read."""
        answers = [self._ask("evict", paths=part) for part in self._batches(paths)]
        return Dropped(sum(a["files"] for a in answers), sum(a["bytes"] for a in answers))

    def pin(self, paths: Iterable[Path], *, on_progress: Callable[[Progress], None] = lambda progress: None) -> Report:
        """Make files immutable as if they had been read, those too that were written here. Data are not fetched."""
        return self._warm_up("pin", paths, on_progress)

    def unpin(self, paths: Iterable[Path]) -> int:
        """Let files be written to again, and not be cached, until they are pinned or the daemon restarts. How many."""
        return sum(int(self._ask("unpin", paths=part)["files"]) for part in self._batches(paths))

    def info(self, path: Path) -> dict[str, Any]:
        """What is known of one file or directory; docs/CONTROL.md says what."""
        (inside,) = self._inside([path])
        return self._ask("info", path=inside)

    def drop(self, records: Iterable[tuple[int, int, int]]) -> None:
        """Take corrupt records out of the index: (inode, offset in the file, offset in the blob)."""
        self._ask("drop", records=list(records))
        self.flush()

    def flush(self) -> None:
        """Returns when everything that is pinned and cached by now is in the index."""
        self._ask("flush")

    def leave(self) -> Handed:
        """Have the daemon end and leave the mount to the next one: this process, which gets its open source files."""
        with self._connected() as connection:
            return connection.ask_for_descriptors("leave", descriptors=True)

    # --- the conversation ------------------------------------------------------------------------------------------

    def _warm_up(
        self, command: str, paths: Iterable[Path], on_progress: Callable[[Progress], None], **arguments: Any
    ) -> Report:
        total = Report()
        for part in self._batches(paths):
            before = total

            def report(said: dict[str, Any], before: Report = before) -> None:
                now = Progress(**said)
                on_progress(
                    Progress(
                        before.files + now.files,
                        before.bytes + now.bytes,
                        before.cached_files + now.cached_files,
                        before.cached_bytes + now.cached_bytes,
                        now.scanned,
                    )
                )

            with self._connected() as connection:
                answer = connection.ask(command, report, paths=part, **arguments)
            total += Report(**{**answer, "problems": tuple(answer["problems"])})
        return total

    def _inside(self, paths: Iterable[Path]) -> Iterator[str]:
        """Relative to the mountpoint."""
        for path in paths:
            plain = os.path.abspath(path)
            inside = mount_table.beneath(self.mountpoint, plain)
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
                if is_dying(_peer(connection)):
                    raise ConnectionRefusedError
            except FileNotFoundError:
                if mount_table.is_mounted(self.mountpoint):
                    raise CacheFsError(
                        f"{self.mountpoint} was mounted by another user: only they and root may ask its daemon"
                    ) from None
                raise CacheFsError(f"nothing is mounted on {self.mountpoint} by cachefs") from None
            except ConnectionRefusedError:
                raise CacheFsError(
                    f"the daemon of {self.mountpoint} has died: mount it again, or umount -l {self.mountpoint}"
                ) from None
            except OSError as error:
                raise CacheFsError(f"the daemon of {self.mountpoint} does not answer: {error}") from None
            with connection.makefile("rb") as lines:
                yield _Connection(self.mountpoint, connection, lines)


class _Connection:
    def __init__(self, mountpoint: str, connection: socket.socket, lines: BinaryIO) -> None:
        self._mountpoint = mountpoint
        self._connection = connection
        self._lines = lines

    def ask(
        self, command: str, on_progress: Callable[[dict[str, Any]], None] = lambda progress: None, **arguments: Any
    ) -> dict[str, Any]:
        request = {"protocol": PROTOCOL, "command": command, **arguments}
        with self._failing():
            self._connection.sendall(json.dumps(request).encode() + b"\n")
            while "progress" in (answer := json.loads(self._lines.readline())):
                on_progress(answer["progress"])
        return _checked(answer)

    def ask_for_descriptors(self, command: str, **arguments: Any) -> Handed:
        """The last request of a connection: what comes behind its answer."""
        request = {"protocol": PROTOCOL, "command": command, **arguments}
        answer: dict[str, Any] = {}
        with self._failing():
            self._connection.sendall(json.dumps(request).encode() + b"\n")
            opened = receive(self._connection, answer)
        _checked(answer)
        return opened

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            reason = str(error) if isinstance(error, OSError) else "it has ended"
            raise CacheFsError(f"the daemon of {self._mountpoint} does not answer: {reason}") from None


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Raises CacheFsError where it says that the request failed."""
    if not answer.pop("ok", False):
        raise CacheFsError(str(answer.get("error", "unknown error")))
    return dict(answer)


def is_served(mountpoint: str) -> bool:
    """Is there a daemon that takes commands for this mount?"""
    return _takes_commands(server(mountpoint))


def is_served_by(directory: pathlib.Path) -> bool:
    """The same of the mount that has this runtime directory, whatever is on top of its mountpoint."""
    return _takes_commands(_server_of(directory))


def _takes_commands(pid: int | None) -> bool:
    return pid is not None and not is_dying(pid)


def server(mountpoint: str) -> int | None:
    """The process that has this mount's control socket.

    One that was killed still has it, and takes connections, as long as one of its threads waits in the kernel for a
    source that hangs (`is_dying`).
    """
    try:
        return _server_of(mount_directory(mountpoint))
    except OSError:
        return None


def _server_of(directory: pathlib.Path) -> int | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, suppress(OSError):
        with socket_address(directory / "control") as address:
            connection.connect(address)
        return _peer(connection)
    return None


def _peer(connection: socket.socket) -> int:
    """The pid of the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], sys.byteorder)
