"""What the cache directory takes from its disk: its size and 64 MiB at most, whatever happens to the mount."""

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Mount, cachefs, contents, make_files, mounted_on, settle, small_disk, wait_for
from tests.processes import stop

MakeMount = Callable[..., Mount]
MIB = 1 << 20
MARGIN_BYTES = 64 * MIB
STEPS = 8


def allocated(directory: Path) -> int:
    """What a file, or all files of a directory, take from its disk."""
    return sum(path.lstat().st_blocks * 512 for path in [directory, *directory.rglob("*")])


def assert_within(m: Mount, size_bytes: int) -> None:
    """In the end: evicted data leave the disk with the next commit, or when their readers are done."""
    wait_for(lambda: allocated(m.cache), lambda taken: taken <= size_bytes + MARGIN_BYTES)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 MB: small files that share pages, and larger ones."""
    root = tmp_path_factory.mktemp("dataset") / "source"
    make_files(root / "small", 200, (1, 9000), 2, seed=1)
    make_files(root / "large", 40, (100_000, 2_900_000), 3, seed=2)
    settle()
    return root


def read_all(root: Path, draw: random.Random | None = None) -> int:
    """Read every file; the number of bytes."""
    paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
    if draw is not None:
        draw.shuffle(paths)
    size = 0
    for path in paths:
        try:
            size += read(path)
        except OSError as error:
            if error.errno != errno.ESTALE:  # replaced at the source: the next open sees the new version
                raise
            size += read(path)
    return size


def read(path: Path) -> int:
    size = 0
    fd = os.open(path, os.O_RDONLY)
    try:
        while part := os.read(fd, 1 << 20):
            size += len(part)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # the next read is one that the mount sees
    finally:
        os.close(fd)
    return size


def kill_everything(m: Mount) -> None:
    """Kill both processes at once, and remove the mount that they leave behind."""
    fast = m.status()["fastpath"]
    stop(m.pid)  # it must not start another fast path
    if fast:
        os.kill(fast["pid"], signal.SIGKILL)
    m.kill()
    while mounted_on(m.path):
        subprocess.run(["umount", "-l", m.path], check=True)


@pytest.mark.promise("CL-6")
@pytest.mark.parametrize(("retention", "size"), [("no-replacement", 50 * MIB), ("lru", 10 * MIB)])
def test_what_killed_runs_leave_behind_is_given_back(
    mount: MakeMount, dataset: Path, retention: str, size: int
) -> None:
    """Each run is killed before it has committed all that it has cached."""
    m = mount(dataset, "--cache-size", size, "--retention", retention)
    for _ in range(4):
        read_all(m.path / "large")
        kill_everything(m)
        m.start()
    read_all(m.path)
    status = m.flush()
    assert_within(m, size)
    assert status["blob_bytes"] > 0.7 * size, "the room is not lost"
    assert status["corrupt_records"] == 0 and contents(m.path) == contents(dataset)


@pytest.mark.promise("CL-7")
def test_a_cache_that_has_become_smaller_gives_back_what_is_too_much(
    mount: MakeMount, dataset: Path, tmp_path: Path
) -> None:
    """Also where nothing is replaced; by a remount, and by a reload."""
    file = tmp_path / "cachefs.toml"
    file.write_text('cache-size = "200M"\n')
    m = mount(dataset, "--config", file)
    read_all(m.path)
    assert m.flush()["blob_bytes"] > 50 * MIB
    file.write_text('cache-size = "30M"\n')
    os.kill(m.pid, signal.SIGHUP)
    wait_for(m.status, lambda status: 20 * MIB < status["blob_bytes"] <= 30 * MIB)
    m.umount()
    file.write_text('cache-size = "5M"\n')
    m.start()
    wait_for(m.status, lambda status: MIB < status["blob_bytes"] <= 5 * MIB)
    wait_for(lambda: allocated(m.cache), lambda taken: taken < 30 * MIB)
    assert read_all(m.path) == read_all(dataset)


def test_a_tmpfs_that_is_full_kills_nobody(mount: MakeMount, dataset: Path, tmp_path: Path) -> None:
    """Each reader that is new to the index writes to a page that is mapped: it must have been allocated."""
    with small_disk(tmp_path / "disk", "8M") as place:
        m = mount(dataset, "--cache-size", "1G", cache=place / "cache")
        fill_up(place)
        pids = processes(m)
        paths = [path for path in sorted(m.path.rglob("*")) if path.is_file()]
        with ThreadPoolExecutor(100) as readers:
            sizes = list(readers.map(read, paths * 3))
        assert sum(sizes) == 3 * read_all(dataset)
        assert processes(m) == pids and not m.log().count("the fast path has ended")
        m.umount()


READERS = """
import os, sys
from pathlib import Path
from cachefs.store.index.environment import Environment
environment = Environment(Path(sys.argv[1]) / "index", sync=True)
fd = os.open(Path(sys.argv[1]) / "filler", os.O_WRONLY | os.O_CREAT)
try:
    while True:
        os.write(fd, bytes(4096))
except OSError:
    pass
