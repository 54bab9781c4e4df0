"""The source changes externally, and the mount changes names itself, while readers look for wrong bytes.

`--stress-seconds` and `--seed` choose how long, and which sequence; `make stress` runs half an hour of each mode. `make
test` leaves it out until those half hours have passed.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.client.client import Client
from cachefs.errors import CacheFsError
from tests import hostile
from tests.conftest import Mount, cachefs, settle

pytestmark = pytest.mark.full_age  # files are read while they are written

MakeMount = Callable[..., Mount]
READERS = 4
MOST_S = 40
"""A read that fails because the mount was killed fails within it; kill and mount take some seconds of that."""
MODES = {
    "read-only": ("--read-only",),
    "read-write": ("--attr-timeout", "0.5"),
    "mutable": ("--mutable", "**", "--attr-timeout", "0.5"),
}


def command(m: Mount, draw: random.Random) -> str:
    """One of the commands that change the cache, on a random path."""
    client = Client(m.path, timeout_s=30)
    directory = m.path / draw.choice(hostile.directories())
    path = draw.choice([m.path, directory, directory / f"f{draw.randrange(hostile.NAMES):02}"])
    name = draw.choice(["evict", "invalidate", "pin", "unpin", "warm_up", "drop_caches"])
    try:
        if name == "drop_caches":
            m.drop_caches()
        else:
            getattr(client, name)([path])
    except (CacheFsError, OSError):
        return f"{name} refused"
    return name


def kill(m: Mount, draw: random.Random) -> str:
    """SIGKILL one process or both, or restart; the mount serves again afterwards."""
    fastpath = m.status()["fastpath"]
    kind = draw.choice(["fast path", "daemon", "both", "restart"]) if fastpath else "both"
    if kind == "restart":
        cachefs("restart", m.path)
        m.pid = int(m.status()["pid"])
        return kind
    if kind in ("fast path", "both") and fastpath:
        m.killed_fastpaths += 1
        os.kill(fastpath["pid"], 9)
    if kind in ("daemon", "both"):
        m.kill()
        if kind == "both":
            cachefs("umount", m.path, check=False)
        m.start()
    return kind


@pytest.mark.promise("TE-1", "EX-8")
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_readers_get_one_version_of_the_right_file(
    mount: MakeMount, tmp_path: Path, pytestconfig: pytest.Config, random_seed: int, mode: str
) -> None:
    seconds = pytestconfig.getoption("--stress-seconds")
    if not seconds:
        pytest.skip("a stress test: make stress, or --stress-seconds")
    draw = random.Random(random_seed)
    for parent in (tmp_path, *tmp_path.parents):  # the readers are strangers
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    source, logs = tmp_path / "source", tmp_path / "logs"
    source.mkdir()
    logs.mkdir(mode=0o777)
    logs.chmod(0o777)
    changer = hostile.Changer(source, hostile.Log(logs / "source"), random_seed)
    changer.build()
    changer.log.flush()
    settle()
    m = mount(source, *MODES[mode])
    stop = hostile.fork.Event()
    processes = [hostile.start(hostile.change_source, changer, stop, 0.03)]
    changer.log.close()
    if mode != "read-only":
        processes.append(hostile.start(hostile.change_through, m.path, logs / "through", random_seed, stop))
    read_logs = [logs / f"reader{number}" for number in range(READERS)]
    processes += [
        hostile.start(hostile.read_mount, m.path, log, random_seed + i, stop) for i, log in enumerate(read_logs)
    ]
    dead: list[tuple[float, float]] = []
    done: Counter[str] = Counter()
    try:
        until = time.monotonic() + seconds
        next_kill = time.monotonic() + 3
        while time.monotonic() < until:
            done[command(m, draw)] += 1
            if time.monotonic() > next_kill:
                began = time.monotonic()
                kind = kill(m, draw)
                done[f"kill {kind}"] += 1
                if kind == "both":
                    dead.append((began, time.monotonic()))
                next_kill = time.monotonic() + 4
            stop.wait(0.1)
    finally:
        stop.set()
        for process in processes:
            process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(processes)
    # The source is quiet now: from here on a mix of versions is a defect.
    time.sleep(4)
    quiet = time.monotonic()
    for _ in range(3):
        m.drop_caches()
        stop.clear()
        again = [hostile.start(hostile.read_mount, m.path, log, random_seed + 9, stop) for log in read_logs]
        time.sleep(1)
        stop.set()
        for process in again:
            process.join(60)
        m.remount(*MODES[mode])
    changes = hostile.entries([path for path in (logs / "source", logs / "through") if path.exists()])
    reads = hostile.entries(read_logs)
    total = sum(entry["reads"] for entry in reads if entry["kind"] == "total")
    print(f"{mode}: {total:,} reads, {len(changes):,} log entries, {dict(done)}")
    assert total > 10 * seconds
    assert sum(entry["kind"] == "changed" for entry in changes) > seconds
    mutable = mode != "read-only"
    wrong = hostile.judge(changes, reads, mutable=mutable)
    wrong += hostile.judge(changes, [e for e in reads if e.get("began", 0) > quiet], mutable=mutable, window_s=0)
    assert not wrong, wrong[:20]
    failed = [
        entry
        for entry in reads
        if entry["kind"] == "failed"
        and (
            entry["at"] - entry["began"] > MOST_S
            or not any(began - 1 <= entry["at"] and entry["began"] <= ended + 1 for began, ended in dead)
        )
    ]
    assert not failed, failed[:20]
