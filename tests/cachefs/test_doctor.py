"""What `cachefs doctor` finds out about a source without a cluster: tests/ceph has a real one."""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daemon.cli import doctor

CLIENT = 4114


@pytest.fixture
def admin_socket(tmp_path: Path) -> Iterator[Callable[[str, bytes], str]]:
    """`admin_socket(name, answer)`: one that gives this answer once; its line in /proc/net/unix."""
    threads: list[threading.Thread] = []

    def make(name: str, answer: bytes) -> str:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / name))
        listener.listen()

        def serve() -> None:
            with listener, listener.accept()[0] as asked:
                asked.recv(100)
                asked.sendall(answer)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return f"ffff8881: 00000002 00000000 00010000 0001 01 17280 {tmp_path / name}"

    yield make
    for thread in threads:
        thread.join(10)


def framed(said: object) -> bytes:
    text = json.dumps(said).encode()
    return len(text).to_bytes(4, "big") + text


def test_the_caps_of_a_ceph_fuse_are_those_of_its_own_admin_socket(
    tmp_path: Path, admin_socket: Callable[[str, bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"client%d" % CLIENT)
    lines = [
        "Num       RefCount Protocol Flags    Type St Inode Path",
        f"ffff8880: 00000002 00000000 00010000 0001 01 17279 {tmp_path}/gone.asok",
        admin_socket("a.asok", framed({"error": "unknown command"})),
        admin_socket("b.asok", framed({"id": CLIENT + 1, "sessions": [{"num_caps": 1}]})),
        admin_socket("c.asok", b"\0\0"),
        admin_socket("d.asok", framed({"id": CLIENT, "sessions": [{"num_caps": 7}, {"num_caps": 5}]})),
    ]
    sockets = tmp_path / "unix"
    sockets.write_text("\n".join(lines))
    assert list(doctor.fuse_caps(str(tmp_path), sockets)) == [12]


def test_a_place_that_names_no_client_has_no_caps(tmp_path: Path) -> None:
    assert list(doctor.fuse_caps(str(tmp_path), tmp_path / "nothing")) == []
