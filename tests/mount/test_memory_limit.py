"""Mounts in control groups that limit memory, and starts whose daemon is killed."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from cachefs.client import mount_table
from daemon.service import memory
from tests.conftest import Mount, contents, mounted_on, wait_for
from tests.mount.test_faults import Group, group
from tests.processes import left_behind, start

MakeMount = Callable[..., Mount]


def limited(limit: Group, *arguments: object) -> tuple[int, str]:
    """The exit status and the errors of a command in a control group."""
    own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    back = Path("/sys/fs/cgroup/memory") / own.split(":", 2)[2].lstrip("/") / "cgroup.procs"
    limit.take([os.getpid()])
    try:
        command = start(*arguments)
    finally:
        back.write_text(str(os.getpid()))
    said = command.communicate(timeout=60)[1]
    return command.returncode, said


@pytest.mark.promise("LC-32")
@pytest.mark.parametrize("where", ["own", "parent"])
def test_a_mount_with_too_little_memory_is_refused_in_one_line(source: Path, tmp_path: Path, where: str) -> None:
    place = tmp_path / "mnt"
    with group("memory", tmp_path) as limit:
        limit["memory.limit_in_bytes"] = memory.LEAST_BYTES - (8 << 20)
        with group(f"memory/{limit.path.name}", tmp_path) as inner:
            given = limit if where == "own" else inner
            code, said = limited(given, "mount", source, place, "--cache-dir", tmp_path / "cache")
    assert code == 1 and said.count("\n") == 1, said
    assert "is 120 MiB" in said and "needs 128 MiB" in said and "memory.limit_in_bytes" in said
    assert not mounted_on(place) and not left_behind(place)


@pytest.mark.promise("LC-32")
def test_the_least_memory_suffices_for_a_mount(source: Path, tmp_path: Path, mount: MakeMount) -> None:
    place = tmp_path / "mnt"
    with group("memory", tmp_path) as limit:
        limit["memory.limit_in_bytes"] = memory.LEAST_BYTES
        code, said = limited(limit, "mount", source, place, "--cache-dir", tmp_path / "cache", "--read-only")
        assert code == 0, said
        try:
            assert contents(place) == contents(source)
        finally:
            start("umount", place).communicate(timeout=60)


@pytest.mark.promise("LC-32")
@pytest.mark.fastpath
def test_a_restart_with_too_little_memory_changes_nothing(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    m = mount(source)
    with group("memory", tmp_path) as limit:
        limit["memory.limit_in_bytes"] = memory.LEAST_BYTES - (8 << 20)
        code, said = limited(limit, "restart", m.path)
    assert code == 1 and "needs 128 MiB" in said and said.count("\n") == 1, said
    assert m.status()["pid"] == m.pid


@pytest.mark.promise("LC-32")
@pytest.mark.parametrize("limits", [("max", "100000000"), ("100000000", "max"), ("200000000", "100000000")])
def test_limits_of_version_2_are_found_in_the_group_and_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[str, str]
) -> None:
    groups = tmp_path / "groups"
    (groups / "outer/inner").mkdir(parents=True)
    for directory, limit in zip(("outer", "outer/inner"), limits, strict=True):
        (groups / directory / "memory.max").write_text(f"{limit}\n")
    own = tmp_path / "own"
    own.write_text("0::/outer/inner\n")
    hierarchy = mount_table.Mount(1, 0, "0:1", "/", str(groups), "cgroup2", "cgroup2", "rw", 0)
    monkeypatch.setattr(memory, "_OWN_GROUPS", own)
    monkeypatch.setattr(mount_table, "mounts", lambda: [hierarchy])
    short = memory.shortage()
    assert short is not None and "is 95 MiB" in short and "memory.max" in short


def test_no_limit_is_no_shortage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.write_text("0::/\n")
    monkeypatch.setattr(memory, "_OWN_GROUPS", own)
    assert memory.shortage() is None


@pytest.mark.promise("LC-33")
def test_a_daemon_that_is_killed_before_its_mount_is_ready_leaves_nothing_mounted(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "mnt"
    command = start("mount", source, place, "--cache-dir", tmp_path / "cache", "--simulate-latency", "60000")
    wait_for(lambda: mounted_on(place), bool)
    (daemon,) = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    os.kill(int(daemon), signal.SIGKILL)
    _, said = command.communicate(timeout=30)
    try:
        assert command.returncode == 1 and said.count("\n") == 1 and "was killed" in said, said
        assert not mounted_on(place) and not left_behind(place)
    finally:
        if mounted_on(place):
            start("umount", place).communicate(timeout=60)


@pytest.mark.promise("LC-33")
def test_a_mount_lives_though_its_command_was_killed(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "mnt"
    command = start("mount", source, place, "--cache-dir", tmp_path / "cache", "--simulate-latency", "300")
    wait_for(lambda: mounted_on(place), bool)
    with suppress(ProcessLookupError):
        os.kill(command.pid, signal.SIGKILL)
    command.communicate(timeout=30)
    try:
        assert (place / "d0/f00000").read_bytes() == (source / "d0/f00000").read_bytes()
    finally:
        start("umount", place).communicate(timeout=60)
    assert not left_behind(place)
