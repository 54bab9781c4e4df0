"""State that a daemon inherits from the process that starts it, and that must not affect a mount."""

import errno
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import conftest
from tests.conftest import CLI, Mount, cachefs, contents, mounted_on, wait_for

pytestmark = [pytest.mark.promise("LC-11"), pytest.mark.usefixtures("interpreters")]

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
