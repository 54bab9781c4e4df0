"""Everything at once: jobs that read, list and write, another node that changes the source, warm-ups, evictions,
restarts and kills. `make soak MINUTES=60`; `SOAK_SOURCE=DIRECTORY` has the source made there, on a CephFS for example.

In the last third nobody is killed: memory, descriptors and threads may not grow then.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

from cachefs.client.client import Client
from cachefs.errors import CacheFsError
from cachefs.fastpath.processes import PROGRAM, is_built
from cachefs.source.directories import MAX_KEPT
from cachefs.stats.latency import quantile_s
from tests import hostile
from tests.conftest import Mount, cachefs, make_files, settle, wait_for
from tests.mount.test_space import allocated
from tests.soak import jobs

pytestmark = [pytest.mark.mount, pytest.mark.slow, pytest.mark.alone, pytest.mark.full_age]

MakeMount = Callable[..., Mount]
MIB = 1 << 20
CACHE_BYTES, MARGIN_BYTES = 80 * MIB, 64 * MIB
SHORT_S = 20
JOBS = {"reader": (jobs.read_still, 3), "lister": (jobs.list_still, 1), "writer": (jobs.write_own, 2)}
LONGEST_S, LATE_S = 30.0, 2.0
"""No call may take longer, and no more than one in a thousand longer than the second."""
MOST_THREADS = 200
"""The fast path has 134 when all have been started; the daemon up to 86 for calls to the source, 16 for its disk."""
GAUGES = ("write_behind_bytes", "uncommitted", "source_stuck_calls", "hints_waiting")


class Sample(NamedTuple):
    """Of one process."""

    anonymous: int
    descriptors: int
    """But for those of directories."""
    directories: int
    """Of the source, which are held open: O_PATH."""
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Sample":
        status = Path(f"/proc/{pid}/status").read_text()
        anonymous = int(status.split("RssAnon:")[1].split()[0]) * 1024
        paths = others = 0
        for info in Path(f"/proc/{pid}/fdinfo").iterdir():
            with suppress(OSError):  # closed meanwhile
                is_path = int(info.read_text().split("flags:")[1].split()[0], 8) & os.O_PATH
                paths, others = paths + bool(is_path), others + (not is_path)
        return cls(anonymous, others, paths, int(status.split("Threads:")[1].split()[0]))


def processes(m: Mount) -> list[int]:
    status = m.status()
    return [status["pid"], *([status["fastpath"]["pid"]] if status["fastpath"] else [])]


def is_sanitized() -> bool:
    """A fast path that checks itself keeps what was freed, and notes on the rest."""
    program = PROGRAM.read_bytes() if is_built() else b""
    return b"__asan_init" in program or b"__tsan_init" in program


class Operator:
    """What happens to the mount itself."""

    def __init__(self, m: Mount, draw: random.Random) -> None:
        self.mount, self.draw = m, draw
        self.done: Counter[str] = Counter()

    def command(self) -> None:
        client = Client(self.mount.path, timeout_s=60)
        directory = self.draw.choice(["still/d0", "still/d1", *hostile.directories()])
        name = self.draw.choice(["evict", "invalidate", "warm_up", "drop_caches"])
        try:
            if name == "drop_caches":
                self.mount.drop_caches()
            else:
                getattr(client, name)([self.mount.path / directory])
        except (CacheFsError, OSError):  # a directory that changes its place, or a daemon that is not there yet
            name += " refused"
        self.done[name] += 1

    def kill(self) -> None:
        """One process, or a restart. Nothing may fail for that."""
        name = self.draw.choice(["kill the fast path", "kill the daemon", "restart"])
        if self.mount.no_fastpath:
            return
        if name == "restart":
            cachefs("restart", self.mount.path)
            self.mount.pid = int(self.mount.status()["pid"])
        elif name == "kill the daemon":
            self.mount.kill()
            self.mount.start()
        else:
            (pid,) = processes(self.mount)[1:]
            self.mount.killed_fastpaths += 1
            os.kill(pid, 9)
            wait_for(lambda: processes(self.mount)[1], lambda now: now not in (0, pid))
        self.done[name] += 1


@pytest.mark.promise("TE-1", "TE-2", "LC-2", "LC-3", "LC-4")
def test_soak(mount: MakeMount, tmp_path: Path, pytestconfig: pytest.Config, random_seed: int) -> None:
    seconds = pytestconfig.getoption("--stress-seconds") or SHORT_S
    with TemporaryDirectory(dir=os.environ.get("SOAK_SOURCE") or None, prefix="soak-") as place:
        soak(mount, tmp_path, Path(place), seconds, random_seed)


def soak(make: MakeMount, tmp_path: Path, place: Path, seconds: int, seed: int) -> None:
    for parent in (tmp_path, place, *tmp_path.parents):  # some readers are strangers
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    draw = random.Random(seed)
    source, logs = tmp_path / "source", tmp_path / "logs"
    source.symlink_to(place)
    make_files(place / "still", 1500, (1, 120_000), 6, seed=seed)
    make_files(place / "still" / "large", 3, (8 * MIB, 9 * MIB), 1, seed=seed)
    (place / "own").mkdir()
    logs.mkdir()
    logs.chmod(0o777)
    changer = hostile.Changer(place, hostile.Log(logs / "source"), seed)
    changer.build()
    changer.log.flush()
    settle()
    m = make(place, "--retention", "lru", "--cache-size", CACHE_BYTES, "--attr-timeout", "0.5", "--mutable", "own/**")
    stop, reports = hostile.fork.Event(), hostile.fork.Queue()
    running = [hostile.start(hostile.change_source, changer, stop, 0.05)]
    changer.log.close()
    read_logs = [logs / f"reader{number}" for number in range(2)]
    running += [hostile.start(hostile.read_mount, m.path, log, seed + i, stop) for i, log in enumerate(read_logs)]
    started = 0
    for name, (job, count) in JOBS.items():
        for _ in range(count):
            started += 1
            running.append(hostile.start(jobs.run, job, f"{name}{started}", tmp_path, seed + started, stop, reports))
    operator = Operator(m, draw)
    began = time.monotonic()
    try:
        while time.monotonic() < began + seconds * 2 / 3:
            operator.command()
            if operator.draw.random() < 0.1:
                operator.kill()
            stop.wait(0.2)
        calm = processes(m)
        while time.monotonic() < began + seconds * 5 / 6:
            operator.command()
            stop.wait(0.2)
        before = {pid: Sample.of(pid) for pid in calm}
        while time.monotonic() < began + seconds:
            operator.command()
            stop.wait(0.2)
        after = {pid: Sample.of(pid) for pid in calm}
    finally:
        stop.set()
        told: list[Any] = [reports.get(timeout=120) for _ in range(started)]
        for process in running:
            process.join(60)
    check_reports(told, operator)
    check_growth(before, after)
    wrong = hostile.judge(hostile.entries([logs / "source"]), hostile.entries(read_logs), mutable=False)
    wrong += [str(entry) for entry in hostile.entries(read_logs) if entry["kind"] == "failed"]
    assert wrong == []
    assert processes(m) == calm
    wait_for(m.status, lambda status: all(status[gauge] == 0 for gauge in GAUGES), 60)
    wait_for(lambda: allocated(m.cache), lambda taken: taken <= CACHE_BYTES + MARGIN_BYTES)


def check_reports(told: list[Any], operator: Operator) -> None:
    for report in told:
        print(f"{report.name}: {report.calls:,} calls, {report.doubts} in doubt, p99.9 "
              f"{quantile_s(report.histogram, 0.999) * 1000:.1f} ms, longest {report.longest_s:.2f} s")  # fmt: skip
    print(dict(operator.done))
    assert [report.wrong for report in told if report.wrong] == []
    assert all(report.calls > 0 for report in told)
    assert max(report.longest_s for report in told) <= LONGEST_S
    kills = sum(count for name, count in operator.done.items() if name.startswith(("kill", "restart")))
    assert all(report.doubts <= kills for report in told)
    for report in told:
        if report.calls >= 10_000:
            assert quantile_s(report.histogram, 0.999) <= LATE_S, report.name


def check_growth(before: dict[int, Sample], after: dict[int, Sample]) -> None:
    print(f"{before} before, {after} at the end")
    for pid, then in before.items():
        now = after[pid]
        assert now.anonymous <= 1.25 * then.anonymous + 16 * MIB or is_sanitized()
        assert now.descriptors <= then.descriptors + 30  # some dozens are open at any moment
        assert now.directories <= MAX_KEPT + 30
        assert now.threads <= MOST_THREADS
