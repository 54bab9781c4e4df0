"""Fixtures: real mounts of /dev/fuse, made by the command line as a user would, and trees to mount."""

import errno
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from cachefs.client import Client
from cachefs.fastpath import launcher

settings.register_profile("cachefs", deadline=None)  # a loaded machine is no defect
settings.load_profile("cachefs")
CLI = [sys.executable, "-m", "daemon"]
REPOSITORY = Path(__file__).resolve().parent.parent


def cachefs(*arguments: object, check: bool = True, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    command = [*CLI, *map(os.fspath, map(_path, arguments))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=120, **kwargs)
    if check and done.returncode != 0:
        raise AssertionError(f"{command} exited {done.returncode}: {done.stderr}")
    return done


def _path(argument: object) -> str:
    return (
        argument if isinstance(argument, str) else os.fspath(argument) if isinstance(argument, Path) else str(argument)
    )


def mounted_on(path: Path) -> list[str]:
    """Filesystem types mounted at exactly this path."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split(" ")
        if fields[4] == str(path):
            found.append(fields[fields.index("-") + 1])
    return found


class Mount:
    """One mount, and how to ask it, end it, or kill it."""

    no_fastpath = False
    """All mounts of this run of the tests are made without the fast path."""

    def __init__(self, source: Path, path: Path, cache: Path, arguments: tuple[object, ...]) -> None:
        self.source, self.path, self.cache, self.arguments = source, path, cache, arguments
        self.pid = 0
        self.killed_fastpaths = 0
        self.start()

    def start(self, *more: object) -> None:
        if not mounted_on(self.path):
            self.path.mkdir(exist_ok=True)
        without = ["--no-fastpath"] if self.no_fastpath else []
        cachefs("mount", self.source, self.path, "--cache-dir", self.cache, *without, *self.arguments, *more)
        self.pid = int(self.status()["pid"])

    def status(self) -> dict[str, Any]:
        return Client(self.path).status()  # as `cachefs status --json` does

    def ops(self) -> dict[str, int]:
        return dict(self.status()["source_ops"])

    def flush(self) -> dict[str, Any]:
        """Wait until everything that was read is in the index; the status then."""
        return wait_for(self.status, lambda s: s["write_behind_bytes"] == 0 and s["uncommitted"] == 0)

    def umount(self) -> None:
        cachefs("umount", self.path)
        self.pid = 0

    def remount(self, *arguments: object) -> None:
        self.umount()
        self.arguments = arguments
        self.start()

    def kill(self) -> None:
        """SIGKILL; the mount stays behind, dead."""
        fd = os.pidfd_open(self.pid)
        os.kill(self.pid, signal.SIGKILL)
        assert select.select([fd], [], [], 20)[0]
        os.close(fd)
        self.pid = 0

    def log(self) -> str:
        path = self.cache / "daemon.log"
        return path.read_text() if path.exists() else ""

    def cleanup(self) -> None:
        if self.pid:
            done = cachefs("umount", self.path, check=False)
            if done.returncode:
                os.kill(self.pid, signal.SIGTERM)
        while "fuse.cachefs" in mounted_on(self.path):
            cachefs("umount", self.path)
        log = self.log()
        assert not any(word in log for word in ("bug in", "Traceback", "Sanitizer", "runtime error")), log
        assert log.count("the fast path has ended") <= self.killed_fastpaths, log


def wait_for(probe: Callable[[], Any], accept: Callable[[Any], bool], timeout_s: float = 30.0) -> Any:
    """Ask until the answer is acceptable; fails with the last one."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = probe()
        if accept(answer):
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"still {answer!r} after {timeout_s} s")
        time.sleep(0.02)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Mount]]:
    """`mount(source, *arguments, name=…)`: mounted until the test ends."""
    made: list[Mount] = []

    def make(source: Path, *arguments: object, name: str = "mnt", cache: Path | None = None) -> Mount:
        mounted = Mount(
            source, source if name == "." else tmp_path / name, cache or tmp_path / f"cache-{len(made)}", arguments
        )
        made.append(mounted)
        return mounted

    yield make
    for mounted in reversed(made):
        mounted.cleanup()


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A disk of `size`, mounted on a new directory."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def settle() -> None:
    """Let what was just written grow older than two seconds: younger objects are compared once more (hazard 11)."""
    time.sleep(2.1)


