"""How mounts begin, are taken over and end: H1 to H8 of what outside tests found."""

import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import cachefs as package
from cachefs.client import locations
from cachefs.system import syscalls
from tests.conftest import Mount, cachefs, contents, mounted_on, small_disk, wait_for
from tests.processes import (
    daemon_pid,
    device_of,
    left_behind,
    start,
    stop,
    wait_for_end,
)

MakeMount = Callable[..., Mount]


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
    stop(first.pid)
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
    stop(daemon)
    try:
        command.send_signal(signal.SIGTERM)
        _, said = command.communicate(timeout=30)
        assert command.returncode == 1 and "before the mount was ready" in said and said.count("\n") == 1
        assert not mounted_on(place) and not left_behind(place)
    finally:
        with suppress(ProcessLookupError):
            os.kill(daemon, signal.SIGCONT)
        command.kill()


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


# --- the session of a daemon that died --------------------------------------------------------------------------------


@pytest.mark.promise("LC-31")
def test_the_next_mount_uses_the_session_of_a_killed_daemon_and_removes_it(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--profile", "inference")
    session = locations.session_directory(m.cache)
    expected = contents(m.path)
    m.flush()
    m.kill()
    cachefs("umount", m.path)
    assert not left_behind(m.path) and session.exists()
    m.start()
    assert contents(m.path) == expected
    assert not m.ops().get("read") and m.ops().get("lstat", 0) <= 1  # nothing but the root is compared
    m.umount()
    assert not session.exists()


@pytest.mark.promise("LC-31")
def test_a_mount_whose_cache_was_deleted_removes_the_session_of_a_killed_daemon(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    session = locations.session_directory(m.cache)
    contents(m.path)
    m.kill()
    cachefs("umount", m.path)
    assert session.exists()
    shutil.rmtree(m.cache)
    m.start()
    assert contents(m.path) == contents(source)
    m.umount()
    assert not session.exists()


# --- also ------------------------------------------------------------------------------------------------------------


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


def test_the_log_begins_with_what_is_mounted_and_no_claim_stays(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    assert f"cachefs {package.__version__}: {source} on {m.path}" in m.log().splitlines()[0]
    assert not list(locations.runtime_root().glob(f"lock-*{locations.path_id(str(m.path))}*"))
