"""Either side may die: SIGKILL of the fast path, of the daemon, of both in turn, in the middle of an epoch."""

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from cachefs.client.client import Client
from cachefs.contract.shared import SLOT_BYTES
from cachefs.errors import CacheFsError
from cachefs.fastpath import processes
from tests.conftest import Mount, cachefs, contents, make_files, settle, wait_for
from tests.load import KILLS, Load, fork, sums_of
from tests.processes import fastpath_pid, kill_fastpath, stop
from tests.service_manager import ServiceManager

MakeMount = Callable[..., Mount]

pytestmark = pytest.mark.fastpath


def kill_daemon(m: Mount) -> None:
    m.kill()
    m.start()


@pytest.mark.promise("LC-2", "FA-25")
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("read_only", [True, False], ids=["read-only", "read-write"])
@pytest.mark.parametrize("victim", ["fast path", "daemon", "in turn"])
def test_twenty_kills_in_mid_epoch(
    mount: MakeMount, tmp_path: Path, victim: str, read_only: bool, record_property: Callable[[str, object], None]
) -> None:
    source = tmp_path / "dataset"
    make_files(source, 2000, (1, 60_000), directories=8)
    (source / "out").mkdir()
    settle()
    sums = sums_of(source)
    m = mount(source, *(["--read-only"] if read_only else []))
    load = Load(m.path, sums, None if read_only else m.path / "out")
    draw = random.Random(victim)
    for number in range(KILLS):
        time.sleep(draw.uniform(0.0, 0.2))
        if number % 5 == 0:
            m.drop_caches()
        if victim == "fast path" or (victim == "in turn" and number % 2):
            kill_fastpath(m)
        else:
            kill_daemon(m)
    longest = load.finish()
    record_property("longest_stall_s", round(longest, 3))
    print(f"{KILLS} kills, {victim}: longest stall {longest:.3f} s")
    m.drop_caches()
    assert sums_of(m.path).items() >= sums.items()
    assert m.status()["errors"] == 0


