"""The control socket of a mount: one request, one answer, each a line of JSON.

    {"command": "status"}                     → {"ok": true, …}
    {"command": "invalidate", "path": "a/b"}  → {"ok": true, "dropped": 3}
    {"command": "leave"}                      → {"ok": true}, and then the daemon ends; the mount stays
    anything that fails                       → {"ok": false, "error": "one line"}

The socket lies in a directory of mode 0700: only root and the mounting user reach it.
"""

import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from cachefs.errors import CacheFsError
from cachefs.unix_socket import socket_address
from daemon.config import mount_directory

log = logging.getLogger(__name__)

Commands = Mapping[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]]
MAX_LINE = 1 << 20
CLIENT_TIMEOUT_S = 120.0


Afterwards = Mapping[str, Callable[[], None]]


async def serve(
    path: Path,
    commands: Commands,
    afterwards: Afterwards,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer requests until cancelled. `afterwards`: what to do when the answer to a command is out."""
    path.unlink(missing_ok=True)
    listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket_address(path) as address:
        await listener.bind(address)
    os.chmod(path, 0o600)
    listener.listen(16)
    async with trio.open_nursery() as nursery:
        task_status.started()
        while True:
            try:
                connection, _ = await listener.accept()
            except OSError as error:  # out of descriptors, for example: a mount does not end for that
                log.warning("cannot accept a connection: %s", error)
                await trio.sleep(0.1)
                continue
            nursery.start_soon(_answer, trio.SocketStream(connection), commands, afterwards)


async def _answer(stream: trio.SocketStream, commands: Commands, afterwards: Afterwards) -> None:
    with trio.move_on_after(CLIENT_TIMEOUT_S):
        async with stream:
            try:
                line = b""
                while not line.endswith(b"\n") and len(line) < MAX_LINE:
                    data = await stream.receive_some(65536)
                    if not data:
                        return
                    line += data
                command, answer = await _execute(line, commands)
                await stream.send_all(json.dumps(answer).encode() + b"\n")
                if answer["ok"] and command in afterwards:
                    afterwards[command]()
            except trio.BrokenResourceError:
                pass  # the client has gone


async def _execute(line: bytes, commands: Commands) -> tuple[str, dict[str, Any]]:
    """The command's name and its answer."""
    try:
        request = json.loads(line)
        name = request["command"]
        command = commands[name]
    except (ValueError, KeyError, TypeError):
        return "", {"ok": False, "error": "unknown request: the daemon and this command are of different versions"}
    try:
        return name, {"ok": True, **await command(request)}
    except OSError as error:
        return name, {"ok": False, "error": error.strerror or str(error)}
    except Exception:
        log.exception("bug in the command %s", name)
        return name, {"ok": False, "error": "internal error; the daemon's log has the details"}


def is_served(mountpoint: str) -> bool:
    """Is there a daemon that takes commands for this mount?"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            with socket_address(mount_directory(mountpoint) / "control") as address:
                connection.connect(address)
        except OSError:
            return False
        return True


def request(mountpoint: str, command: str, **arguments: Any) -> dict[str, Any]:
    """Ask the daemon of a mount. Raises CacheFsError where there is none, or with the error that it reports."""
    path = mount_directory(mountpoint) / "control"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(CLIENT_TIMEOUT_S)
            with socket_address(path) as address:
                connection.connect(address)
            connection.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                answer = json.loads(lines.readline())
    except FileNotFoundError:
        raise CacheFsError(f"nothing is mounted on {mountpoint} by cachefs") from None
    except ConnectionRefusedError:
        raise CacheFsError(f"the daemon of {mountpoint} has died: mount it again, or umount -l {mountpoint}") from None
    except (OSError, ValueError) as error:
        raise CacheFsError(f"the daemon of {mountpoint} does not answer: {error}") from None
    if not answer.pop("ok", False):
        raise CacheFsError(str(answer.get("error", "unknown error")))
    return dict(answer)