print(len([environment.lmdb.begin() for _ in range(1000)]))
"""


def test_many_readers_of_an_index_on_a_full_tmpfs(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2M") as place:
        done = subprocess.run([sys.executable, "-c", READERS, place], cwd=REPOSITORY, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "1000\n"), done.stderr


def test_a_tmpfs_without_room_for_the_index_is_one_clear_line(dataset: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as place:
        (tmp_path / "mnt").mkdir()
        done = cachefs("mount", dataset, tmp_path / "mnt", "--cache-dir", place / "cache", check=False)
        assert done.returncode == 1 and not mounted_on(tmp_path / "mnt")
        assert "No space left on device" in done.stderr and "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def fill_up(place: Path) -> None:
    fd = os.open(place / "filler", os.O_WRONLY | os.O_CREAT)
    for size in (1 << 16, 4096):
        with suppress(OSError):
            while True:
                os.write(fd, bytes(size))
    os.close(fd)
    assert os.statvfs(place).f_bavail == 0


def processes(m: Mount) -> list[int]:
    status = m.status()
    return [status["pid"], *([status["fastpath"]["pid"]] if status["fastpath"] else [])]


class Sequence:
    """A mount, and things that happen to it."""

    def __init__(self, make: MakeMount, source: Path, draw: random.Random, config: Path) -> None:
        self.draw, self.source, self.config = draw, source, config
        self.choose()
        self.mount = make(source, "--config", config)

    def choose(self, *, reload: bool = False) -> None:
        self.size = self.draw.choice([2, 10, 30, 80]) * MIB
        if not reload:
            self.retention = self.draw.choice(["no-replacement", "lru", "fifo", "retire"])
        self.config.write_text(f'cache-size = "{self.size}"\nretention = "{self.retention}"\n')

    def read(self) -> None:
        root = self.draw.choice(["", "small", "large", "large/d0", "large/d1"])
        read_all(self.mount.path / root, self.draw)

    def rewrite(self) -> None:
        """At the source, some of the files."""
        paths = [path for path in sorted(self.source.rglob("*")) if path.is_file()]
        for path in self.draw.sample(paths, 60):
            path.write_bytes(self.draw.randbytes(path.stat().st_size))

    def evict(self) -> None:
        cachefs("evict", self.mount.path / self.draw.choice(["small", "large/d2"]))

    def remount(self) -> None:
        self.mount.umount()
        self.choose()
        self.mount.start()

    def reload(self) -> None:
        self.choose(reload=True)
        os.kill(self.mount.pid, signal.SIGHUP)
        wait_for(lambda: self.mount.status()["cache_size_bytes"], lambda size: size == self.size)

    def kill_both(self) -> None:
        kill_everything(self.mount)
        self.choose()
        self.mount.start()

    def kill_daemon(self) -> None:
        """With a fast path the mount goes on, and another daemon takes it over."""
        self.mount.kill()
        if Mount.no_fastpath:
            subprocess.run(["umount", "-l", self.mount.path], check=True)
        self.mount.start()

    def kill_fastpath(self) -> None:
        if fast := self.mount.status()["fastpath"]:
            pid = fast["pid"]
            self.mount.killed_fastpaths += 1
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: self.mount.status()["fastpath"]["pid"], lambda now: now not in (0, pid))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sequence" in metafunc.fixturenames:
        metafunc.parametrize("sequence", range(metafunc.config.getoption("--sequences")))


@pytest.mark.promise("CL-6")
def test_a_random_sequence(mount: MakeMount, dataset: Path, tmp_path: Path, sequence: int, random_seed: int) -> None:
    draw = random.Random(f"{random_seed} {sequence}")
    source = tmp_path / "source"
    subprocess.run(["cp", "-a", dataset, source], check=True)
    steps: list[str] = []
    one = Sequence(mount, source, draw, tmp_path / "config.toml")
    try:
        for _ in range(STEPS):
            step = draw.choice([one.read, one.read, one.read, one.rewrite, one.evict, one.remount, one.reload,
                                one.kill_both, one.kill_both, one.kill_daemon, one.kill_fastpath])  # fmt: skip
            steps.append(step.__name__)
            step()
            assert_within(one.mount, one.size)
        one.mount.flush()
        assert one.mount.status()["corrupt_records"] == 0
        one.mount.umount()
        assert_within(one.mount, one.size)
    except BaseException:
        print(", ".join(steps))
        raise


@pytest.mark.promise("CL-14")
def test_what_was_removed_leaves_the_cache_when_nobody_has_it_open(mount: MakeMount, tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_files(source, 4, (100_000, 100_000), 1)
    settle()
    m = mount(source)
    paths = sorted((m.path / "d0").iterdir())
    for path in paths:
        path.read_bytes()
    before = m.flush()["blob_bytes"]
    with open(paths[0], "rb", buffering=0) as opened:
        content = paths[0].read_bytes()
        paths[0].unlink()
        paths[1].unlink()
        paths[2].rename(paths[3])
        wait_for(m.flush, lambda status: status["blob_bytes"] < 0.6 * before)
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        reads = m.ops()["read"]
        assert opened.read() == content and m.ops()["read"] == reads
    wait_for(m.flush, lambda status: status["blob_bytes"] < 0.4 * before)
    assert m.status()["evictions"] == m.status()["corrupt_records"] == 0
    wait_for(lambda: allocated(m.cache / "blob"), lambda taken: taken < 0.8 * before)
