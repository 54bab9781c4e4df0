"""No behaviour of one user delays another user: shares by uid (hazards 30, 31 and 33)."""

import errno
import fcntl
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import conftest
from tests.conftest import Mount, cachefs, children, contents, make_files, raises_errno, settle, wait_for
from tests.crowds import (
    GREEDY,
    OTHER,
    PROMPT_S,
    Crowd,
    Waiting,
    directory,
    prompt,
    read_all,
    read_at,
)
from tests.processes import stop
from tests.users import MAY_NOT_RAISE_LIMITS

fork = multiprocessing.get_context("fork")
MakeMount = Callable[..., Mount]
pytestmark = pytest.mark.alone


def cpu_s(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def pids_of(m: Mount) -> list[int]:
    fastpath = m.status().get("fastpath")
    return [m.pid] + ([int(fastpath["pid"])] if fastpath else [])


def ask_for_attributes(path: Path, count: int) -> None:
    fd = os.open(path, os.O_RDONLY)
    Crowd(GREEDY, [partial(os.getxattr, fd, f"user.missing-{number}") for number in range(count)]).join(120)


@pytest.mark.promise("FA-2")
def test_b6_a_crowd_that_waits_for_the_source_delays_no_hit_and_no_miss_of_another_user(
    mount: MakeMount, source: Path, waiting: Waiting
) -> None:
    """Regression: the crowd had all slots, and another user's hit waited for hundreds of answers of the source.

    It asks for attributes: the kernel sends several such requests at a time, also without a fast path.
    """
    m = mount(source, "--read-only")
    expected = contents(m.path)
    m.flush()
    m.remount("--read-only", "--revalidate", "never", "--simulate-latency", "2000", "--source-timeout", "8")
    count = 1300 if Mount.no_fastpath else 2300
    crowd = fork.Process(target=ask_for_attributes, args=(m.path / "d3/f00003", count))
    crowd.start()
    assert crowd.pid
    try:
        wait_for(lambda: waiting(m), lambda now: now > count - 100)
        for path, content in list(expected.items())[:15]:
            with prompt():
                assert (m.path / path).read_bytes() == content
        with prompt(2 + PROMPT_S):
            assert not (m.path / "d1/missing").exists()
        assert waiting(m) > count // 2  # the crowd was there all the time
    finally:
        os.kill(crowd.pid, signal.SIGKILL)
        crowd.join(30)
    assert crowd.exitcode == -signal.SIGKILL
    with prompt(2 + PROMPT_S):
        assert not (m.path / "d1/missing-too").exists()


@pytest.mark.promise("FA-5")
@pytest.mark.fastpath
def test_b6_requests_beyond_a_share_survive_the_fast_path(mount: MakeMount, source: Path, waiting: Waiting) -> None:
    m = mount(source, "--read-only", "--simulate-latency", "500", "--source-timeout", "4")
    os.stat(m.path / "d3")
    with directory(m.path / "d3") as fd:
        crowd = Crowd(GREEDY, [lambda n=n: os.stat(f"missing-{n}", dir_fd=fd) for n in range(1700)])  # type: ignore[misc]
        wait_for(lambda: waiting(m), lambda count: count > 1600)
        for _ in range(2):
            pid = int(m.status()["fastpath"]["pid"])
            os.kill(pid, signal.SIGKILL)
            m.killed_fastpaths += 1
            with prompt(5):
                assert (m.path / "d0/f00000").read_bytes() == (source / "d0/f00000").read_bytes()
            wait_for(lambda: m.status()["fastpath"]["pid"], lambda now, pid=pid: now not in (0, pid))
        answers = crowd.join(40)
    assert set(answers) <= {errno.ENOENT, errno.ETIMEDOUT} and errno.ENOENT in answers
    assert waiting(m) == 0


@pytest.mark.promise("LC-1")
@pytest.mark.fastpath
def test_b6_a_crowd_that_is_killed_dies_also_beyond_its_share(
    mount: MakeMount, source: Path, faulty: tuple[Path, Path], waiting: Waiting
) -> None:
    served, faults = faulty
    m = mount(served, "--read-only", "--source-timeout", "18")
    (m.path / "d0/f00000").read_bytes()
    m.flush()
    (faults / "hang").touch()
    process = fork.Process(target=ask_for_attributes, args=(m.path / "d0/f00000", 1700))
    process.start()
    wait_for(lambda: waiting(m), lambda count: count > 1600)
    assert process.pid
    os.kill(process.pid, signal.SIGKILL)
    process.join(12)
    assert process.exitcode == -signal.SIGKILL
    wait_for(lambda: waiting(m), lambda count: count == 0)
    (faults / "hang").unlink()
    assert (m.path / "d0/f00000").read_bytes() == (source / "d0/f00000").read_bytes()


@pytest.mark.promise("FA-6")
def test_b7_leased_files_cost_no_time_of_the_processor_and_no_places(
    mount: MakeMount, tmp_path: Path, waiting: Waiting
) -> None:
    """Regression: both processes retried as fast as they could, each call in its slot."""
    source = tmp_path / "source"
    files = make_files(source, 110, directories=1)
    expected = {path: (source / path).read_bytes() for path in files}
    settle()
    m = mount(source, "--read-only", "--source-timeout", "20")
    os.listdir(m.path / "d0")
    leased, free = files[:90], files[90:]
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # tells the holder that another process wants the file
    holders = [os.open(source / path, os.O_RDWR) for path in leased]
    try:
        for holder in holders:
            fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with directory(m.path) as fd:
            crowd = Crowd(GREEDY, [lambda path=path: read_at(fd, str(path)) for path in leased])  # type: ignore[misc]
            wait_for(lambda: waiting(m), lambda count: count >= 90)
            pids, began, used = pids_of(m), time.monotonic(), 0.0
            used = cpu_s(pids)
            for path in free:
                with prompt():
                    assert (m.path / path).read_bytes() == expected[path]
            time.sleep(max(0.0, began + 2 - time.monotonic()))  # measure the CPU time used meanwhile
            assert cpu_s(pids) - used < 0.5 * (time.monotonic() - began)
            for holder in holders:
                fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            answers = crowd.join()
        assert sorted(answers, key=repr) == sorted((expected[path] for path in leased), key=repr)
    finally:
        for holder in holders:
            os.close(holder)
        signal.signal(signal.SIGIO, before)


@pytest.mark.promise("FA-4")
@pytest.mark.parametrize("users", [1, 2, 8])
@pytest.mark.parametrize("arguments", [[], ["--read-only"], ["--mutable", "greedy*"]], ids=["", "read-only", "mutable"])
def test_b7_users_who_read_leased_files_keep_no_other_user_waiting_however_many_they_are(
    mount: MakeMount, tmp_path: Path, waiting: Waiting, users: int, arguments: list[str]
) -> None:
    """Regression: READs that the fast path could not answer went to Python beyond their owner's share, until none did.

    And four users within their shares left nothing for a fifth.
    """
    source = tmp_path / "source"
    free = make_files(source, 40, directories=1)
    leased = [(GREEDY + number % users, f"greedy{number}") for number in range(240)]
    for uid, name in leased:
        (source / name).write_bytes(b"leased")
        os.chown(source / name, uid, uid)  # the kernel asks for no ACL of an owner's file
    settle()
    m = mount(source, "--attr-timeout", "600", "--source-timeout", "30", *arguments)
    for _, name in leased:
        os.stat(m.path / name)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    holders = [os.open(source / name, os.O_RDWR) for _, name in leased]
    try:
        for holder in holders:
            fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with directory(m.path) as fd:
            for path in free[:20]:
                assert Crowd(OTHER, [partial(read_at, fd, str(path))]).join() == [(source / path).read_bytes()]
            crowds = [
                Crowd(uid, [partial(read_at, fd, name) for owner, name in leased if owner == uid])
                for uid in range(GREEDY, GREEDY + users)
            ]
            wait_for(lambda: waiting(m), lambda count: count >= len(leased))
            m.drop_caches()
            for path in free:
                with prompt():
                    answers = Crowd(OTHER, [partial(read_at, fd, str(path))]).join()
                assert answers == [(source / path).read_bytes()]
            for number in range(5):
                with prompt():
                    answers = Crowd(OTHER, [partial(os.stat, f"missing{number}", dir_fd=fd)]).join()
                assert answers == [errno.ENOENT]
            assert waiting(m) >= len(leased)  # the crowds were there all the time
            for holder in holders:
                fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            assert [answer for crowd in crowds for answer in crowd.join()] == [b"leased"] * len(leased)
    finally:
        for holder in holders:
            os.close(holder)
        signal.signal(signal.SIGIO, before)


@pytest.mark.promise("FA-3")
@pytest.mark.usefixtures("interpreters")
def test_c7_who_opens_very_many_files_leaves_descriptors_for_others(
    mount: MakeMount, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the daemon ran out of descriptors, and every other user's open failed with EMFILE."""
    limit = 800
    monkeypatch.setattr(conftest, "CLI", ["prlimit", f"--nofile={limit}:{limit}", *MAY_NOT_RAISE_LIMITS, *conftest.CLI])
    (source / "open").mkdir()
    (source / "open").chmod(0o777)
    m = mount(source, "--attr-timeout", "0")
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > limit  # of this process
    with directory(m.path / "open") as fd:
        opened: list[int] = []

        def open_many() -> object:
            for number in range(limit):
                opened.append(os.open(f"mine-{number}", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
            return len(opened)

        def one_more() -> None:
            os.close(os.open("again", os.O_WRONLY | os.O_CREAT, dir_fd=fd))

        def check_others() -> None:
            calls: list[Callable[[], object]] = [
                lambda n=n: os.close(os.open(f"other-{n}", os.O_WRONLY | os.O_CREAT, dir_fd=fd))  # type: ignore[misc]
                for n in range(20)
            ]
            answers = [*Crowd(OTHER, calls).join(), *Crowd(OTHER, [lambda: read_at(fd, "../d0/f00000")]).join()]
            assert answers == [None] * 20 + [(source / "d0/f00000").read_bytes()]

        try:
            assert Crowd(GREEDY, [open_many]).join() == [errno.EMFILE]
            assert limit // 4 < len(opened) < limit * 3 // 4
            check_others()
            if not m.no_fastpath:
                cachefs("restart", m.path)  # the next daemon knows who has them
                assert Crowd(GREEDY, [one_more]).join() == [errno.EMFILE]
                check_others()
            assert [os.write(each, b"all") for each in opened] == [3] * len(opened)
        finally:
            for each in opened:
                os.close(each)

        def opens_again() -> bool:
            """Closed descriptors are given back a moment later: the kernel sends RELEASE without waiting."""
            return Crowd(GREEDY, [one_more]).join() == [None]

        wait_for(opens_again, bool)


@pytest.mark.promise("FA-2")
@pytest.mark.parametrize("operation", ["lookup", "read"])
def test_b5_calls_that_hang_block_only_whoever_made_them(
    mount: MakeMount, source: Path, faulty: tuple[Path, Path], waiting: Waiting, operation: str
) -> None:
    """Regression: 64 such calls held every slot, and every miss of every user failed."""
    served, faults = faulty
    for number in range(150):  # without a fast path the kernel makes one look-up of a directory at a time
        (source / f"d3/{number}").mkdir()
        (source / f"d3/{number}/hangs").write_bytes(b"1")
    settle()
    m = mount(served, "--read-only", "--source-timeout", "8")
    os.listdir(m.path / "d0")
    for number in range(150):
        path = m.path / f"d3/{number}" / ("hangs" if operation == "read" else "")
        raises_errno(errno.ENODATA, partial(os.getxattr, path, "system.posix_acl_access"))  # the kernel would ask first
    (faults / "hang").write_text("hangs")
    with directory(m.path / "d3") as fd:
        crowd = Crowd(GREEDY, [lambda n=n: read_at(fd, f"{n}/hangs") for n in range(150)])  # type: ignore[misc]
        wait_for(lambda: waiting(m), lambda count: count >= 60)
        for name in sorted(os.listdir(source / "d0"))[:5]:
            with prompt():
                assert (m.path / "d0" / name).read_bytes() == (source / "d0" / name).read_bytes()
        with prompt():
            assert not (m.path / "d1/missing").exists()
        assert len(crowd.results) < 150
        (faults / "hang").unlink()
        crowd.join()


@pytest.mark.fastpath
def test_c3_a_fast_path_that_is_killed_while_a_miss_hangs_serves_hits_at_once(
    mount: MakeMount, faulty: tuple[Path, Path], waiting: Waiting
) -> None:
    """Regression: its successor finished the miss first, on its main thread, and served nothing meanwhile."""
    source, faults = faulty
    m = mount(source, "--read-only", "--source-timeout", "25")
    cached = {path: path.read_bytes() for path in sorted((m.path / "d0").iterdir())}
    missing = sorted((m.path / "d1").iterdir())
    m.flush()
    (faults / "hang").write_text("d1/")
    with directory(m.path / "d1") as fd:
        crowd = Crowd(0, [lambda path=path: read_at(fd, path.name) for path in missing])  # type: ignore[misc]
        wait_for(lambda: waiting(m), lambda count: count >= len(missing))
        for _ in range(3):
            pid = int(m.status()["fastpath"]["pid"])
            os.kill(pid, signal.SIGKILL)
            m.killed_fastpaths += 1
            m.drop_caches()
            assert Crowd(0, [partial(read_all, list(cached))]).join(5) == [cached]
            wait_for(lambda: m.status()["fastpath"]["pid"], lambda now, pid=pid: now not in (0, pid))
        assert not crowd.results
        (faults / "hang").unlink()
        answers: list[Any] = crowd.join()
    assert sorted(answers) == sorted(os.fsencode(b) for b in ((source / "d1" / p.name).read_bytes() for p in missing))


def stop_the_next_child(pid: int, before: set[int]) -> int:
    """Stop the process that `pid` starts next, before that has done anything."""
    deadline = time.monotonic() + 30
    while not (found := children(pid) - before):
        assert time.monotonic() < deadline
    child = found.pop()
    stop(child)
    return child


@pytest.mark.parametrize("first", ["daemon", "fast path", "fast path, and another that has not attached"])
def test_c9_without_either_process_nobody_waits_longer_than_for_the_next_daemon(
    mount: MakeMount, source: Path, waiting: Waiting, first: str
) -> None:
    """Regression: a fast path whose daemon died before attaching kept the daemon's descriptors for ever.

    `first`: what dies first.
    """
    reconnect_s = 3.0
    m = mount(source, "--reconnect-timeout", str(int(reconnect_s)))
    assert len(os.listdir(m.path / "d0")) == 10
    m.remount("--reconnect-timeout", str(int(reconnect_s)), "--simulate-latency", "4000", "--revalidate", "never")
    fastpath = [] if m.no_fastpath else [int(m.status()["fastpath"]["pid"])]
    calls: list[Callable[[], object]] = [
        lambda: os.stat(m.path / "missing"),
        lambda: os.listdir(m.path / "d0"),
        lambda: os.stat(m.path / "d1"),
    ]
    crowd = Crowd(0, calls)
    wait_for(lambda: waiting(m), lambda count: count >= (1 if m.no_fastpath else 3))
    daemon, m.pid = m.pid, 0
    before = children(daemon)
    m.killed_fastpaths += len(fastpath)
    for pid in [daemon, *fastpath] if first == "daemon" else fastpath:
        os.kill(pid, signal.SIGKILL)
    if first != "daemon":
        another = stop_the_next_child(daemon, before) if "another" in first and fastpath else 0
        os.kill(daemon, signal.SIGKILL)
        if another:
            os.kill(another, signal.SIGCONT)
    began = time.monotonic()
    answers = crowd.join(20)
    answers += Crowd(0, calls).join(20)
    assert time.monotonic() - began < 2 * reconnect_s + PROMPT_S
    assert set(answers) <= {errno.EIO, errno.ENOTCONN, errno.ECONNABORTED}
