"""The control socket: access, requests, and the answers to malformed ones."""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import cachefs as package
from cachefs.client.client import PROTOCOL, Client
from cachefs.client.locations import make_runtime_root, mount_directory
from cachefs.errors import CacheFsError
from cachefs.system.unix_socket import socket_address
from tests.conftest import Mount, cachefs, contents, wait_for

MakeMount = Callable[..., Mount]


@contextmanager
def connected(path: Path, directory: Path | None = None) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(20)
        with socket_address((directory or mount_directory(str(path))) / "control") as address:
            connection.connect(address)
        yield connection


def ask(connection: socket.socket, line: bytes) -> dict[str, Any]:
    connection.sendall(line)
    answer = b""
    while not answer.endswith(b"\n"):
        part = connection.recv(1 << 16)
        assert part, "hung up"
        answer += part
    found: dict[str, Any] = json.loads(answer)
    return found


def test_many_requests_on_one_connection(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    with connected(m.path) as connection:
        for _ in range(3):
            assert ask(connection, b'{"protocol": 1, "command": "status"}\n')["pid"] == m.pid
        connection.sendall(b'{"command": "sta')
        assert ask(connection, b'tus"}\n')["ok"]


@pytest.mark.parametrize(
    ("request_line", "error"),
    [
        (b"hello\n", "invalid request"),
        (b"[]\n", "invalid request"),
        (b"[" * 100_000 + b"\n", "invalid request"),
        (b'{"command": 7}\n', "'command' must be a string"),
        (b'["x"]\n', "invalid request"),
        (b'{"command": ["x"]}\n', "'command' must be a string"),
        (b'{"command": ' + b"[" * 500 + b"]" * 500 + b"}\n", "'command' must be a string"),
        (b'{"protocol": {"x": []}, "command": "status"}\n', "'protocol' a number"),
        (b'{"command": "\\ud800"}\n', "does not know '\\ud800'"),
        (b'{"command": "info", "path": "\\ud800"}\n', "surrogate"),
        (b'{"command": "invalidate", "path": "x/\\udfff"}\n', "surrogate"),
        (b'{"command": "warmup", "metadata_only": false, "paths": ["\\ud800"]}\n', "surrogate"),
        (b"\xff\n", "invalid request"),
        (b'{"protocol": 1, "command": "fly"}\n', f"cachefs {package.__version__}, does not know 'fly'"),
        (b'{"protocol": 2, "command": "status"}\n', "does not know protocol 2: run cachefs restart"),
        (b'{"command": "warmup", "metadata_only": false}\n', "'paths' must be a list"),
        (b'{"command": "warmup", "metadata_only": 1, "paths": []}\n', "'metadata_only' must be a bool"),
        (b'{"command": "warmup", "metadata_only": false, "jobs": 0, "paths": []}\n', "must be a number from 1"),
        (b'{"command": "warmup", "metadata_only": false, "paths": [7]}\n', "a path must be a string"),
        (b'{"command": "invalidate", "path": "../etc"}\n', "not a plain path"),
        (b'{"command": "invalidate", "path": "a\\u0000b"}\n', "a path must be a string"),
        (b'{"command": "invalidate"}\n', "'path' must be a str"),
        (b'{"command": "drop", "records": [[1, 2]]}\n', "a record must be"),
        (b'{"command": "will_read", "paths": []}\n', "'anew' must be a bool"),
        (b'{"command": "info", "path": "nobody"}\n', "No such file or directory"),
    ],
)  # fmt: skip
def test_nonsense_gets_one_clear_line(nonsense: Mount, request_line: bytes, error: str) -> None:
    with connected(nonsense.path) as connection:
        answer = ask(connection, request_line)
        assert answer["ok"] is False and error in answer["error"] and "\n" not in answer["error"]
        assert ask(connection, b'{"command": "status"}\n')["ok"]


@pytest.fixture(scope="module")
def nonsense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    base = tmp_path_factory.mktemp("control")
    (base / "source").mkdir()
    mounted = Mount(base / "source", base / "mnt", base / "cache", ())
    yield mounted
    mounted.cleanup()


def test_a_line_without_end_is_hung_up_on(nonsense: Mount) -> None:
    with connected(nonsense.path) as connection, pytest.raises((BrokenPipeError, ConnectionResetError)):
        while True:
            connection.sendall(b"x" * (1 << 20))
    assert nonsense.status()["pid"] == nonsense.pid


def test_others_are_hung_up_on(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    place = mount_directory(str(m.path))
    directory = os.open(place, os.O_PATH)  # past the runtime directory of all mounts, which stays closed
    opened = [place, place / "control"]
    before = [path.stat().st_mode for path in opened]
    for path in opened:
        path.chmod(0o777)  # as after a careless chmod
    try:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setgid(65534)
                os.setuid(65534)
                with connected(m.path, Path(f"/proc/self/fd/{directory}")) as connection:
                    connection.sendall(b'{"command": "leave"}\n')
                    status = 0 if connection.recv(100) == b"" else 2
            except ConnectionError:
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        for path, mode in zip(opened, before, strict=True):
            path.chmod(mode & 0o7777)
        os.close(directory)
    assert contents(m.path) == contents(source) and m.status()["pid"] == m.pid


def test_a_daemon_that_speaks_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of this version with a daemon of another version."""
    make_runtime_root()
    place = mount_directory(str(tmp_path))
    place.mkdir()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket_address(place / "control") as address:
        listener.bind(address)
    listener.listen()
    answers = [
        b'{"ok": false, "error": "unknown request: the daemon and this command are of different versions"}\n',
        b"what?\n",
        b"",
    ]

    def serve() -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection:
                request = json.loads(connection.makefile("rb").readline())
                assert request["protocol"] == PROTOCOL
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for expected in ("of different versions", "does not answer", "does not answer"):
            with pytest.raises(CacheFsError, match=expected) as caught:
                Client(tmp_path).status()
            assert "\n" not in str(caught.value)
    finally:
        thread.join()
        listener.close()
        (place / "control").unlink()
        place.rmdir()


def test_a_client_of_another_user_is_told(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setuid(65534)
            os.environ.pop("XDG_RUNTIME_DIR", None)
            Client(m.path).status()
        except CacheFsError as error:
            status = 0 if "was mounted by another user" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_runtime_directory_is_closed(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    place = mount_directory(str(m.path))
    assert place.stat().st_mode & 0o777 == 0o700 and (place / "control").stat().st_mode & 0o777 == 0o600
    cachefs("umount", m.path)
    m.pid = 0
    wait_for(place.exists, lambda there: not there)
