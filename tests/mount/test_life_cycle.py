"""How mounts begin, are taken over and end: H1 to H8 of what outside tests found."""

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

import cachefs as package
from cachefs.client import locations, mount_table
from cachefs.client.client import Client
from cachefs.errors import CacheFsError
from cachefs.fastpath import processes
from cachefs.system import syscalls
from cachefs.system.claims import is_dying
from daemon.cli.main import unmount_and_wait
from tests.conftest import CLI, REPOSITORY, Mount, cachefs, contents, mounted_on, small_disk, wait_for
from tests.service_manager import ServiceManager

MakeMount = Callable[..., Mount]


def start(*arguments: object, **kwargs: object) -> subprocess.Popen[str]:
    """The command line, in the background."""
    given = Mount.given() if arguments[0] == "mount" else []
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [*CLI, *map(str, arguments), *given], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, **kwargs
    )


def has_forked(process: subprocess.Popen[str]) -> bool:
    """Whether the daemon has started, in a session of its own."""
    with suppress(OSError):
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[3] == child:
                return True
    return False


def wait_for_end(pid: int) -> None:
    wait_for(lambda: processes.is_running(pid), lambda is_there: not is_there, timeout_s=60)


def device_of(place: Path) -> str:
    top = mount_table.top_mount(str(place))
    assert top is not None
    return top.device


def fastpath_pid(m: Mount) -> int:
    return int(m.status()["fastpath"]["pid"])


def left_behind(place: Path) -> list[str]:
    """Runtime directories, claims and binds of mounts on this mountpoint."""
    found = [str(path) for path in locations.runtime_root().glob(f"*{locations.path_id(str(place))}*")]
    return found + [m.mountpoint for m in mount_table.mounts() if locations.path_id(str(place)) in m.mountpoint]


def daemon_pid(place: Path) -> int:
    """0 where none answers."""
    try:
        return int(Client(place).status()["pid"])
    except CacheFsError:
        return 0


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
    (m.cache / "cache.json").write_text("{}")  # it comes as far as the cache directory
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