def make_files(
    root: Path, count: int, sizes: tuple[int, int] = (1, 9000), directories: int = 4, seed: int = 0
) -> list[Path]:
    """Files of random bytes in directories; their paths relative to the root."""
    draw = random.Random(seed)
    paths = []
    for index in range(count):
        path = Path(f"d{index % directories}") / f"f{index:05}"
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(draw.randbytes(draw.randint(*sizes)))
        paths.append(path)
    return paths


def contents(root: Path) -> dict[Path, bytes]:
    return {p.relative_to(root): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file() and not p.is_symlink()}


@pytest.fixture(scope="session")
def trees(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Small trees, one for each test that wants one, all old enough to be believed at once."""
    base = tmp_path_factory.mktemp("trees")
    roots = []
    wanted = sum("source" in getattr(item, "fixturenames", ()) for item in request.session.items)
    for index in range(wanted):
        root = base / f"tree{index}"
        make_files(root, 40)
        (root / "empty").write_bytes(b"")
        (root / "link").symlink_to("d0/f00000")
        roots.append(root)
    settle()
    return iter(roots)


@pytest.fixture
def source(trees: Iterator[Path]) -> Path:
    """A tree of 40 small files in 4 directories, an empty file and a symlink; the test may change it."""
    return next(trees)


@pytest.fixture
def faulty(tmp_path: Path, source: Path) -> Iterator[tuple[Path, Path]]:
    """(a source that fails on demand, the directory of its faults)"""
    mountpoint, faults = tmp_path / "faulty", tmp_path / "faults"
    mountpoint.mkdir()
    faults.mkdir()
    process = subprocess.Popen([sys.executable, "-m", "tests.faultfs", source, mountpoint, faults], cwd=REPOSITORY)
    wait_for(lambda: mounted_on(mountpoint), bool)
    yield mountpoint, faults
    for fault in faults.iterdir():
        fault.unlink()
    subprocess.run(["umount", "-l", mountpoint], check=True)
    process.terminate()  # the mount over it may still hold its root
    process.wait(20)


def drop_caches() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("3")


def raises_errno(number: int, function: Callable[[], object]) -> None:
    with pytest.raises(OSError) as caught:
        function()
    assert caught.value.errno == number, (
        f"{errno.errorcode.get(caught.value.errno or 0)}, not {errno.errorcode[number]}"
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-fastpath", action="store_true", help="mount without the fast path: Python serves alone")

    parser.addoption(
        "--sequences", type=int, default=3, help="how many random sequences tests/mount/test_space.py runs"
    )

    parser.addoption("--stress-seconds", type=int, default=0, help="how long each stress test lasts; 0: a short form")
    parser.addoption("--seed", type=int, default=0, help="of the stress tests; 0: a fresh one, which is printed")


def pytest_configure(config: pytest.Config) -> None:
    # A shell without job control ignores SIGINT in what it starts in the background, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    Mount.no_fastpath = config.getoption("--no-fastpath")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    usable = os.geteuid() == 0 and os.path.exists("/dev/fuse")
    for item in items:
        if "/tests/mount/" in str(item.path):
            item.add_marker(pytest.mark.mount)
            if not usable:
                item.add_marker(pytest.mark.skip(reason="needs root and /dev/fuse"))
        if item.get_closest_marker("fastpath") and (Mount.no_fastpath or not launcher.is_built()):
            item.add_marker(pytest.mark.skip(reason="without a fast path"))


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    base = str(tmp_path_factory.getbasetemp())
    yield
    left = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if base in line]
    assert not left, "a test left a mount behind"
