"""Fixtures: real mounts of /dev/fuse, made by the command line as a user would, and trees to mount."""

import errno
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import settings

from cachefs.client.client import Client
from cachefs.contract.shared import SETTLE_NS
from cachefs.errors import CacheFsError
from cachefs.fastpath import processes
from cachefs.system import syscalls
from cachefs.system.clock import NANOSECONDS, TIME_OF_DAY, TimeOfDay
from daemon.cli.main import unmount_and_wait
from daemon.kernel.instance import MountInstance
from tests import command_server

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the command line is run a thousand times
settings.register_profile("cachefs", deadline=None)  # a loaded machine is no defect
settings.load_profile("cachefs")
CLI = [sys.executable, "-m", "daemon"]
REPOSITORY = Path(__file__).resolve().parent.parent
MS_REMOUNT = 32
FULL_AGE_S = SETTLE_NS / NANOSECONDS
SHORT_AGE_S = 0.1
"""How old files must be for mounts of tests that are not about that. A write() may take longer: not for users."""
CLOCK_WAS_SET_NS = 50_000_000
"""Adjustments of its speed change it by less while a test runs."""
TREES_AHEAD = 8
_starts_interpreters = False


def cachefs(*arguments: object, check: bool = True, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line. `kwargs`: of subprocess.run()."""
    command = [os.fspath(_path(each)) for each in arguments]
    if kwargs or _starts_interpreters or not command_server.shared().is_as_started_here():
        given = {"cwd": REPOSITORY, "timeout": 120} | kwargs
        done = subprocess.run([*CLI, *command], capture_output=True, text=True, **given)
    else:
        done = command_server.shared().run(command, timeout_s=120)
    if check and done.returncode != 0:
        raise AssertionError(f"cachefs {command} exited {done.returncode}: {done.stderr}")
    return done


@pytest.fixture
def interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of this test starts an interpreter, as a user's does."""
    monkeypatch.setattr(sys.modules[__name__], "_starts_interpreters", True)


def _path(argument: object) -> str:
    return (
        argument if isinstance(argument, str) else os.fspath(argument) if isinstance(argument, Path) else str(argument)
    )


def mount_lines() -> list[str]:
    """The mount table. The names of mounts that are not ours may be anything."""
    return Path("/proc/self/mountinfo").read_bytes().decode(errors="surrogateescape").split("\n")[:-1]


def mounted_on(path: Path) -> list[str]:
    """Filesystem types mounted at exactly this path."""
    found = []
    for line in mount_lines():
        fields = line.split(" ")
        if fields[4] == str(path):
            found.append(fields[fields.index("-") + 1])
    return found


class Mount:
    """One mount, and how to ask it, end it, or kill it."""

    no_fastpath = False
    """All mounts of this run of the tests are made without the fast path."""
    minimum_age_s = FULL_AGE_S
    """How old files must be for the mounts of this test."""

    def __init__(self, source: Path, path: Path, cache: Path, arguments: tuple[object, ...]) -> None:
        self.source, self.path, self.cache, self.arguments = source, path, cache, arguments
        self.pid = 0
        self.killed_fastpaths = 0
        self.start()

    @classmethod
    def given(cls) -> list[str]:
        """Options that all mounts of this test get."""
        age = ["--minimum-age", str(cls.minimum_age_s)] if cls.minimum_age_s != FULL_AGE_S else []
        return ["--no-fastpath"] * cls.no_fastpath + age

    def start(self, *more: object) -> None:
        if not mounted_on(self.path):
            self.path.mkdir(exist_ok=True)
        cachefs("mount", self.source, self.path, "--cache-dir", self.cache, *self.given(), *self.arguments, *more)
        self.pid = int(self.status()["pid"])

    def status(self) -> dict[str, Any]:
        return Client(self.path).status()  # as `cachefs status --json` does

    def ops(self) -> dict[str, int]:
        return dict(self.status()["source_ops"])

    def flush(self) -> dict[str, Any]:
        """Wait until everything that was read is in the index; the status then."""
        return wait_for(self.status, lambda s: s["write_behind_bytes"] == 0 and s["uncommitted"] == 0)

    def drop_caches(self) -> None:
        """Have the kernel forget what it knows of this mount, and of a source that is a mount itself.

        /proc/sys/vm/drop_caches would take their caches from other tests, too, and tests run side by side.
        """
        for path in (self.path, self.source):
            drop_caches_of(path)

    def umount(self) -> None:
        """As `cachefs umount` does, without the start of a program: a third of what a mount costs a test.

        Returns when the daemon has ended. It may live on for a while, because other tests make mount namespaces, which
        have a copy of this mount.
        """
        fds = []
        for pid in {self.pid, self._pid_of_daemon()} - {0}:
            with suppress(ProcessLookupError):
                fds.append(os.pidfd_open(pid))
        unmount_and_wait(str(self.path))
        for fd in fds:
            assert select.select([fd], [], [], 60)[0], "the daemon has not ended"
            os.close(fd)
        self.pid = 0

    def _pid_of_daemon(self) -> int:
        """0: none answers."""
        with suppress(CacheFsError):
            return int(Client(self.path, timeout_s=2).status()["pid"])
        return 0

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

    def _abort(self) -> None:
        if (there := MountInstance.on_top(str(self.path))) is not None:
            there.abort(lambda: not there.is_mounted())
            subprocess.run(["umount", "--lazy", self.path], check=True)

    def cleanup(self) -> None:
        if self.pid:
            try:
                unmount_and_wait(str(self.path))
            except CacheFsError:
                os.kill(self.pid, signal.SIGTERM)
        try:
            while "fuse.cachefs" in mounted_on(self.path):
                unmount_and_wait(str(self.path))
        except CacheFsError:  # pytest would hang when it deletes the directory
            self._abort()
            raise
        log = self.log()
        never = "bug in", "Traceback", "Sanitizer", "runtime error", "cannot read /dev/fuse"
        assert not any(words in log for words in never), log
        assert log.count("the fast path has ended") <= self.killed_fastpaths, log


def stuck_threads(*pids: int) -> int:
    """How many threads of these processes wait for an answer of a FUSE filesystem: here that is the source."""
    found = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += (task / "wchan").read_text() == "request_wait_answer"
    return found


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
def beneath() -> Iterator[ExitStack]:
    """What mounts lie over: it ends after them, so that they need not wait for it to come back."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def mount(tmp_path: Path, beneath: ExitStack) -> Iterator[Callable[..., Mount]]:
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


def settled_after_s() -> float:
    """When what was written is old enough for the mounts of this test. The kernel's time of files moves in steps."""
    return Mount.minimum_age_s + 0.05


def free_port() -> int:
    """Of the loopback device."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settle() -> None:
    """Let what was just written grow old: younger objects are compared once more (hazard 11), and not cached."""
    time.sleep(settled_after_s())


def expire() -> None:
    """Let all that is not pinned be believed no longer, neither by a mount nor by the kernel: both do for a second."""
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


def contents_of_damaged(root: Path) -> dict[Path, bytes]:
    """The first request for a file or directory that is open may meet the damage, and fail with ESTALE (FA-34)."""
    try:
        return contents(root)
    except OSError as error:
        assert error.errno == errno.ESTALE
        return contents(root)


def read_after_change(path: Path) -> bytes:
    """A fetch that notices another version fails, and the next open sees that version (CH-10)."""
    try:
        return path.read_bytes()
    except OSError as error:
        assert error.errno == errno.ESTALE
        return path.read_bytes()


class Trees:
    """Small trees, some of which are made long before they are wanted: they must be old enough to be believed."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._made: deque[tuple[Path, float]] = deque()
        self._count = 0

    def __next__(self) -> Path:
        while len(self._made) < TREES_AHEAD:
            root = self._base / f"tree{self._count}"
            self._count += 1
            make_files(root, 40)
            (root / "empty").write_bytes(b"")
            (root / "link").symlink_to("d0/f00000")
            self._made.append((root, time.monotonic()))
        root, made_s = self._made.popleft()
        time.sleep(max(0.0, made_s + settled_after_s() - time.monotonic()))
        return root


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    return Trees(tmp_path_factory.mktemp("trees"))


@pytest.fixture
def source(trees: Trees) -> Path:
    """A tree of 40 small files in 4 directories, an empty file and a symlink; the test may change it."""
    return next(trees)


def start_fault_fs(
    source: Path, tmp_path: Path, beneath: ExitStack, numbers: str = ""
) -> tuple[Path, Path, subprocess.Popen[bytes]]:
    """(a source that fails on demand, the directory of its faults, its process)"""
    mountpoint, faults = tmp_path / "faulty", tmp_path / "faults"
    mountpoint.mkdir()
    faults.mkdir()
    (faults / "numbers").write_text(numbers)
    process = subprocess.Popen([sys.executable, "-m", "tests.faultfs", source, mountpoint, faults], cwd=REPOSITORY)
    beneath.callback(process.wait, 20)
    beneath.callback(process.terminate)  # the mount over it may still hold its root
    wait_for(lambda: mounted_on(mountpoint), bool)
    beneath.callback(subprocess.run, ["umount", "-l", mountpoint], check=True)
    return mountpoint, faults, process


@pytest.fixture
def faulty(tmp_path: Path, source: Path, beneath: ExitStack) -> Iterator[tuple[Path, Path]]:
    """(a source that fails on demand, the directory of its faults)"""
    mountpoint, faults, _ = start_fault_fs(source, tmp_path, beneath)
    yield mountpoint, faults
    for fault in faults.iterdir():
        fault.unlink()


def children(pid: int) -> set[int]:
    """Processes that any of its threads has started."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            found.update(map(int, path.read_text().split()))
    return found


def drop_caches_of(path: Path) -> None:
    """Remount the FUSE filesystem that is mounted here, if one is, with the flags that it has.

    The kernel drops the names that are not in use, and FUSE the pages of an inode with its last name. Pages of files
    that this process has open are dropped by themselves.
    """
    for line in reversed(mount_lines()):
        fields = line.split(" ")
        if fields[4] == str(path):
            break
    else:
        return
    kind, _, options = fields[fields.index("-") + 1 :]
    if not kind.startswith("fuse"):
        return
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was the listing's own, or is no file
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"{path}/"):
                os.posix_fadvise(int(name), 0, 0, os.POSIX_FADV_DONTNEED)
    flags = {"ro": 1, "nosuid": 2, "nodev": 4}
    given = {*fields[5].split(","), *options.split(",")}
    syscalls.mount("", str(path), "", MS_REMOUNT | sum(flags[each] for each in given & flags.keys()))


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

    parser.addoption("--all-sources", action="store_true", help="tests/sources runs on all kinds of sources, not three")
    parser.addoption("--stress-seconds", type=int, default=0, help="how long each stress test lasts; 0: a short form")
    parser.addoption("--crash-points", type=int, default=40, help="how many power cuts tests/crash checks")
    parser.addoption("--kills", type=int, default=6, help="how many SIGKILLs tests/crash has its writers survive")
    parser.addoption("--damages", type=int, default=18, help="how many damages of a cache tests/damage makes")
    parser.addoption("--seed", type=int, default=0, help="of what is drawn at random; 0: a fresh one, which is printed")


def pytest_configure(config: pytest.Config) -> None:
    # A shell without job control ignores SIGINT in what it starts in the background, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    Mount.no_fastpath = config.getoption("--no-fastpath")
    config.option.seed = config.option.seed or random.SystemRandom().randrange(1, 1 << 32)


def pytest_report_header(config: pytest.Config) -> str:
    return f"drawn at random with --seed {config.option.seed}"


@pytest.fixture
def random_seed(pytestconfig: pytest.Config) -> int:
    """Another one in each run of the tests; where a test fails it says which."""
    seed: int = pytestconfig.option.seed
    print(f"--seed {seed}")
    return seed


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:  # before its fixtures, also those of its module
    Mount.minimum_age_s = FULL_AGE_S if item.get_closest_marker("full_age") else SHORT_AGE_S
    TIME_OF_DAY.start()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test again if it failed while the clock was set, for example because a virtual machine was moved.

    Its files are then older or younger than it expects, and a mount does not believe a clock that was set forward.
    """
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    if (
        any(report.failed for report in reports)
        and abs(TimeOfDay().offset_ns - TIME_OF_DAY.offset_ns) > CLOCK_WAS_SET_NS
    ):
        item._initrequest()  # type: ignore[attr-defined]  # forgets the fixtures of the first run
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    usable = os.geteuid() == 0 and os.path.exists("/dev/fuse")
    for item in items:
        if any(f"/tests/{where}/" in str(item.path) for where in ("mount", "crash", "security", "damage", "sources")):
            item.add_marker(pytest.mark.mount)
            if not usable:
                item.add_marker(pytest.mark.skip(reason="needs root and /dev/fuse"))
        if item.get_closest_marker("fastpath") and (Mount.no_fastpath or not processes.is_built()):
            item.add_marker(pytest.mark.skip(reason="without a fast path"))


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    command_server.shared()  # before a test changes what it inherits
    base = str(tmp_path_factory.getbasetemp())
    yield
    left = [line for line in mount_lines() if base in line]
    assert not left, "a test left a mount behind"