@pytest.mark.fastpath
def test_h2_a_stopped_fast_path_is_ended_before_another_is_started(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    expected = contents(source)
    stopped, device = fastpath_pid(m), device_of(m.path)
    os.kill(stopped, signal.SIGSTOP)
    m.kill()
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
        os.kill(stopped, signal.SIGSTOP)
        manager.kill_and_wait(signal.SIGKILL)
        since = len(manager.said)
        manager.start()
        wait_for(lambda: manager.heard("READY=1", since=since), bool, timeout_s=60)
        assert device_of(place) == device
        check_only_one(place, stopped, contents(source))
    finally:
        manager.close()
    assert not mounted_on(place) and not left_behind(place)


# --- another mount at the same place ---------------------------------------------------------------------------------


@pytest.mark.promise("LC-19")
@pytest.mark.parametrize("how", ["closed", "told to end"])
def test_h3_the_daemon_of_a_detached_mount_leaves_the_next_one_alone(mount: MakeMount, source: Path, how: str) -> None:
    first = mount(source)
    opened = os.open(first.path / "d0/f00000", os.O_RDONLY)
    subprocess.run(["umount", "-l", first.path], check=True)
    second = mount(source)
    device = device_of(second.path)
    if how == "told to end":
        os.kill(first.pid, signal.SIGTERM)
        wait_for_end(first.pid)
    with suppress(OSError):  # of a mount that has ended
        os.close(opened)
    wait_for_end(first.pid)
    first.pid = 0
    assert device_of(second.path) == device and mounted_on(second.path).count("fuse.cachefs") == 1
    assert second.status()["pid"] == second.pid
    assert contents(second.path) == contents(source)
    assert left_behind(second.path)[0] == str(locations.mount_directory(str(second.path)))
    second.umount()
    assert not left_behind(second.path)


@pytest.mark.promise("LC-19")
def test_h3_a_daemon_that_ends_late_leaves_the_next_mount_alone(mount: MakeMount, source: Path) -> None:
    """The kernel gives the next mount the same device number."""
    first = mount(source)
    os.kill(first.pid, signal.SIGSTOP)
    try:
        syscalls.umount2(str(first.path), syscalls.MNT_DETACH)  # umount(8) would look at it first
        second = mount(source)
        device = device_of(second.path)
    finally:
        os.kill(first.pid, signal.SIGCONT)
    wait_for_end(first.pid)
    first.pid = 0
    assert device_of(second.path) == device
    assert second.status()["pid"] == second.pid
    assert contents(second.path) == contents(source)
    second.umount()
    assert not left_behind(second.path)


# --- many at once ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("LC-19")
def test_h4_of_many_mounts_on_one_mountpoint_one_succeeds(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "mnt"
    place.mkdir()
    commands = [start("mount", source, place, "--cache-dir", tmp_path / f"cache{i}") for i in range(6)]
    try:
        said = [command.communicate(timeout=90)[1] for command in commands]
        assert sorted(command.returncode for command in commands) == [0, 1, 1, 1, 1, 1], said
        for command, line in zip(commands, said, strict=True):
            if command.returncode:
                assert line.count("\n") == 1 and ("in use" in line or "being mounted" in line), line
        assert mounted_on(place) == ["fuse.cachefs"]
        assert contents(place) == contents(source)
        cachefs("umount", place)
        assert not left_behind(place)
    finally:
        for command in commands:
            command.kill()
            command.communicate(timeout=20)
        while mounted_on(place):
            cachefs("umount", place)


@pytest.mark.promise("LC-19")
@pytest.mark.fastpath
def test_h4_of_many_successors_one_takes_over(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    device = device_of(m.path)
    m.kill()
    commands = [start("mount", source, m.path, "--cache-dir", m.cache, "--read-only") for _ in range(3)]
    said = [command.communicate(timeout=90)[1] for command in commands]
    assert sorted(command.returncode for command in commands) == [0, 1, 1], said
    assert all(line.count("\n") == bool(command.returncode) for command, line in zip(commands, said, strict=True)), said
    m.pid = daemon_pid(m.path)
    assert mounted_on(m.path) == ["fuse.cachefs"] and device_of(m.path) == device
    assert contents(m.path) == contents(source)


# --- asked to end while it starts -------------------------------------------------------------------------------------


@pytest.mark.promise("LC-19")
@pytest.mark.parametrize("when", ["claimed", "mounted"])
@pytest.mark.parametrize("how", ["--foreground", "--no-allow-other"], ids=["foreground", "background"])
def test_h5_nothing_stays_of_a_mount_that_is_stopped_early(source: Path, tmp_path: Path, when: str, how: str) -> None:
    place, cache = tmp_path / "mnt", tmp_path / "cache"
    place.mkdir()
    command = start("mount", source, place, "--cache-dir", cache, "--simulate-latency", "60000", how)
    if when == "claimed":
        wait_for(cache.exists, bool)
    else:
        wait_for(lambda: mounted_on(place), bool)
    command.send_signal(signal.SIGTERM)
    _, said = command.communicate(timeout=30)
    if how == "--foreground":
        assert command.returncode == 0, said
    else:
        assert command.returncode == 1 and "before the mount was ready" in said and said.count("\n") == 1
    assert not mounted_on(place) and not left_behind(place)
    assert not locations.session_directory(cache).exists()


@pytest.mark.promise("LC-19")
def test_h5_a_start_that_was_stopped_is_ended_by_its_command(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "mnt"
    place.mkdir()
    command = start("mount", source, place, "--cache-dir", tmp_path / "cache", "--simulate-latency", "60000")
    wait_for(lambda: mounted_on(place), bool)
    (daemon,) = (int(pid) for pid in Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split())
    os.kill(daemon, signal.SIGSTOP)
    try:
        command.send_signal(signal.SIGTERM)
        _, said = command.communicate(timeout=30)
        assert command.returncode == 1 and "before the mount was ready" in said and said.count("\n") == 1
        assert not mounted_on(place) and not left_behind(place)
    finally:
        with suppress(ProcessLookupError):
            os.kill(daemon, signal.SIGCONT)
        command.kill()


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
    "cache.json damaged": lambda cache: (cache / "cache.json").write_text("{"),
    "of another source": lambda cache: (cache / "cache.json").write_text('{"format": 1, "source": "/elsewhere"}'),
    "secret damaged": lambda cache: (cache / "secret").write_text("zz"),
    "blob removed": lambda cache: (cache / "blob").unlink(),
    "index removed": lambda cache: shutil.rmtree(cache / "index"),
    "of another user": lambda cache: os.chown(cache, 1, 1),
    "link in it": lambda cache: (cache / "index" / "link").symlink_to("/"),
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
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and str(m.cache) in done.stderr, done.stderr
    assert m.status()["pid"] == m.pid
    m.drop_caches()
    assert contents(m.path) == contents(source)
    (m.path / "new").write_bytes(b"new")
    assert (source / "new").read_bytes() == b"new"


# --- what the starter left open --------------------------------------------------------------------------------------


def links(descriptors: Path) -> list[str]:
    """What the descriptors of a process lead to; some may be closed meanwhile."""
    found = []
    for path in descriptors.iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(path))
    return found


def test_h7_inherited_descriptors_are_closed(source: Path, tmp_path: Path) -> None:
    place, lock = tmp_path / "mnt", tmp_path / "lock"
    place.mkdir()
    held = os.open(lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    command = start("mount", source, place, "--cache-dir", tmp_path / "cache", pass_fds=[held])
    os.close(held)  # what `flock L cachefs mount …` holds goes when the command ends
    _, said = command.communicate(timeout=60)
    assert command.returncode == 0, said
    try:
        with open(lock) as mine:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        opened = Path(f"/proc/{daemon_pid(place)}/fd")
        assert {os.readlink(opened / str(fd)) for fd in range(3)} == {"/dev/null"}
        assert str(lock) not in links(opened)
    finally:
        cachefs("umount", place)


# --- the mount goes away ---------------------------------------------------------------------------------------------


@contextmanager
def connections(directory: Path) -> Iterator[Path]:
    """The kernel's control files of FUSE connections."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "fusectl", "fusectl", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


@pytest.mark.promise("LC-19")
def test_h8_after_an_abort_the_daemon_cleans_up(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    m = mount(source)
    assert (m.path / "d0/f00000").read_bytes()
    with connections(tmp_path / "connections") as control:
        (control / device_of(m.path).rpartition(":")[2] / "abort").write_text("1")
    wait_for_end(m.pid)
    m.pid = 0
    assert not mounted_on(m.path) and not left_behind(m.path)
    assert "ExceptionGroup" not in m.log()
    m.start()
    assert contents(m.path) == contents(source)


@pytest.mark.promise("LC-19")
@pytest.mark.fastpath
@pytest.mark.parametrize("when", ["forked", "left"])
def test_h8_an_unmount_during_a_restart(mount: MakeMount, source: Path, when: str) -> None:
    m = mount(source)
    command = start("restart", m.path)
    if when == "forked":
        wait_for(lambda: has_forked(command), bool)
    else:
        wait_for_end(m.pid)
    subprocess.run(["umount", "-l", m.path], check=True)
    _, said = command.communicate(timeout=60)
    wait_for(lambda: left_behind(m.path), lambda left: not left, timeout_s=60)
    m.pid = 0
    assert "Exception" not in m.log() + said and said.count("\n") <= 1, said
    assert not mounted_on(m.path)
    m.start()
    assert contents(m.path) == contents(source)


UNMOUNT_AT = """
import subprocess, sys
from daemon import session
from daemon.cli import main
from daemon.kernel import instance
from daemon.mount import takeover

def unmounted_before(owner, name):
    function = getattr(owner, name)
    def unmount_first(*arguments, **keywords):
        subprocess.run(["umount", "-l", sys.argv[-1]], check=True)
        return function(*arguments, **keywords)
    setattr(owner, name, unmount_first)

unmounted_before(*{
    "comes": (takeover, "take_over"),
    "has come": (instance.MountInstance, "take_over"),
    "opens the cache": (session, "OpenedIndex"),
}[sys.argv.pop(1)])
main.main(sys.argv[1:])
"""


@pytest.mark.promise("LC-19")
@pytest.mark.fastpath
@pytest.mark.parametrize("is_stopped", [False, True], ids=["fast path ends", "fast path is stopped"])
@pytest.mark.parametrize("when", ["comes", "has come", "opens the cache"])
def test_an_unmount_while_a_successor_starts_leaves_nothing(
    mount: MakeMount, source: Path, when: str, is_stopped: bool
) -> None:
    m = mount(source)
    fastpath = fastpath_pid(m)
    m.kill()
    if is_stopped:
        os.kill(fastpath, signal.SIGSTOP)
    command = [sys.executable, "-c", UNMOUNT_AT, when, "restart", str(m.path)]
    restart = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert restart.returncode == 1 and restart.stderr.count("\n") == 1, restart.stderr
    assert "was unmounted" in restart.stderr
    assert not mounted_on(m.path) and not left_behind(m.path)
    wait_for_end(fastpath)


UNMOUNT_WHEN_READY = """
import subprocess, sys
from daemon.cli import main
from daemon.service import background

run = background.run_in_background

def run_and_unmount(*arguments, **keywords):
    run(*arguments, **keywords)
    subprocess.run(["umount", "-l", sys.argv[-1]], check=True)

background.run_in_background = run_and_unmount
main.main(sys.argv[1:])
"""


@pytest.mark.promise("LC-19")
@pytest.mark.fastpath
def test_a_restart_says_so_where_the_mount_was_unmounted_before_the_command_has_ended(
    mount: MakeMount, source: Path
) -> None:
    m = mount(source)
    command = [sys.executable, "-c", UNMOUNT_WHEN_READY, "restart", str(m.path)]
    restart = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    m.pid = 0
    assert restart.returncode == 1 and restart.stderr.count("\n") == 1, restart.stderr
    assert "was unmounted" in restart.stderr
    wait_for(lambda: left_behind(m.path), lambda left: not left)


WHEN_THE_DAEMON_HAS_LEFT = """
import os, signal, subprocess, sys
from daemon.cli import main

dismiss = main._dismiss

def dismiss_first(*arguments):
    opened = dismiss(*arguments)
    what, path = sys.argv.pop(1), sys.argv[-1]
    if what == "mount":
        subprocess.run(["mount", "-t", "tmpfs", "none", path], check=True)
    else:
        os.kill(int(what), signal.SIGKILL)
    return opened

main._dismiss = dismiss_first
main.main(sys.argv[2:])
"""


@pytest.mark.promise("LC-4")
@pytest.mark.fastpath
@pytest.mark.parametrize("what", ["mount", "kill"])
def test_whatever_happens_when_the_daemon_has_left_its_successor_comes(
    mount: MakeMount, source: Path, what: str
) -> None:
    """Something is mounted on top, or the fast path is killed: the successor already has what it needs."""
    m = mount(source)
    fastpath = fastpath_pid(m)
    with open(m.path / "d0/f00000", "rb") as opened:
        data = opened.read()
        m.killed_fastpaths += what == "kill"
        command = [sys.executable, "-c", WHEN_THE_DAEMON_HAS_LEFT, str(fastpath) if what == "kill" else what]
        restart = subprocess.run(
            [*command, "restart", str(m.path)], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
        )
        if what == "mount":
            subprocess.run(["umount", m.path], check=True)
        assert restart.returncode == 0, restart.stderr
        m.pid = int(m.status()["pid"])
        opened.seek(0)
        assert opened.read() == data
    assert contents(m.path) == contents(source)


@pytest.mark.promise("LC-8")
@pytest.mark.fastpath
def test_a_fast_path_that_is_stopped_ends_with_a_mount_that_is_unmounted_during_a_restart(
    mount: MakeMount, source: Path
) -> None:
    m = mount(source)
    fastpath = fastpath_pid(m)
    os.kill(fastpath, signal.SIGSTOP)
    command = start("restart", m.path)
    wait_for_end(m.pid)  # from now on the successor waits for the fast path
    m.pid = 0
    subprocess.run(["umount", "-l", m.path], check=True)
    _, said = command.communicate(timeout=60)
    assert command.returncode == 1 and "was unmounted" in said
    wait_for_end(fastpath)
    assert not left_behind(m.path)


@pytest.mark.promise("LC-19")
@pytest.mark.fastpath
@pytest.mark.parametrize("when", ["comes", "has come", "opens the cache"])
def test_a_mount_that_is_detached_while_it_is_in_use_has_no_successor(
    mount: MakeMount, source: Path, when: str
) -> None:
    """The kernel keeps the connection for its users, but the mount's path does not lead to it any more."""
    m = mount(source)
    fastpath = fastpath_pid(m)
    m.kill()
    user = os.open(m.path, os.O_PATH)
    try:
        command = [sys.executable, "-c", UNMOUNT_AT, when, "restart", str(m.path)]
        restart = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        assert restart.returncode == 1 and restart.stderr.count("\n") == 1, restart.stderr
        assert "was unmounted" in restart.stderr
        assert not left_behind(m.path)
    finally:
        os.close(user)
    wait_for_end(fastpath)


@pytest.mark.parametrize("free_kib", [0, 32, 48, 52, 60])
def test_h8_a_disk_that_is_full_from_the_start(source: Path, tmp_path: Path, free_kib: int) -> None:
    """Either it mounts and serves, or it reports the reason in one line."""
    place = tmp_path / "mnt"
    place.mkdir()
    with small_disk(tmp_path / "disk", "1M") as disk:
        (disk / "cache").mkdir(mode=0o700)
        with suppress(OSError), open(disk / "full", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        os.truncate(disk / "full", (disk / "full").stat().st_size - (free_kib << 10))
        command = start("mount", source, place, "--cache-dir", disk / "cache", "--cache-size", "1M", "--read-only")
        _, said = command.communicate(timeout=60)
        try:
            assert "Exception" not in said and "Traceback" not in said
            if command.returncode:
                assert said.count("\n") == 1 and "cannot" in said and str(disk) in said, said
            else:
                assert contents(place) == contents(source)
        finally:
            while mounted_on(place):
                cachefs("umount", place)
        assert not left_behind(place)


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


# --- a source that fails, or hangs, while a command is run -----------------------------------------------------------


@pytest.mark.promise("LC-20")
@pytest.mark.parametrize("mode", [["--read-only"], [], ["--cache", "none"]], ids=["read-only", "read-write", "none"])
def test_a_mount_whose_source_says_enotconn_is_alive(
    mount: MakeMount, faulty: tuple[Path, Path], mode: list[str]
) -> None:
    """The source's answer to statfs is not an answer of the mount itself."""
    source, faults = faulty
    m = mount(source, *mode)
    device, expected = device_of(m.path), contents(source)
    assert contents(m.path) == expected
    (faults / "enotconn").touch()
    with start("mount", source, m.path, "--cache-dir", m.cache, *mode) as command:
        _, said = command.communicate(timeout=60)
    assert command.returncode == 1 and "in use" in said and said.count("\n") == 1, said
    assert device_of(m.path) == device and mounted_on(m.path) == ["fuse.cachefs"]
    assert contents(m.path) == expected


@pytest.mark.promise("LC-20")
@pytest.mark.parametrize("mode", [["--read-only"], [], ["--cache", "none"]], ids=["read-only", "read-write", "none"])
def test_a_mount_whose_source_hangs_is_alive(mount: MakeMount, faulty: tuple[Path, Path], mode: list[str]) -> None:
    source, faults = faulty
    m = mount(source, *mode, "--source-timeout", "60")
    device, expected = device_of(m.path), contents(source)
    assert contents(m.path) == expected
    (faults / "hang").touch()
    (faults / "hang-all").touch()
    with start("mount", source, m.path, "--cache-dir", m.cache, *mode, "--source-timeout", "1") as command:
        _, said = command.communicate(timeout=30)
    assert command.returncode == 1 and "in use" in said and said.count("\n") == 1, said
    assert device_of(m.path) == device and mounted_on(m.path) == ["fuse.cachefs"]
    for fault in faults.iterdir():
        fault.unlink()
    assert contents(m.path) == expected


@pytest.mark.promise("LC-20")
@pytest.mark.parametrize("below", ["", "d1"])
def test_a_source_that_hangs_is_not_waited_for_longer_than_its_time_out(
    faulty: tuple[Path, Path], tmp_path: Path, below: str
) -> None:
    source, faults = faulty
    place = tmp_path / "mnt"
    place.mkdir()
    (faults / "hang").touch()
    (faults / "hang-all").touch()
    with start("mount", source / below, place, "--cache-dir", tmp_path / "c", "--source-timeout", "1") as command:
        _, said = command.communicate(timeout=30)
    assert command.returncode == 1 and "does not answer" in said and said.count("\n") == 1, said
    assert not mounted_on(place) and not left_behind(place)


# --- more than one mountpoint ----------------------------------------------------------------------------------------


def test_umount_says_where_a_mount_lives_on(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    """It does not wait for the daemon, which serves that place."""
    m = mount(source)
    other = tmp_path / "other"
    other.mkdir()
    subprocess.run(["mount", "--bind", m.path, other], check=True)
    try:
        done = cachefs("umount", m.path, check=False)
        assert done.returncode == 1 and str(other) in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert not mounted_on(m.path) and contents(other) == contents(source)
    finally:
        subprocess.run(["umount", other], check=True)
    wait_for_end(m.pid)
    m.pid = 0
    wait_for(lambda: left_behind(m.path), lambda left: not left)


def test_a_mount_that_has_got_the_device_number_is_not_a_copy(
    mount: MakeMount, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gives the number of an unmounted filesystem to the next one."""
    m = mount(source)
    before = mount_table.top_mount(str(m.path))
    assert before is not None
    later = replace(before, number=before.number + 1_000_000, mountpoint="/elsewhere")
    there = mount_table.mounts

    def mounts() -> list[mount_table.Mount]:
        return [*there(), *([] if mounted_on(m.path) else [later])]

    monkeypatch.setattr(mount_table, "mounts", mounts)
    unmount_and_wait(str(m.path))
    assert later in mount_table.mounts()
    m.pid = 0


# --- also ------------------------------------------------------------------------------------------------------------


def test_the_log_begins_with_what_is_mounted_and_no_claim_stays(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    assert f"cachefs {package.__version__}: {source} on {m.path}" in m.log().splitlines()[0]
    assert not list(locations.runtime_root().glob(f"lock-*{locations.path_id(str(m.path))}*"))


@pytest.mark.promise("LC-15")
def test_a_mount_in_use_is_not_unmounted(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    with open(m.path / "d0/f00000", "rb") as file:
        done = cachefs("umount", m.path, check=False)
        assert done.returncode == 1
        said = "in use (an open file, or the directory of a shell); close it, or use --lazy or --force"
        assert done.stderr == f"cachefs: cannot unmount {m.path}: {said}\n"
        assert file.read() == (source / "d0/f00000").read_bytes()
