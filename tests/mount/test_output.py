"""JSON, full disks, closed pipes and Ctrl-C."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import CLI, REPOSITORY, Mount, cachefs, wait_for
from tests.processes import has_forked, start

MakeMount = Callable[..., Mount]


def test_json_everywhere(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    m = mount(source)
    inside, snapshot = m.path / "d0/f00000", tmp_path / "snapshot"

    def said(*arguments: object) -> dict[str, object]:
        return dict(json.loads(cachefs(*arguments, "--json").stdout))

    assert said("warmup", m.path)["files"] == 41
    assert said("info", inside)["state"] == "immutable"
    assert said("evict", inside) == {"files": 1, "bytes": (source / "d0/f00000").stat().st_size}
    assert said("unpin", inside) == {"files": 1}
    assert said("pin", inside)["is_complete"] is True
    assert said("verify", m.path)["corrupt"] == []
    assert said("snapshot", "export", m.path, snapshot)["bytes"] == snapshot.stat().st_size
    assert said("invalidate", m.path / "d1")["dropped"] == 11
    assert said("gc", "--root", source) == {"caches": [], "deleted": False}
    without = json.loads(cachefs("doctor", m.path, "--json", check=False).stdout)
    assert {"name", "value", "advice"} == set(without[0])


@pytest.mark.parametrize("command", [(), ("mount",), ("config", "check")], ids=" ".join)
def test_help_on_a_full_disk_and_into_a_closed_pipe(command: tuple[str, ...]) -> None:
    ends_badly([*command, "--help"])


def ends_badly(arguments: list[object]) -> None:
    with open("/dev/full", "w") as full:
        done = start(*arguments, stdout=full.fileno())
        _, said = done.communicate(timeout=60)
    assert done.returncode == 1
    assert said.endswith("cachefs: standard output: No space left on device\n"), said
    assert "Traceback" not in said and said.count("standard output") == 1
    reader, writer = os.pipe()
    os.close(reader)
    done = start(*arguments, stdout=writer)
    os.close(writer)
    _, said = done.communicate(timeout=60)
    assert done.returncode != 0 and "roken" not in said and "Traceback" not in said


def test_output_on_a_full_disk_and_into_a_closed_pipe(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    m = mount(source)
    inside = m.path / "d0"
    for line in (
        "status", "status --json", f"status {m.path}", f"status {m.path} --json", f"status {m.path} --watch --json",
        f"info {inside}", f"info {inside} --json", f"warmup {inside}", f"warmup {inside} --json",
        f"warmup {inside} --background", f"warmup --list {m.path}", f"pin {inside}", f"evict {inside}",
        f"invalidate {inside}", f"unpin {inside}", f"verify {m.path}", "gc", f"config show {m.path}", "doctor",
        f"snapshot export {m.path} {tmp_path}/snapshot", "simulate --random 100,5K,2", "--version",
    ):  # fmt: skip
        ends_badly(list(line.split()))


def test_a_closed_pipe_ends_it_as_sigpipe_does(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    watching = start("status", m.path, "--watch", "--json", "--interval", "0.1")
    assert watching.stdout is not None and watching.stderr is not None
    watching.stdout.readline()
    watching.stdout.close()
    assert watching.wait(30) == -signal.SIGPIPE and watching.stderr.read() == ""
    watching.stderr.close()


def sockets(pid: int) -> set[str]:
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has been closed
            found.add(os.readlink(fd))
    return {target for target in found if target.startswith("socket:")}


def has_connected(pid: int, before: set[str]) -> bool:
    """Has this child connected to a daemon? Before exec() it has the sockets that this process had before the fork."""
    return bool(sockets(pid) - before)


def test_ctrl_c_ends_commands_with_130(mount: MakeMount, faulty: tuple[Path, Path]) -> None:
    """As a terminal sends it: a real one, whose interrupt character is typed."""
    source, faults = faulty
    m = mount(source, "--read-only", "--source-timeout", "2m")
    (faults / "hang").write_text("f00001")
    for arguments in (("warmup", m.path), ("warmup", "--wait", m.path)):
        if "--wait" in arguments:
            cachefs("warmup", m.path / "d1", "--background")
        before = sockets(os.getpid())
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(REPOSITORY)
            os.execv(CLI[0], [*CLI, *map(str, arguments)])
        wait_for(partial(has_connected, pid, before), bool)
        os.write(terminal, b"\x03")
        said = b""
        try:
            while piece := os.read(terminal, 1 << 16):
                said += piece
        except OSError:  # the command has ended
            pass
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
        assert os.waitstatus_to_exitcode(status) == 130 and b"Traceback" not in said, (arguments, said)
    (faults / "hang").unlink()


def test_ctrl_c_while_the_program_is_loaded() -> None:
    script = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from daemon.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_ends_a_mount_that_waits_for_its_source(faulty: tuple[Path, Path], tmp_path: Path) -> None:
    source, faults = faulty
    for fault in ("hang", "hang-all"):
        (faults / fault).touch()
    mounting = start("mount", source, tmp_path / "place", "--cache-dir", tmp_path / "cache")
    wait_for(lambda: has_forked(mounting), bool)
    mounting.send_signal(signal.SIGINT)
    _, said = mounting.communicate(timeout=60)
    assert mounting.returncode == 130 and said.count("\n") <= 1 and "Traceback" not in said, said
    assert not (tmp_path / "place").exists()
