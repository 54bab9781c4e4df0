"""The source goes away and comes back: its mount is killed and made again, or it hangs (C1, C2, C6, Must hold 4)."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.bindfs import Bindfs, take_over
from tests.conftest import Mount, cachefs, children, contents, raises_errno, settle, wait_for
from tests.holder import Holder
from tests.processes import fastpath_pid, kill_fastpath, stop

MakeMount = Callable[..., Mount]

MODES = {"read-only": ["--read-only"], "read-write": [], "mutable": ["--mutable", "**"]}
CACHED = ["read-only", "read-write"]


def small_files(root: Path) -> dict[Path, bytes]:
    """By their paths, in order."""
    return {path: data for path, data in contents(root).items() if len(path.parts) == 2}


def check(m: Mount, expected: dict[Path, bytes]) -> None:
    for path, data in expected.items():
        assert (m.path / path).read_bytes() == data


def halves(files: dict[Path, bytes]) -> tuple[dict[Path, bytes], dict[Path, bytes]]:
    items = list(files.items())
    return dict(items[::2]), dict(items[1::2])


def open_calls(pid: int) -> int:
    """How many threads of a process wait in openat(2), of a FUSE filesystem for example."""
    calls = [task.read_text().split()[0] for task in Path(f"/proc/{pid}/task").glob("*/syscall")]
    return calls.count("257")


def lost(m: Mount) -> str:
    """Wait until the daemon reports it; return the report."""
    return str(wait_for(lambda: m.status()["source_problem"], bool))


@pytest.mark.promise("FA-10")
@pytest.mark.parametrize("mode", MODES)
def test_c1_a_source_mounted_again_is_used_again(bindfs: Bindfs, mount: MakeMount, mode: str) -> None:
    first, rest = halves(small_files(bindfs.root))
    m = mount(bindfs.path, *MODES[mode], "--source-timeout", "60")
    check(m, first)
    if mode in CACHED:
        m.flush()
    bindfs.kill()
    m.drop_caches()
    if mode in CACHED:
        check(m, first)
    waits = m.path / next(iter(rest))
    answers: list[bytes] = []
    reader = threading.Thread(target=lambda: answers.append(waits.read_bytes()))
    reader.start()
    assert "not connected" in lost(m)
    if mode in CACHED:
        m.drop_caches()
        # Without a fast path the kernel sends one LOOKUP at a time to a directory.
        check(m, {path: data for path, data in first.items() if path.parts[0] != waits.parent.name})
    assert reader.is_alive()
    bindfs.again()
    reader.join(30)
    assert answers == [next(iter(rest.values()))]
    check(m, rest)
    check(m, first)
    status = m.status()
    assert (status["source_lost"], status["source_reconnects"]) == (False, 1)
    assert status["source_errors"] > 0
    assert m.log().count("the source is lost") == m.log().count("the source is back") == 1


@pytest.mark.promise("FA-10")
@pytest.mark.parametrize("mode", MODES)
def test_c1_it_happens_again_and_again(bindfs: Bindfs, mount: MakeMount, mode: str) -> None:
    files = list(small_files(bindfs.root).items())
    m = mount(bindfs.path, *MODES[mode])
    for number in range(3):
        check(m, dict(files[number * 10 : number * 10 + 10]))
        bindfs.kill()
        bindfs.again()  # at once: the first miss finds out
    check(m, dict(files[30:]))
    assert m.status()["source_reconnects"] == 3
    assert (m.path / "link").readlink() == Path("d0/f00000")


@pytest.mark.promise("FA-10")
@pytest.mark.parametrize("mode", MODES)
def test_c1_misses_fail_after_the_time_out_while_the_source_is_away(
    bindfs: Bindfs, mount: MakeMount, mode: str
) -> None:
    first, rest = halves(small_files(bindfs.root))
    m = mount(bindfs.path, *MODES[mode], "--source-timeout", "1")
    check(m, first)
    if mode in CACHED:
        m.flush()
    bindfs.kill()
    m.drop_caches()
    missing = m.path / next(iter(rest))
    started = time.monotonic()
    raises_errno(errno.ETIMEDOUT, missing.read_bytes)
    assert time.monotonic() - started >= 0.9
    assert "not connected" in lost(m)
    assert m.status()["source_errors"] > 0
    if mode in CACHED:
        check(m, first)
    bindfs.again()
    wait_for(lambda: m.status()["source_lost"], lambda is_lost: not is_lost)
    check(m, rest)


@pytest.mark.promise("FA-10")
def test_c1_names_and_attributes_wait_for_the_source_too(bindfs: Bindfs, mount: MakeMount) -> None:
    m = mount(bindfs.path)
    names = sorted(os.listdir(m.path / "d1"))
    bindfs.kill()
    found: list[list[str]] = []
    lister = threading.Thread(target=lambda: found.append(sorted(os.listdir(m.path / "d2"))))
    lister.start()
    lost(m)
    bindfs.again()
    lister.join(30)
    assert found == [sorted(os.listdir(bindfs.root / "d2"))]
    assert sorted(os.listdir(m.path / "d1")) == names


@pytest.mark.promise("FA-10")
@pytest.mark.parametrize("knows_name", [True, False], ids=["", "looks-up"])
def test_c1_changes_go_to_the_source_that_is_there_now(bindfs: Bindfs, mount: MakeMount, *, knows_name: bool) -> None:
    m = mount(bindfs.path, "--attr-timeout", "1" if knows_name else "0.2")
    (m.path / "d0/before").write_bytes(b"before")
    bindfs.kill()
    bindfs.again()
    if not knows_name:
        time.sleep(0.3)
    assert (m.path / "d0/before").read_bytes() == b"before"  # and the daemon knows
    (m.path / "d0/after").write_bytes(b"after")
    (m.path / "d0/before").rename(m.path / "d1/before")
    assert (bindfs.root / "d0/after").read_bytes() == b"after"
    assert (bindfs.root / "d1/before").read_bytes() == b"before"


@pytest.mark.promise("FA-13")
def test_c1_large_files_that_are_open_go_on(bindfs: Bindfs, mount: MakeMount) -> None:
    data = os.urandom(24 << 20)
    (bindfs.root / "large").write_bytes(data)
    settle()
    m = mount(bindfs.path)
    with open(m.path / "large", "rb", buffering=0) as opened:
        assert os.pread(opened.fileno(), 4096, 0) == data[:4096]
        bindfs.kill()
        bindfs.again()
        assert os.pread(opened.fileno(), 8192, 16 << 20) == data[16 << 20 : (16 << 20) + 8192]
        assert os.pread(opened.fileno(), 8192, 20 << 20) == data[20 << 20 : (20 << 20) + 8192]
    assert m.status()["source_reconnects"] == 1


@pytest.mark.promise("FA-13")
def test_c1_mutable_files_that_are_open_go_on(bindfs: Bindfs, mount: MakeMount) -> None:
    data = os.urandom(4 << 20)
    (bindfs.root / "log").write_bytes(data)
    m = mount(bindfs.path, "--mutable", "log")
    with open(m.path / "log", "rb", buffering=0) as opened:
        assert os.pread(opened.fileno(), 4096, 0) == data[:4096]
        bindfs.kill()
        bindfs.again()
        assert os.pread(opened.fileno(), 4096, 3 << 20) == data[3 << 20 : (3 << 20) + 4096]


@pytest.mark.promise("FA-10")
def test_c1_another_directory_at_its_path_is_not_taken_for_it(bindfs: Bindfs, mount: MakeMount, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "d1").mkdir(parents=True)
    first, rest = halves(small_files(bindfs.root))
    for path in rest:
        (other / path).parent.mkdir(exist_ok=True)
        (other / path).write_bytes(b"of another source")
    m = mount(bindfs.path, "--source-timeout", "1")
    check(m, first)
    m.flush()
    bindfs.kill()
    bindfs.again(other)
    raises_errno(errno.ETIMEDOUT, (m.path / next(iter(rest))).read_bytes)
    assert "another directory" in wait_for(m.log, lambda log: "another directory" in log)
    check(m, first)
    assert m.status()["source_reconnects"] == 0
    bindfs.kill()
    bindfs.again()
    wait_for(lambda: m.status()["source_lost"], lambda is_lost: not is_lost)
    check(m, rest)


@pytest.mark.promise("FA-11")
@pytest.mark.parametrize("mode", MODES)
def test_c1_a_source_mounted_anew_that_hangs_stays_lost_until_it_answers(
    bindfs: Bindfs, mount: MakeMount, mode: str
) -> None:
    first, rest = halves(small_files(bindfs.root))
    m = mount(bindfs.path, *MODES[mode], "--source-timeout", "1")
    check(m, first)
    m.flush()
    bindfs.kill()
    bindfs.again()
    stop(bindfs.pid())
    try:
        missing = m.path / next(iter(rest))
        raises_errno(errno.ETIMEDOUT, missing.stat)
        assert "does not answer" in wait_for(lambda: m.status()["source_problem"], lambda said: said and "does" in said)
        ends = time.monotonic() + 20  # each retry fails
        while time.monotonic() < ends:
            raises_errno(errno.ETIMEDOUT, missing.stat)
            assert m.status()["source_lost"]
        assert "the source is back" not in m.log()
        if mode in CACHED:
            check(m, first)
    finally:
        os.kill(bindfs.pid(), signal.SIGCONT)
    wait_for(lambda: m.status()["source_lost"], lambda is_lost: not is_lost)
    check(m, rest)
    assert m.status()["source_reconnects"] == m.log().count("the source is back") == 1


@pytest.mark.promise("FA-11")
def test_c1_one_that_hangs_for_ever_does_not_keep_the_next_one_out(bindfs: Bindfs, mount: MakeMount) -> None:
    first, rest = halves(small_files(bindfs.root))
    m = mount(bindfs.path, "--source-timeout", "1")
    check(m, first)
    bindfs.kill()
    bindfs.again()
    stopped = bindfs.pid()
    stop(stopped)
    try:
        raises_errno(errno.ETIMEDOUT, (m.path / next(iter(rest))).stat)
        wait_for(lambda: open_calls(m.pid), lambda count: count >= 4, 60)
        bindfs.again()
        wait_for(lambda: m.status()["source_lost"], lambda is_lost: not is_lost)
        check(m, rest)
    finally:
        os.kill(stopped, signal.SIGKILL)


@pytest.mark.promise("FA-12")
def test_c1_over_the_source_itself_the_status_says_what_to_do(bindfs: Bindfs, mount: MakeMount) -> None:
    m = mount(bindfs.path, "--source-timeout", "1", name=".")
    first, rest = halves(small_files(bindfs.root))
    check(m, first)
    m.flush()
    bindfs.kill()
    raises_errno(errno.ETIMEDOUT, (m.path / next(iter(rest))).read_bytes)
    said = wait_for(lambda: m.status()["source_problem"], lambda now: now and "unmount" in now)
    assert str(m.path) in said
    assert "unmount" in m.log()
    check(m, first)
    m.umount()


@pytest.mark.promise("FA-15")
@pytest.mark.fastpath
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["restart", "killed"])
def test_c2_a_successor_takes_over_without_the_source(bindfs: Bindfs, mount: MakeMount, mode: str, how: str) -> None:
    first, rest = halves(small_files(bindfs.root))
    m = mount(bindfs.path, *MODES[mode], "--source-timeout", "2")
    check(m, first)
    if mode in CACHED:
        m.flush()
    bindfs.kill()
    m.drop_caches()
    take_over(m, how)
    if mode in CACHED:
        check(m, first)
    raises_errno(errno.ETIMEDOUT, (m.path / next(iter(rest))).read_bytes)
    lost(m)
    bindfs.again()
    wait_for(lambda: m.status()["source_lost"], lambda is_lost: not is_lost)
    check(m, rest)
    check(m, first)


@pytest.mark.promise("FA-15")
@pytest.mark.fastpath
def test_c2_successors_of_both_processes_use_the_new_source(bindfs: Bindfs, mount: MakeMount) -> None:
    files = list(small_files(bindfs.root).items())
    m = mount(bindfs.path)
    check(m, dict(files[:10]))
    bindfs.kill()
    bindfs.again()
    check(m, dict(files[10:20]))
    os.kill(m.status()["fastpath"]["pid"], signal.SIGKILL)
    m.killed_fastpaths += 1
    check(m, dict(files[20:25]))
    m.kill()
    m.start()
    check(m, dict(files[25:30]))
    cachefs("restart", m.path)
    m.pid = int(m.status()["pid"])
    check(m, dict(files[30:]))
    assert m.status()["source_reconnects"] == 0  # none of them had to find out again


class Reader:
    """Reads cached files continuously; records the longest time of a read, and failures."""

    def __init__(self, m: Mount, expected: dict[Path, bytes]) -> None:
        self._m, self._expected = m, expected
        self._stop = threading.Event()
        self.rounds, self.longest_s, self.failed = 0, 0.0, ""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            for path, data in self._expected.items():
                started = time.monotonic()
                try:
                    if (self._m.path / path).read_bytes() != data:
                        self.failed = f"{path}: other bytes"
                except OSError as error:
                    self.failed = f"{path}: {error}"
                self.longest_s = max(self.longest_s, time.monotonic() - started)
            self.rounds += 1

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        assert not self.failed and self.rounds


@pytest.mark.promise("FA-15")
@pytest.mark.fastpath
@pytest.mark.parametrize("mode", CACHED)
@pytest.mark.parametrize("how", ["restart", "killed"])
def test_c6_a_source_that_hangs_does_not_delay_a_take_over(
    mount: MakeMount, faulty: tuple[Path, Path], mode: str, how: str
) -> None:
    place, faults = faulty
    first, rest = halves(small_files(place))
    m = mount(place, *MODES[mode], "--source-timeout", "40")
    check(m, first)
    m.flush()
    m.drop_caches()
    (faults / "hang").touch()
    (faults / "hang-all").touch()
    reader = Reader(m, first)
    started = time.monotonic()
    take_over(m, how)
    took_s = time.monotonic() - started
    wait_for(lambda: reader.rounds, lambda rounds: rounds > 2)
    reader.end()
    assert took_s < 25 and reader.longest_s < 25, "it waited for the source"
    for fault in faults.iterdir():
        fault.unlink()
    check(m, rest)


@pytest.mark.promise("FA-15")
@pytest.mark.fastpath
def test_a_restart_does_not_wait_for_a_source_on_fuse_with_files_that_are_open_for_writing(
    mount: MakeMount, faulty: tuple[Path, Path]
) -> None:
    """Before: it did, and the jobs got EIO: processes that the successor starts close copies of its descriptors."""
    place, faults = faulty
    first, _ = halves(small_files(place))
    m = mount(place, "--source-timeout", "40", "--reconnect-timeout", "5")
    check(m, first)
    m.flush()
    m.drop_caches()
    holder = Holder(m.path / "log")
    assert holder.ask("write", 0, "before") == "before"
    for fault in ("hang-all", "hang-flush"):
        (faults / fault).touch()
    started = time.monotonic()
    take_over(m, "restart")
    assert time.monotonic() - started < 20, "it waited for the source"
    check(m, first)
    for fault in faults.iterdir():
        fault.unlink()
    assert holder.ask("read", 0, "before") == "before"
    assert holder.ask("write", 0, "after!") == "after!"
    assert holder.ask("fsync", 0, "done") == "done"
    holder.end()


@pytest.mark.promise("FA-15")
@pytest.mark.fastpath
@pytest.mark.parametrize("killed", ["fast path", "notifier"])
def test_a_process_is_replaced_while_a_source_on_fuse_hangs_with_files_that_are_open_for_writing(
    mount: MakeMount, faulty: tuple[Path, Path], killed: str
) -> None:
    """Before: the daemon waited for the FLUSH of copies of its descriptors, which the new process closed."""
    place, faults = faulty
    first, _ = halves(small_files(place))
    m = mount(place, "--source-timeout", "40")
    check(m, first)
    m.flush()
    holder = Holder(m.path / "log")
    assert holder.ask("write", 0, "before") == "before"
    for fault in ("hang-all", "hang-flush"):
        (faults / fault).touch()
    if killed == "fast path":
        kill_fastpath(m)
    else:
        (notifier,) = children(m.pid) - {fastpath_pid(m)}
        os.kill(notifier, signal.SIGKILL)
        wait_for(lambda: children(m.pid) - {fastpath_pid(m), notifier}, bool)
    m.drop_caches()
    started = time.monotonic()
    check(m, first)
    assert time.monotonic() - started < 20, "it waited for the source"
    for fault in faults.iterdir():
        fault.unlink()
    assert holder.ask("write", 0, "after!") == "after!"
    assert holder.ask("fsync", 0, "done") == "done"
    holder.end()


TIMED_OUT = str(errno.ETIMEDOUT)


@pytest.mark.promise("FA-15")
@pytest.mark.fastpath
def test_c6_open_handles_wait_for_the_source_and_are_kept(mount: MakeMount, faulty: tuple[Path, Path]) -> None:
    """The successor neither gives them up nor waits for them."""
    place, faults = faulty
    m = mount(place, "--source-timeout", "2", "--mutable", "log*")
    holder = Holder(*(m.path / f"log{number}" for number in range(12)))
    for number in range(12):
        assert holder.ask("write", number, "before") == "before"
    (faults / "hang").touch()
    (faults / "hang-all").touch()
    started = time.monotonic()
    m.kill()
    m.start()
    assert time.monotonic() - started < 20, "it waited for one after the other"
    assert holder.ask("read", 0, "before") == TIMED_OUT
    for fault in faults.iterdir():
        fault.unlink()
    for number in range(12):
        wait_for(partial(holder.ask, "read", number, "before"), lambda found: found == "before")
        assert holder.ask("write", number, "after!") == "after!"
        assert holder.ask("fsync", number, "done") == "done"
    holder.end()
    assert (m.source / "log11").read_bytes() == b"after!"


@pytest.mark.promise("FA-15")
@pytest.mark.fastpath
def test_c2_open_handles_survive_a_successor_that_finds_no_source(bindfs: Bindfs, mount: MakeMount) -> None:
    m = mount(bindfs.path, "--source-timeout", "2")
    holder = Holder(m.path / "written")
    holder.ask("write", 0, "before")
    assert holder.ask("fsync", 0, "done") == "done"
    bindfs.kill()
    m.kill()
    m.start()
    assert holder.ask("write", 0, "after!") == TIMED_OUT
    bindfs.again()
    wait_for(lambda: m.status()["source_lost"], lambda is_lost: not is_lost)
    assert holder.ask("write", 0, "after!") == "after!"
    assert holder.ask("fsync", 0, "done") == "done"
    holder.end()
    assert (bindfs.root / "written").read_bytes() == b"after!"


def test_source_errors_count_time_outs(mount: MakeMount, faulty: tuple[Path, Path]) -> None:
    place, faults = faulty
    m = mount(place, "--source-timeout", "0.5")
    path = next(iter(small_files(place)))
    (faults / "hang").touch()
    raises_errno(errno.ETIMEDOUT, (m.path / path).read_bytes)
    assert m.status()["source_errors"] > 0
    assert not m.status()["source_lost"]  # it is slow, and may answer yet
    (faults / "hang").unlink()
    wait_for(lambda: m.status()["source_stuck_calls"], lambda stuck: stuck == 0)


@pytest.mark.promise("FA-13")
@pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
def test_an_open_file_is_not_taken_for_the_one_that_has_its_name_now(
    bindfs: Bindfs, mount: MakeMount, mode: list[str]
) -> None:
    (bindfs.root / "log").write_bytes(b"mine")
    m = mount(bindfs.path, "--mutable", "log", "--attr-timeout", "60", *mode)
    fd = os.open(m.path / "log", os.O_RDWR)
    bindfs.kill()
    (bindfs.root / "new").write_bytes(b"another")
    (bindfs.root / "new").rename(bindfs.root / "log")
    bindfs.again()
    raises_errno(errno.ESTALE, lambda: os.pwrite(fd, b"XXXX", 0))
    assert (bindfs.root / "log").read_bytes() == b"another"
    with suppress(OSError):
        os.close(fd)