@pytest.mark.promise("FA-26")
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_both_killed_at_once_with_a_descriptor_store(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = tmp_path / "dataset"
    make_files(source, 500, (1, 60_000), directories=8)
    settle()
    sums = sums_of(source)
    place = tmp_path / "mnt"
    place.mkdir()
    command = ["mount", source, place, "--cache-dir", tmp_path / "cache", "--read-only", "--foreground"]
    command += Mount.given()
    manager = ServiceManager(tmp_path, command)
    request.addfinalizer(manager.close)

    def status() -> dict[str, Any]:
        try:
            return Client(place).status()
        except CacheFsError:
            return {}

    manager.start()
    wait_for(status, bool)
    load = Load(place, sums, None)
    draw = random.Random(5)
    for _ in range(KILLS):
        time.sleep(draw.uniform(0.0, 0.3))
        now = wait_for(status, bool)
        manager.collect()
        pids = (now["pid"], now["fastpath"]["pid"])
        for pid in draw.sample(pids, 2):
            os.kill(pid, signal.SIGKILL)
        assert manager.process is not None
        manager.process.wait(20)
        manager.start()
    wait_for(status, bool)
    longest = load.finish()
    print(f"{KILLS} kills of both at once: longest stall {longest:.3f} s")
    assert sums_of(place) == {path: sums[path] for path in sums}
    cachefs("umount", place)
    assert manager.process is not None and manager.process.wait(20) == 0


@pytest.mark.promise("LC-4")
@pytest.mark.slow
def test_a_restart_replaces_both_and_nobody_notices(mount: MakeMount, tmp_path: Path) -> None:
    source = tmp_path / "dataset"
    make_files(source, 1000, (1, 60_000), directories=8)
    (source / "out").mkdir()
    settle()
    sums = sums_of(source)
    m = mount(source, "--mutable", "*.log", "--attr-timeout", "3")
    load = Load(m.path, sums, m.path / "out", doubts=0)
    seen = set()
    for _ in range(6):
        before = m.status()
        cachefs("restart", m.path)
        after = m.status()
        m.pid = after["pid"]
        assert not processes.is_running(before["pid"])
        seen |= {after["pid"], after["fastpath"]["pid"]}
    longest = load.finish()
    print(f"6 restarts: longest stall {longest:.3f} s")
    assert len(seen) == 12
    assert "while it changed inodes" not in m.log()
    m.kill()
    cachefs("restart", m.path)  # one whose daemon has died as well
    m.pid = m.status()["pid"]
    assert sums_of(m.path).items() >= sums.items()


@pytest.mark.alone
def test_after_an_upgrade_the_fast_path_is_replaced_with_its_daemon(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    expected = contents(m.path)
    before = fastpath_pid(m)
    m.kill()
    m.start()
    assert fastpath_pid(m) == before
    copy = processes.PROGRAM.with_suffix(".new")
    shutil.copy2(processes.PROGRAM, copy)
    os.replace(copy, processes.PROGRAM)
    m.kill()
    m.start()
    assert fastpath_pid(m) != before and not processes.is_running(before)
    assert contents(m.path) == expected


def test_a_restart_that_cannot_be(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    m = mount(source, "--no-fastpath")
    expected = contents(m.path)
    refused = cachefs("restart", m.path, check=False)
    assert refused.returncode == 1 and "without the fast path" in refused.stderr
    assert contents(m.path) == expected
    refused = cachefs("restart", tmp_path, check=False)
    assert refused.returncode == 1 and "no cachefs is mounted" in refused.stderr


@pytest.mark.promise("FA-22", "FA-23")
def test_hits_go_on_without_a_daemon(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    expected = contents(m.path)
    m.flush()
    m.kill()
    m.drop_caches()
    started = time.monotonic()
    assert contents(m.path) == expected
    assert time.monotonic() - started < 5
    m.start()
    m.drop_caches()
    assert contents(m.path) == expected


@pytest.mark.promise("FA-23")
def test_misses_wait_for_the_next_daemon_and_then_give_up(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only", "--reconnect-timeout", "1")
    os.listdir(m.path)
    m.kill()
    started = time.monotonic()
    with pytest.raises(OSError, match="Input/output"):
        os.listdir(m.path / "d1")  # never listed before: that is Python's
    assert 0.5 < time.monotonic() - started < 20
    m.start()
    assert sorted(os.listdir(m.path / "d1")) == sorted(os.listdir(source / "d1"))


@pytest.mark.promise("FA-22")
def test_a_takeover_wants_the_same_options(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    m.kill()
    for other in (m.given(), [*m.arguments, "--minimum-age", "0.5"], [*m.arguments, "--minimum-age", "2"]):
        refused = cachefs("mount", source, m.path, "--cache-dir", m.cache, *other, check=False)
        assert refused.returncode == 1 and "other options" in refused.stderr
    m.start()


def write_twice(path: Path, written: Event, go_on: Event) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(b"one ")
        written.set()
        go_on.wait(60)
        file.write(b"two")
        os.fsync(file.fileno())


@pytest.mark.promise("FA-24")
def test_a_writer_survives_its_daemon(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    written, go_on = fork.Event(), fork.Event()
    # Another process: a process that has a file open for writing, forks and closes it, waits for the next daemon.
    writer = fork.Process(target=write_twice, args=(m.path / "checkpoint", written, go_on))
    writer.start()
    assert written.wait(20)
    m.kill()
    m.start()
    go_on.set()
    writer.join(20)
    assert writer.exitcode == 0
    assert (source / "checkpoint").read_bytes() == b"one two"
    assert (m.path / "checkpoint").read_bytes() == b"one two"


def test_an_open_file_that_lost_its_name_is_read_to_its_end(mount: MakeMount, source: Path) -> None:
    """Hazard 2: the fast path opened the file, Python never saw a handle."""
    (source / "big").write_bytes(bytes(range(256)) * 40_000)
    settle()
    m = mount(source)
    expected = (source / "big").read_bytes()
    os.stat(m.path / "big")
    (m.path / "big").open("rb").close()  # immutable from here on: the next open is the fast path's
    fd = os.open(m.path / "big", os.O_RDONLY)
    os.unlink(m.path / "big")
    m.drop_caches()
    parts = [os.pread(fd, 1 << 20, at) for at in range(0, len(expected), 1 << 20)]
    os.close(fd)
    assert b"".join(parts) == expected


def test_a_kill_finds_no_page_fault_under_a_request(mount: MakeMount, source: Path) -> None:
    """The kernel answers EIO to what it was copying when a SIGKILL met a page that was not there yet: seen with WRITE,
    ten times in 2,000 kills."""
    m = mount(source)
    os.stat(m.path)
    mapping = Path(f"/proc/{fastpath_pid(m)}/smaps").read_text().partition("memfd:cachefs")[2]
    resident = re.search(r"^Rss:\s+(\d+) kB", mapping, re.MULTILINE)
    assert resident and int(resident[1]) * 1024 >= SLOT_BYTES


@pytest.mark.promise("IM-2")
def test_a_first_open_does_not_wait_for_python_and_a_later_writer_is_refused(mount: MakeMount, tmp_path: Path) -> None:
    source = tmp_path / "source"
    names = make_files(source, 40, (1000, 50_000), directories=1)
    settle()
    m = mount(source)
    outcomes: list[object] = []

    def write(path: Path) -> None:
        try:
            outcomes.append(os.open(path, os.O_WRONLY))
        except OSError as error:
            outcomes.append(error.errno)

    for name in names:  # until one was looked up and opened within the second for which a look-up is valid
        path = m.path / name
        os.stat(path)
        stop(m.pid)
        since = time.monotonic()
        opened = subprocess.Popen(["cat", path], stdout=subprocess.PIPE)
        try:
            out, _ = opened.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            out = None
        elapsed = time.monotonic() - since
        writer = threading.Thread(target=write, args=(path,))
        if out is not None:
            writer.start()
            writer.join(0.2)
            assert writer.is_alive() and not outcomes  # Python decides this, and it received the reader's OPEN first
        os.kill(m.pid, signal.SIGCONT)
        if out is not None:
            writer.join()
            break
        opened.communicate()
        assert elapsed > 5
    else:
        raise AssertionError("no first open was answered without the daemon")
    assert out == (source / name).read_bytes()
    assert outcomes == [errno.EPERM]
    m.flush()
    m.drop_caches()
    before = m.ops()
    assert (m.path / name).read_bytes() == out
    assert m.ops() == before  # what was read was cached


def guesses(m: Mount) -> tuple[int, int]:
    fastpath = m.status()["fastpath"]
    return fastpath["guesses"], fastpath["guessed"]


def test_a_lone_reader_finds_its_bytes_read_and_who_only_looks_costs_one_read(mount: MakeMount, tmp_path: Path) -> None:
    source = tmp_path / "many"
    make_files(source, 400, (1, 100_000), directories=4)
    settle()
    m = mount(source, "--read-only")
    expected = contents(source)
    assert contents(m.path) == expected
    m.flush()
    names = sorted(expected)
    before = m.status()["hits"]
    m.drop_caches()
    for name in names:  # look-up, read, look-up, read
        assert (m.path / name).read_bytes() == expected[name]
    reads, used = guesses(m)
    assert m.status()["hits"] - before == len(names)
    assert used > len(names) // 2 and used <= reads <= len(names)
    m.drop_caches()
    for name in names:
        os.stat(m.path / name)
    assert guesses(m)[0] <= reads + 1


def test_what_was_read_ahead_is_not_served_for_another_version(mount: MakeMount, tmp_path: Path) -> None:
    source = tmp_path / "many"
    make_files(source, 40, (1000, 50_000))
    settle()
    m = mount(source)
    names = sorted(contents(source))
    assert contents(m.path) == contents(source)
    m.flush()
    m.drop_caches()
    for name in names[:20]:
        (m.path / name).read_bytes()
    os.stat(m.path / names[20])  # and its bytes are read speculatively
    (source / names[20]).write_bytes(b"another version")
    settle()
    cachefs("invalidate", m.path / names[20])
    assert (m.path / names[20]).read_bytes() == b"another version"


def test_the_daemon_runs_no_python_for_a_hit(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    expected = contents(m.path)
    m.flush()
    m.drop_caches()
    before = m.status()["fastpath"]
    assert contents(m.path) == expected
    after = m.status()["fastpath"]
    assert after["passed"] == before["passed"]
    assert after["answered"] - before["answered"] >= 40


def test_fast_path_memory_does_not_grow_with_the_index(mount: MakeMount, tmp_path: Path) -> None:
    source = tmp_path / "many"
    make_files(source, 3000, (1, 2000), directories=10)
    settle()
    m = mount(source, "--read-only")
    contents(m.path)
    m.flush()
    m.drop_caches()
    contents(m.path)
    status = Path(f"/proc/{fastpath_pid(m)}/status").read_text()
    anonymous = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
    assert anonymous < 32 << 10
