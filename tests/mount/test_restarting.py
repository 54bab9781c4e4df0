"""A successor whose command, predecessor or fast path is killed or stopped, or has another version."""

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from cachefs.client import locations
from cachefs.client.client import Client
from cachefs.fastpath import processes
from cachefs.system.claims import is_dying
from tests.conftest import REPOSITORY, Mount, cachefs, contents, make_files, mounted_on, settle, wait_for
from tests.processes import (
    daemon_pid,
    device_of,
    fastpath_pid,
    has_forked,
    left_behind,
    start,
    stop,
)
from tests.service_manager import ServiceManager

MakeMount = Callable[..., Mount]


# --- the command that started a successor is killed ------------------------------------------------------------------


@pytest.mark.promise("LC-7")
@pytest.mark.fastpath
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_h1_a_restart_goes_on_when_its_command_is_killed(
    mount: MakeMount, source: Path, number: signal.Signals
) -> None:
    m = mount(source, "--read-only")
    before, device, expected = m.pid, device_of(m.path), contents(source)
    with open(m.path / "d0/f00000", "rb") as opened:
        command = start("restart", m.path)
        wait_for(lambda: has_forked(command), bool)
        command.send_signal(number)
        command.communicate(timeout=60)
        m.pid = wait_for(lambda: daemon_pid(m.path), lambda pid: pid not in (0, before), timeout_s=60)
        assert device_of(m.path) == device
        assert opened.read() == expected[Path("d0/f00000")]
    assert contents(m.path) == expected


