"""The server of a mount's control socket. docs/CONTROL.md has the protocol, cachefs/client/client.py the client."""

import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import trio

import cachefs
from cachefs.client.client import PROTOCOL, peer
from cachefs.errors import CacheFsError, IndexUnavailable, met_damage
from cachefs.system import private_files

log = logging.getLogger(__name__)

Request = dict[str, Any]
Answer = dict[str, Any]
Tell = Callable[[Answer], Awaitable[None]]
"""Sends progress to the client. Raises trio.BrokenResourceError if the client is gone."""
Command = Callable[[Request, Tell], Awaitable[Answer]]
Commands = Mapping[str, Command]
Afterwards = Mapping[str, Callable[[Answer, int], None]]
"""Called with the answer that was sent, and the descriptor of its connection."""
MAX_LINE = 16 << 20
IDLE_TIMEOUT_S = 60.0
SEND_TIMEOUT_S = 60.0


class BadRequest(Exception):
    """An invalid request; the message has the reason."""


def argument(request: Request, name: str, kind: type) -> Any:
    """An argument of a request. Raises BadRequest if it is missing or has another type."""
    value = request.get(name)
    if not isinstance(value, kind):
        raise BadRequest(f"{request['command']}: {name!r} must be a {kind.__name__}")
    return value


def paths(request: Request) -> list[bytes]:
    """The argument `paths`, relative to the mountpoint. Raises BadRequest."""
    return [_path(path) for path in argument(request, "paths", list)]


def path(request: Request) -> bytes:
    return _path(argument(request, "path", str))


def _path(value: object) -> bytes:
    if not isinstance(value, str) or "\0" in value:
        raise BadRequest("a path must be a string without NUL")
    try:
        found = os.fsencode(value).strip(b"/")
    except UnicodeEncodeError:
        raise BadRequest("a path must not contain a lone surrogate") from None
    if any(part in (b"", b".", b"..") for part in found.split(b"/")) and found:
        raise BadRequest(f"not a plain path: {value}")
    return found


async def serve(
    place: Path,
    commands: Commands,
    afterwards: Afterwards,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer requests until cancelled. `afterwards`: called when the answer to a command has been sent."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    private_files.bind_socket(bound, place)
    listener = trio.socket.from_stdlib_socket(bound)
    listener.listen(16)
    async with trio.open_nursery() as nursery:
        task_status.started()
        while True:
            try:
                connection, _ = await listener.accept()
            except OSError as error:  # no descriptors left, for example: the mount continues
                log.warning("cannot accept a connection: %s", error)
                await trio.sleep(0.1)
                continue
            nursery.start_soon(_converse, trio.SocketStream(connection), commands, afterwards)


async def _converse(stream: trio.SocketStream, commands: Commands, afterwards: Afterwards) -> None:
    """Answer the requests of one client in turn, until it closes the connection or is idle for too long."""
    async with stream:
        # Root, or the user who mounted. The mode of the directory excludes others, but may have been changed.
        if peer(stream.socket)[1] not in (0, os.geteuid()):
            return
        waiting = bytearray()
        try:
            while (line := await _next_line(stream, waiting)) is not None:
                command, answer = await _execute(line, commands, lambda said: _send(stream, {"progress": said}))
                await _send(stream, answer)
                if answer["ok"] and command in afterwards:
                    afterwards[command](answer, stream.socket.fileno())
        except (trio.BrokenResourceError, trio.TooSlowError):
            pass  # the client is gone
        except Exception:  # the mount continues
            log.exception("bug in the control socket")


async def _next_line(stream: trio.SocketStream, waiting: bytearray) -> bytes | None:
    searched = 0
    with trio.fail_after(IDLE_TIMEOUT_S):
        while (end := waiting.find(b"\n", searched)) < 0:
            searched = len(waiting)
            data = await stream.receive_some(1 << 16)
            if not data or len(waiting) > MAX_LINE:
                return None
            waiting += data
    line = bytes(waiting[:end])
    del waiting[: end + 1]
    return line


async def _send(stream: trio.SocketStream, answer: Answer) -> None:
    with trio.fail_after(SEND_TIMEOUT_S):
        await stream.send_all(json.dumps(answer).encode() + b"\n")


async def _execute(line: bytes, commands: Commands, tell: Tell) -> tuple[str, Answer]:
    """The name of the command, and the answer."""
    try:
        request = json.loads(line)
        name = request["command"]
        version = request.get("protocol", PROTOCOL)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "", _failed("invalid request")
    if not isinstance(name, str) or not isinstance(version, int):
        return "", _failed("invalid request: 'command' must be a string, 'protocol' a number")
    if version != PROTOCOL or name not in commands:
        what = f"{name!r}" if version == PROTOCOL else f"protocol {version}"
        return "", _failed(f"the daemon, cachefs {cachefs.__version__}, does not know {what}: run cachefs restart")
    try:
        return name, {"ok": True, **await _answer(commands[name], request, tell)}
    except OSError as error:
        named = {"path": error.filename} if isinstance(error.filename, str) else {}
        return name, _failed(error.strerror or str(error)) | named
    except (BadRequest, CacheFsError, IndexUnavailable) as error:
        return name, _failed(str(error))
    except (trio.BrokenResourceError, trio.TooSlowError):
        raise
    except Exception:
        log.exception("bug in the command %s", name)
        return name, _failed("internal error; the daemon's log has the details")


async def _answer(command: Command, request: Request, tell: Tell) -> Answer:
    """A command that meets damage of the index is run again: what cannot be read counts as unknown from then on."""
    try:
        return await command(request, tell)
    except Exception as error:
        if not met_damage(error):
            raise
    return await command(request, tell)


def _failed(reason: str) -> Answer:
    return {"ok": False, "error": reason}
