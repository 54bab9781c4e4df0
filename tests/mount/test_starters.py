"""State that a daemon inherits from the process that starts it, and that must not affect a mount."""

import errno
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.system.syscalls import thread_capabilities
from tests import conftest
from tests.conftest import CLI, Mount, cachefs, children, contents, mounted_on, wait_for
from tests.users import MAY_NOT_RAISE_LIMITS

pytestmark = [pytest.mark.promise("LC-11"), pytest.mark.usefixtures("interpreters")]

CAP_SYS_RESOURCE = 24
MakeMount = Callable[..., Mount]


def started(monkeypatch: pytest.MonkeyPatch, *before: str) -> None:
    """The command line is started with this prefix from now on."""
    monkeypatch.setattr(conftest, "CLI", [*before, *CLI])


def check_it_works(m: Mount, source: Path) -> None:
    assert contents(m.path) == contents(source)
    m.remount("--read-only")
    assert contents(m.path) == contents(source)
    m.umount()


def test_a_starter_that_ignores_the_ends_of_its_children(
    mount: MakeMount, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGCHLD is ignored: the kernel reaps children before their exit status can be read."""
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execvp(sys.argv[1], sys.argv[1:])"
    )
    started(monkeypatch, sys.executable, "-c", ignoring)
    check_it_works(mount(source), source)


@pytest.mark.parametrize("streams", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_starter_that_has_closed_its_streams(
    mount: MakeMount, source: Path, monkeypatch: pytest.MonkeyPatch, streams: str
) -> None:
    started(monkeypatch, "sh", "-c", f'exec "$@" {streams}', "sh")
    check_it_works(mount(source), source)


@pytest.mark.parametrize("command", ["mount", pytest.param("restart", marks=pytest.mark.fastpath)])
def test_a_starter_whose_files_may_not_grow(
    mount: MakeMount, source: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The signal that the kernel sends to a process that exceeds the limit ends the process."""
    for number in range(40):
        (source / f"large{number}").write_bytes(bytes([number]) * (500 << 10))
    conftest.settle()
    m = mount(source, "--read-only")
    started(monkeypatch, "prlimit", f"--fsize={8 << 20}:{resource.RLIM_INFINITY}")
    if command == "mount":
        m.remount("--read-only")
    else:
        conftest.cachefs("restart", m.path)
        m.pid = int(m.status()["pid"])
    assert contents(m.path) == contents(source)
    assert m.flush()["cached_files"] == sum(map(bool, contents(source).values()))


LOW = {"cpu": 600, "as": 64 << 30, "data": 4 << 30, "fsize": 8 << 20, "nofile": 1024, "nproc": 4000, "rttime": 10**6}
LOW_SOFT = ("--stack=262144:", "--sigpending=0:", "--memlock=0:", "--msgqueue=0:")


def limits_of(pid: int) -> dict[str, tuple[str, str]]:
    """Soft and hard limit by name."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()[1:]
    return {line[:26].strip(): (line[26:47].strip(), line[47:68].strip()) for line in lines}


def processes_of(m: Mount) -> dict[str, int]:
    """The daemon, the fast path and the notifier."""
    found = {"daemon": m.pid}
    for pid in children(m.pid):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        found["fast path" if b"--device" in command else "notifier"] = pid
    return found


@pytest.mark.promise("LC-28")
@pytest.mark.parametrize("command", ["mount", pytest.param("restart", marks=pytest.mark.fastpath)])
def test_a_starter_with_low_limits(
    mount: MakeMount, source: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Regression: RLIMIT_CPU killed the daemon after minutes, and calls failed with EIO."""
    m = mount(source)
    hard = "" if thread_capabilities()[0] >> CAP_SYS_RESOURCE & 1 else ":"  # ":": the soft limit only
    started(monkeypatch, "prlimit", *(f"--{name}={value}{hard}" for name, value in LOW.items()), *LOW_SOFT)
    if command == "mount":
        m.remount()
    else:
        conftest.cachefs("restart", m.path)
        m.pid = int(m.status()["pid"])
    assert contents(m.path) == contents(source)
    found = processes_of(m)
    assert set(found) == {"daemon", "notifier"} | ({"fast path"} if m.status()["fastpath"] else set())
    for pid in found.values():
        limits = limits_of(pid)
        for name in ("cpu time", "address space", "data size", "file size", "realtime timeout"):
            assert limits[f"Max {name}"] == ("unlimited", "unlimited")
        for name in ("processes", "pending signals", "locked memory", "msgqueue size"):
            assert limits[f"Max {name}"][0] == limits[f"Max {name}"][1]
        assert int(limits["Max open files"][0]) > 4096
        assert limits["Max stack size"][0] == f"{8 << 20}"
    assert "ulimit" not in m.log()


@pytest.mark.promise("LC-28")
def test_limits_that_cannot_be_raised_are_named(
    mount: MakeMount, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = mount(source)
    m.umount()
    started(monkeypatch, "prlimit", "--cpu=600", f"--fsize={2 << 30}", "--nproc=30000", *MAY_NOT_RAISE_LIMITS)
    done = cachefs("mount", source, m.path, "--cache-dir", m.cache, *Mount.given())
    m.pid = int(m.status()["pid"])
    assert contents(m.path) == contents(source)
    for said in (done.stderr, m.log()):
        named = [line.partition("(ulimit ")[2].partition(")")[0] for line in said.splitlines() if "ulimit" in line]
        assert named == ["-t 600", f"-f {2 << 20}"]
    assert limits_of(m.pid)["Max cpu time"] == ("600", "600")


@pytest.mark.promise("LC-28")
def test_too_little_address_space_is_one_line(
    mount: MakeMount, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is mounted, and a restart leaves the mount as it is."""
    m = mount(source)
    started(monkeypatch, "prlimit", f"--as={64 << 30}", *MAY_NOT_RAISE_LIMITS)
    (tmp_path / "other").mkdir()
    done = cachefs("mount", source, tmp_path / "other", "--cache-dir", tmp_path / "c", *Mount.given(), check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert f"(ulimit -v {64 << 20})" in done.stderr and "address space" in done.stderr
    assert not mounted_on(tmp_path / "other")
    if not m.no_fastpath:
        done = cachefs("restart", m.path, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert f"(ulimit -v {64 << 20})" in done.stderr
        assert m.status()["pid"] == m.pid
    assert contents(m.path) == contents(source)


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory in which started programs look for libraries first."""
    path = tmp_path / "libraries"
    path.mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(path))
    return path


@pytest.mark.fastpath
def test_a_fast_path_that_ends_as_soon_as_it_starts_is_one_clear_line(
    source: Path, tmp_path: Path, libraries: Path
) -> None:
    """One of its libraries is damaged. Regression: `cachefs mount` never returned, and printed nothing."""
    (libraries / "liblmdb.so.0").write_bytes(b"")
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    done = cachefs("mount", source, mountpoint, "--cache-dir", tmp_path / "cache", check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "the fast path ends as soon as it is started, with status 127" in line
    assert "liblmdb.so.0" in (tmp_path / "cache/daemon.log").read_text()
    assert not mounted_on(mountpoint)


@pytest.mark.fastpath
def test_a_mount_in_use_waits_until_its_fast_path_can_be_started(
    mount: MakeMount, source: Path, libraries: Path
) -> None:
    m = mount(source, "--read-only")
    assert contents(m.path) == contents(source)
    m.killed_fastpaths = 100
    damaged = libraries / "liblmdb.so.0"
    damaged.write_bytes(b"")
    os.kill(int(m.status()["fastpath"]["pid"]), signal.SIGKILL)
    wait_for(lambda: m.log().count("the fast path has ended"), lambda ends: ends > 6)
    damaged.unlink()
    assert contents(m.path) == contents(source)


@pytest.mark.fastpath
@pytest.mark.promise("FA-27")
@pytest.mark.parametrize("taken_over", [False, True], ids=["new", "taken-over"])
def test_a_mount_whose_fast_path_cannot_be_started_any_more_ends(
    mount: MakeMount, source: Path, libraries: Path, taken_over: bool
) -> None:
    """Its readers get an error. Regression: they waited for ever."""
    m = mount(source, "--read-only", "--reconnect-timeout", "1")
    if taken_over:
        m.kill()
        m.start()
    assert contents(m.path) == contents(source)
    m.killed_fastpaths = 100
    (libraries / "liblmdb.so.0").write_bytes(b"")
    os.kill(int(m.status()["fastpath"]["pid"]), signal.SIGKILL)
    with pytest.raises(OSError) as caught:
        os.stat(m.path / "missing")
    assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    wait_for(lambda: mounted_on(m.path), lambda mounts: not mounts)
    m.pid = 0
    wait_for(m.log, lambda log: "the fast path ends as soon as it is started, with status 127" in log)