def test_h1_a_mount_whose_command_is_killed_is_there_or_not(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    """The command is killed when the daemon has started: the daemon goes on."""
    place = tmp_path / "mnt"
    place.mkdir()
    command = start("mount", source, place, "--cache-dir", tmp_path / "cache")
    wait_for(lambda: has_forked(command), bool)
    command.kill()
    command.communicate(timeout=60)
    wait_for(lambda: daemon_pid(place), bool)
    assert contents(place) == contents(source)
    cachefs("umount", place)


@pytest.mark.promise("LC-10")
@pytest.mark.fastpath
def test_h1_a_successor_that_fails_leaves_the_mount(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    expected = contents(m.path)
    m.flush()
    device = device_of(m.path)
    m.kill()
    cache = (m.cache / "cache.json").read_text()
    (m.cache / "cache.json").write_text(
        '{"format": 1, "source": "/elsewhere"}'
    )  # it comes as far as the cache directory
    done = cachefs("restart", m.path, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert device_of(m.path) == device
    (m.cache / "cache.json").write_text(cache)
    m.start()
    assert device_of(m.path) == device and contents(m.path) == expected


@pytest.mark.promise("LC-10")
@pytest.mark.fastpath
def test_h1_a_successor_that_is_killed_between_two_fast_paths_loses_no_mount(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    expected, opened = contents(source), os.open(m.path / "d0", os.O_PATH)  # which asks nothing when it is closed
    predecessor, fastpath = m.pid, os.pidfd_open(fastpath_pid(m))
    command = start("restart", m.path)
    wait_for(lambda: has_forked(command), bool)
    (successor,) = (int(pid) for pid in Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split())
    assert select.select([fastpath], [], [], 60)[0]
    os.kill(successor, signal.SIGKILL)
    os.close(fastpath)
    command.communicate(timeout=60)
    assert not processes.is_running(predecessor)
    m.start()
    assert os.listdir(f"/proc/self/fd/{opened}")  # another mount may have the same numbers
    os.close(opened)
    assert contents(m.path) == expected


# --- a fast path that does not answer --------------------------------------------------------------------------------


def check_only_one(place: Path, stopped: int, expected: dict[Path, bytes]) -> None:
    name = f"cachefs-{locations.mount_directory(str(place)).name}"
    pid = Client(place).status()["fastpath"]["pid"]
    assert [each.pid for each in processes.running(name)] == [pid] and pid != stopped
    with suppress(ProcessLookupError):
        os.kill(stopped, signal.SIGCONT)
    assert contents(place) == expected
    assert Client(place).status()["fastpath"]["pid"] == pid


@pytest.mark.promise("LC-27")
@pytest.mark.fastpath
def test_a_restart_of_a_dead_daemon_fetches_nothing_again(mount: MakeMount, tmp_path: Path) -> None:
    make_files(tmp_path / "source", 100)
    settle()
    m = mount(tmp_path / "source", "--read-only")
    fastpath, expected = fastpath_pid(m), contents(m.path)
    m.kill()  # before it has committed
    cachefs("restart", m.path)
    m.pid = daemon_pid(m.path)
    m.drop_caches()
    assert contents(m.path) == expected and m.ops()["read"] == 100
    assert fastpath_pid(m) == fastpath


@pytest.mark.fastpath
@pytest.mark.parametrize("command", ["mount", "restart"])
def test_h2_a_stopped_fast_path_is_ended_before_another_is_started(
    mount: MakeMount, source: Path, command: str
) -> None:
    m = mount(source, "--read-only")
    expected = contents(source)
    stopped, device = fastpath_pid(m), device_of(m.path)
    stop(stopped)
    m.kill()
    if command == "restart":
        cachefs("restart", m.path)
        m.pid = daemon_pid(m.path)
    else:
        m.start()
    assert device_of(m.path) == device
    check_only_one(m.path, stopped, expected)


@pytest.mark.fastpath
def test_h2_a_stopped_fast_path_under_a_service_manager(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "mnt"
    place.mkdir()
    command = ["mount", source, place, "--cache-dir", tmp_path / "cache", "--foreground", "--read-only"]
    manager = ServiceManager(tmp_path, command)
    try:
        manager.start()
        wait_for(lambda: manager.heard("READY=1"), bool)
        stopped, device = Client(place).status()["fastpath"]["pid"], device_of(place)
        stop(stopped)
        manager.kill_and_wait(signal.SIGKILL)
        since = len(manager.said)
        manager.start()
        wait_for(lambda: manager.heard("READY=1", since=since), bool, timeout_s=60)
        assert device_of(place) == device
        check_only_one(place, stopped, contents(source))
    finally:
        manager.close()
    assert not mounted_on(place) and not left_behind(place)


# --- another layout of the shared memory -----------------------------------------------------------------------------

OTHER_VERSION = """
import sys
from cachefs.contract import shared
shared.SHARED_VERSION += 1
from daemon.cli.main import main
main(sys.argv[1:], "cachefs")
"""


@pytest.mark.fastpath
def test_h6_a_restart_with_another_layout_is_refused_before_anything_is_done(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    other = [sys.executable, "-c", OTHER_VERSION, "restart", m.path]
    for command in ([*other, "--check"], other):
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and done.stderr.count("\n") == 1 and "another version" in done.stderr, done.stderr
        assert m.status()["pid"] == m.pid
    assert cachefs("restart", m.path, "--check").returncode == 0
    assert m.status()["pid"] == m.pid
    m.kill()
    done = subprocess.run(other, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "another version" in done.stderr, done.stderr
    m.start()  # the right one still can
    assert contents(m.path) == contents(source)


def read_only(cache: Path) -> None:
    subprocess.run(["mount", "--bind", cache, cache], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", cache], check=True)


UNUSABLE: dict[str, Callable[[Path], object]] = {
    "read-only disk": read_only,
    "directory removed": shutil.rmtree,
    "another directory": lambda cache: shutil.copytree(cache.rename(cache.with_name("old")), cache),
    "of another source": lambda cache: (cache / "cache.json").write_text('{"format": 1, "source": "/elsewhere"}'),
    "secret damaged": lambda cache: (cache / "secret").write_text("zz"),
    "blob removed": lambda cache: (cache / "blob").unlink(),
    "index removed": lambda cache: shutil.rmtree(cache / "index"),
    "of another user": lambda cache: os.chown(cache, 1, 1),
    "link in it": lambda cache: (cache / "index" / "link").symlink_to("/"),
    "named pipe": lambda cache: ((cache / "blob").unlink(), os.mkfifo(cache / "blob")),
    "session removed": lambda cache: shutil.rmtree(locations.session_directory(cache)),
}


@pytest.mark.promise("LC-23")
@pytest.mark.fastpath
@pytest.mark.parametrize("how", UNUSABLE)
def test_a_restart_that_could_not_open_the_cache_is_refused_before_anything_is_done(
    mount: MakeMount, source: Path, beneath: ExitStack, how: str
) -> None:
    m = mount(source)
    paths = sorted(contents(source))
    (m.path / paths[0]).read_bytes()
    m.flush()
    if how == "read-only disk":
        beneath.callback(subprocess.run, ["umount", "-l", m.cache], check=True)
    UNUSABLE[how](m.cache)
    done = cachefs("restart", m.path, check=False)
    named = m.cache if how != "session removed" else locations.session_directory(m.cache)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and str(named) in done.stderr, done.stderr
    assert m.status()["pid"] == m.pid
    m.drop_caches()
    assert contents(m.path) == contents(source)
    (m.path / "new").write_bytes(b"new")
    assert (source / "new").read_bytes() == b"new"


# --- a daemon that is killed while its source hangs ------------------------------------------------------------------


@pytest.mark.promise("LC-14")
@pytest.mark.fastpath
def test_a_daemon_that_cannot_end_has_a_successor(mount: MakeMount, faulty: tuple[Path, Path]) -> None:
    """One of its threads waits in the kernel for the source. It still has its sockets, and its lock on the cache."""
    source, faults = faulty
    m = mount(source, "--read-only", "--source-timeout", "2")
    expected = contents(m.path / "d0")
    m.flush()
    (faults / "hang").touch()
    with pytest.raises(OSError):
        (m.path / "d1/f00001").stat()
    fastpath = fastpath_pid(m)
    pidfd = os.pidfd_open(m.pid)
    os.kill(m.pid, signal.SIGKILL)
    wait_for(lambda: is_dying(m.pid), bool)
    m.start()
    assert not select.select([pidfd], [], [], 0)[0], "it could end, which proves nothing"
    os.close(pidfd)
    assert fastpath_pid(m) == fastpath  # which noticed
    assert contents(m.path / "d0") == expected
    (faults / "hang").unlink()
    assert contents(m.path) == contents(source)


@pytest.mark.parametrize("unmounted", [True, False])
def test_a_daemon_that_cannot_end_and_has_no_fast_path(
    mount: MakeMount, faulty: tuple[Path, Path], unmounted: bool
) -> None:
    source, faults = faulty
    m = mount(source, "--read-only", "--source-timeout", "2", "--no-fastpath")
    (faults / "hang").touch()
    with pytest.raises(OSError):
        (m.path / "d1").stat()
    pidfd = os.pidfd_open(m.pid)
    os.kill(m.pid, signal.SIGKILL)
    wait_for(lambda: is_dying(m.pid), bool)
    if unmounted:
        cachefs("umount", m.path)
        assert not mounted_on(m.path)
    m.start()
    assert not select.select([pidfd], [], [], 0)[0], "it could end, which proves nothing"
    assert mounted_on(m.path) == ["fuse.cachefs"]
    (faults / "hang").unlink()
    assert contents(m.path) == contents(source)
    assert select.select([pidfd], [], [], 30)[0]
    os.close(pidfd)
    m.umount()
    assert not left_behind(m.path)
