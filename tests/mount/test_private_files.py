"""The daemon's files are closed to others, and files planted by others are not used (B1, hazard 28)."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cachefs.client.locations import mount_directory
from cachefs.contract.shared import SHARED_BYTES
from cachefs.fastpath import processes
from cachefs.system.unix_socket import socket_address
from tests.conftest import Mount, cachefs, contents
from tests.users import as_user, cachefs_as, open_to_all

MakeMount = Callable[..., Mount]
OTHER = 1234
HELD_OPTIONS = ("--device", "--shared", "--source", "--blob", "--listener")


def modes(root: Path) -> dict[str, str]:
    """Modes of everything that others could use, except the source."""
    found = {}
    for directory, names, files in os.walk(root):
        if "source" in names:
            names.remove("source")
        for name in (".", *names, *files):
            path = Path(directory, name)
            mode = stat.S_IMODE(path.lstat().st_mode)
            if mode & 0o077:
                found[str(path)] = f"{mode:o}"
    return found


@pytest.mark.promise("PE-14")
def test_everything_the_daemon_creates_is_closed_to_others(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        m = mount(source, cache=tmp_path / "missing/parents/cache")
    finally:
        os.umask(before)
    (m.path / "d0/f00000").read_bytes()
    m.flush()
    assert modes(m.cache) == {}
    place = mount_directory(str(m.path))
    assert modes(place) == {}
    assert (place / "mount.json").exists()
    assert (m.cache / "blob").exists()
    for parent in (tmp_path / "missing", tmp_path / "missing/parents"):
        assert stat.S_IMODE(parent.stat().st_mode) == 0o755


@pytest.mark.promise("PE-15")
def test_a_cache_directory_that_another_user_made_is_refused(source: Path, tmp_path: Path) -> None:
    """It was renamed away in a world-writable directory, and another one was planted."""
    victim, mountpoint = tmp_path / "victim", tmp_path / "mnt"
    victim.write_bytes(b"precious")
    mountpoint.mkdir()
    everybody = tmp_path / "everybody"
    everybody.mkdir()
    everybody.chmod(0o1777)
    open_to_all(everybody / "x")

    def plant() -> None:
        (everybody / "cache").mkdir(mode=0o777)
        (everybody / "cache/lock").symlink_to(victim)

    def refused() -> str:
        done = cachefs("mount", source, mountpoint, "--cache-dir", everybody / "cache", check=False)
        assert done.returncode != 0
        assert done.stderr.count("\n") == 1, done.stderr
        assert victim.read_bytes() == b"precious"
        return done.stderr

    assert as_user(OTHER, OTHER, [], plant) is None
    assert f"belongs to user {OTHER}" in refused()
    os.chown(everybody / "cache", 0, 0)
    assert "lock is a symbolic link" in refused()
    everybody.chmod(0o777)
    assert "may be written to by everybody" in refused()


@pytest.mark.promise("PE-15")
@pytest.mark.parametrize("name", ["blob", "secret", "cache.json", "lock", "daemon.log", "index/data.mdb"])
def test_a_cache_directory_with_a_named_pipe_is_refused(mount: Callable[..., Mount], source: Path, name: str) -> None:
    """Opening a named pipe blocks until it has a writer."""
    m = mount(source)
    m.umount()
    path = m.cache / name
    path.unlink()
    os.mkfifo(path)
    done = cachefs("mount", source, m.path, "--cache-dir", m.cache, check=False)
    assert done.returncode != 0 and done.stderr.count("\n") == 1 and str(path) in done.stderr, done.stderr
    path.unlink()


@pytest.mark.parametrize("name", ["blob", "lock", "index"])
def test_a_cache_file_of_the_wrong_type_is_named(mount: Callable[..., Mount], source: Path, name: str) -> None:
    m = mount(source)
    m.umount()
    path = m.cache / name
    if path.is_dir():
        shutil.rmtree(path)
        path.write_bytes(b"")
    else:
        path.unlink()
        path.mkdir()
    done = cachefs("mount", source, m.path, "--cache-dir", m.cache, check=False)
    assert done.returncode != 0 and done.stderr.count("\n") == 1, done.stderr
    assert name in done.stderr.replace(str(m.cache.parent), ""), done.stderr


@contextmanager
def impostor(path: Path) -> Iterator[list[object]]:
    """Listens there as a daemon would, and closes each connection. Yields the connections."""
    callers: list[object] = []

    def serve() -> None:
        with suppress(OSError):  # shut down
            while True:
                connection, _ = listener.accept()
                callers.append(connection.getpeername())
                connection.close()

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with socket_address(path) as address:
            listener.bind(address)
        path.chmod(0o777)
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield callers
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.promise("PE-16")
@pytest.mark.parametrize(
    ("place", "user"),  # one user each: the tests run side by side, and there is one /tmp
    [("in /tmp", OTHER + 1), ("by XDG_RUNTIME_DIR", OTHER + 2), ("symlink", OTHER + 3), ("open to all", OTHER + 4)],
)
def test_commands_believe_no_runtime_directory_that_another_user_may_have_filled(
    mount: MakeMount, source: Path, tmp_path: Path, place: str, user: int
) -> None:
    m = mount(source)
    open_to_all(tmp_path / "x")
    environment = {"HOME": str(tmp_path)}
    default = Path(f"/tmp/cachefs-{user}")
    root = tmp_path / "cachefs" if place in ("by XDG_RUNTIME_DIR", "symlink") else default
    if place == "by XDG_RUNTIME_DIR":
        environment["XDG_RUNTIME_DIR"] = str(tmp_path)
    root.mkdir()
    try:
        if place == "symlink":
            default.symlink_to(root)
        directory = root / mount_directory(str(m.path)).name
        directory.mkdir()
        (directory / "mount.json").write_text("planted")
        with impostor(directory / "control") as callers:
            for path in (root, directory, *directory.iterdir()):
                os.chown(path, OTHER, OTHER)
                path.chmod(0o777)
            if place == "open to all":
                os.chown(root, user, user)
            before = sorted(root.rglob("*"))
            for command in ("status", "restart", "umount", "info"):
                done = cachefs_as(user, user, environment, command, m.path)
                assert done.returncode == 1 and done.stdout == "", done
                assert done.stderr.count("\n") == 1, done.stderr
                reason = {"open to all": "must be closed to others", "symlink": "is a symbolic link"}.get(place)
                assert (reason or f"belongs to user {OTHER}") in done.stderr, done.stderr
            assert callers == []
            assert sorted(root.rglob("*")) == before
    finally:
        for path in {root, default}:
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)
    assert contents(m.path) == contents(source)


@pytest.mark.promise("PE-18")
@pytest.mark.fastpath
def test_the_fast_path_hands_its_descriptors_to_its_own_user_only(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    place = mount_directory(str(m.path)) / "fastpath"
    m.kill()

    def ask() -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(20)
            connection.connect(f"/proc/self/fd/{directory}/{place.name}")
            return connection.recv(64)

    directory = os.open(place.parent, os.O_PATH)  # past the runtime directory of all mounts, which stays closed
    opened = [place, place.parent]
    before = [path.stat().st_mode for path in opened]
    try:
        for path in opened:
            path.chmod(0o777)
        assert as_user(OTHER, OTHER, [], ask) == b"", "it did not hang up"
    finally:
        for path, mode in zip(opened, before, strict=True):
            path.chmod(mode)
        os.close(directory)
    m.start()
    assert (m.path / "d0/f00000").read_bytes() == (source / "d0/f00000").read_bytes()


@pytest.mark.promise("PE-18")
@pytest.mark.fastpath
def test_a_set_user_id_program_that_looks_like_a_fast_path_is_not_believed(mount: MakeMount, source: Path) -> None:
    """The starter of a program chooses its name, arguments and open files, with which a successor would serve."""
    m = mount(source, "--read-only")
    name = f"cachefs-{mount_directory(str(m.path)).name}"
    planted = os.memfd_create(name, os.MFD_CLOEXEC)
    os.truncate(planted, SHARED_BYTES)
    options = [word for option in HELD_OPTIONS for word in (option, str(planted))]
    with subprocess.Popen(
        ["cachefs-fastpath", "-I", "-S", "-c", "import sys; print(flush=True); sys.stdin.read()", *options],
        executable=sys.executable,
        preexec_fn=lambda: os.setresuid(OTHER, 0, 0),
        pass_fds=[planted],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as impostor:
        try:
            assert impostor.stdout is not None and impostor.stdout.readline() == b"\n"
            fastpath = m.status()["fastpath"]["pid"]
            assert [found.pid for found in processes.running(name)] == [fastpath]
            m.killed_fastpaths += 1
            m.kill()
            os.kill(fastpath, signal.SIGKILL)
            m.start()
            assert contents(m.path) == contents(source)
            assert impostor.poll() is None
        finally:
            impostor.kill()
            os.close(planted)
