"""Mounts that are unmounted or aborted, also while a successor starts, and mounts in more than one place."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cachefs.client import mount_table
from cachefs.errors import CacheFsError
from cachefs.fastpath.mount_descriptors import is_unmounted
from cachefs.system import syscalls
from daemon.cli import main
from daemon.cli.main import unmount_and_wait
from daemon.kernel import fuse_device, instance
from tests.conftest import REPOSITORY, Mount, cachefs, contents, mounted_on, wait_for
from tests.processes import (
    connections,
    device_of,
    fastpath_pid,
    has_forked,
    left_behind,
    start,
    stop,
    wait_for_end,
)

MakeMount = Callable[..., Mount]


# --- the mount goes away ---------------------------------------------------------------------------------------------


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
def test_a_mount_that_another_process_unmounts_meanwhile_is_unmounted(
    mount: MakeMount, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = mount(source)

    def ended(place: str, **_: bool) -> int:
        syscalls.umount2(place, 0)
        wait_for_end(m.pid)
        raise CacheFsError("the daemon does not answer")

    monkeypatch.setattr(main, "_pid_of_daemon", ended)
    unmount_and_wait(str(m.path))
    m.pid = 0
    assert not mounted_on(m.path) and not left_behind(m.path)


@pytest.mark.promise("LC-19")
@pytest.mark.usefixtures("fusectl")
@pytest.mark.parametrize("known", [True, False])
def test_an_abort_spares_the_mount_that_has_the_device_number_now(tmp_path: Path, known: bool) -> None:
    """The mount ends, and another gets its device number, just before the abort. `known`: the caller may notice."""
    place = tmp_path / "place"
    place.mkdir()

    def mounted() -> tuple[int, instance.MountInstance]:
        device = fuse_device.mount("test", str(place), read_only=False, allow_other=False)
        there = instance.MountInstance.on_top(str(place))
        assert there is not None
        return device, there

    def end(device: int) -> None:
        syscalls.umount2(str(place), syscalls.MNT_DETACH)
        os.close(device)

    for _ in range(1000):  # mounts of other tests may take the number
        first, there = mounted()
        second, other = -1, there

        def replaced(first: int = first) -> bool:
            nonlocal second, other
            end(first)
            second, other = mounted()
            return known

        there.abort(replaced)
        assert not is_unmounted(second)
        end(second)
        if other.device == there.device:
            break
    assert other.device == there.device

    device, there = mounted()
    there.abort(lambda: is_unmounted(device))
    assert is_unmounted(device)
    end(device)


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
        stop(fastpath)
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
    stop(fastpath)
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


# --- in use ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("LC-15")
def test_a_mount_in_use_is_not_unmounted(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    with open(m.path / "d0/f00000", "rb") as file:
        done = cachefs("umount", m.path, check=False)
        assert done.returncode == 1
        said = "in use (an open file, or the directory of a shell); close it, or use --lazy or --force"
        assert done.stderr == f"cachefs: cannot unmount {m.path}: {said}\n"
        assert file.read() == (source / "d0/f00000").read_bytes()
