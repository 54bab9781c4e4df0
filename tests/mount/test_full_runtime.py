"""The filesystem of the runtime directory is full: the mount goes on, slower and correct."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cachefs.client import locations
from cachefs.system import syscalls
from tests.conftest import Mount, cachefs, contents, make_files, mounted_on, settle, small_disk, wait_for

MakeMount = Callable[..., Mount]
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 1 << 14, 1 << 18
FILES = 240
UNREAD = 2500
MODES = {
    "none": ("--cache", "none"),
    "metadata": ("--cache", "metadata"),
    "full": (),
    "read-only": ("--read-only",),
    "read-only-none": ("--read-only", "--cache", "none"),
    "mutable": ("--mutable", "*"),
    "mutable-logs": ("--mutable", "*.log"),
}


@contextmanager
def own_mounts() -> Iterator[None]:
    """Mounts that only this process and its children see."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    where = Path.cwd()
    try:
        assert libc.unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
        syscalls.mount("", "/", "", MS_REC | MS_PRIVATE)
        yield
    finally:
        assert libc.setns(before, CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
        os.chdir(where)
        os.close(before)


class Runtime:
    """A runtime root of 16 MiB."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill_up(self) -> None:
        with open(self._filler, "ab", buffering=0) as filler:
            for size in (1 << 16, 4096):
                with suppress(OSError):
                    while True:
                        filler.write(bytes(size))
        assert os.statvfs(self.path).f_bavail == 0

    def free(self) -> None:
        self._filler.unlink()


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    path = locations.runtime_root()
    path.mkdir(mode=0o700, exist_ok=True)
    with own_mounts():
        syscalls.mount("tmpfs", str(path), "tmpfs", 0, "size=16M,mode=0700")
        yield Runtime(path)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More files than the reserved part of a session has room for."""
    root = tmp_path_factory.mktemp("many")
    make_source(root)
    return root


def said(m: Mount) -> int:
    return m.log().count("cannot be written")


def seen(root: Path) -> dict[Path, bytes | int]:
    """The data of all files; of those in `unread` only the sizes."""
    found: dict[Path, bytes | int] = {}
    for place in sorted(root.iterdir()):
        if place.name == "unread":
            found.update({path.relative_to(root): path.stat().st_size for path in place.iterdir()})
        else:
            found.update({place.name / path: data for path, data in contents(place).items()})
    return found


def overflow(m: Mount, runtime: Runtime) -> None:
    """Look at more names than the session can take: they are not pinned, because no job reads those files."""
    runtime.fill_up()
    assert seen(m.path) == seen(m.source)
    assert m.status()["errors"] >= 1


def make_source(root: Path) -> None:
    make_files(root, FILES, (1, 200), directories=6)
    (root / "unread").mkdir()
    for number in range(UNREAD):
        (root / f"unread/{number}-{'x' * 150}").touch()
    settle()


@pytest.mark.promise("FA-17")
@pytest.mark.parametrize("mode", MODES)
def test_reads_go_on_with_right_bytes(mount: MakeMount, runtime: Runtime, many: Path, mode: str) -> None:
    m = mount(many, *MODES[mode])
    runtime.fill_up()
    expected = seen(many)
    for _ in range(2):
        assert seen(m.path) == expected
        assert sorted(os.listdir(m.path / "d0")) == sorted(os.listdir(many / "d0"))
        m.drop_caches()
    assert m.log().count("cannot be written") <= 1
    runtime.free()
    assert seen(m.path) == expected


@pytest.mark.promise("FA-17")
@pytest.mark.parametrize("mode", ["none", "read-only-none", "full", "mutable"])
def test_it_is_counted_said_once_and_over_when_there_is_room(
    mount: MakeMount, runtime: Runtime, many: Path, mode: str
) -> None:
    """In these modes the session keeps files that the kernel knows and that were never read."""
    m = mount(many, *MODES[mode], "--attr-timeout", "600")
    expected = seen(many)
    overflow(m, runtime)
    assert said(m) == 1
    assert str(runtime.path) in m.log()
    runtime.free()
    wait_for(m.log, lambda log: "can be written again" in log)
    m.drop_caches()
    assert seen(m.path) == expected


@pytest.mark.promise("FA-17")
@pytest.mark.fastpath
@pytest.mark.parametrize("mode", ["full", "mutable-logs"])
def test_the_fast_path_answers_nothing_from_an_index_that_is_not_complete(
    mount: MakeMount, runtime: Runtime, many: Path, mode: str
) -> None:
    m = mount(many, *MODES[mode], "--attr-timeout", "600")
    expected = seen(many)
    overflow(m, runtime)
    runtime.free()
    wait_for(m.log, lambda log: "can be written again" in log)
    for _ in range(2):
        assert seen(m.path) == expected
        m.flush()
        m.drop_caches()
    before = m.status()["fastpath"]
    assert seen(m.path) == expected
    after = m.status()["fastpath"]
    assert after["answered"] > before["answered"] + 2 * FILES  # LOOKUP and READ
    assert after["passed"].get("read", 0) == before["passed"].get("read", 0)


def change_everything(root: Path) -> None:
    (root / "d0/f00000").unlink()
    (root / "d1/f00001").rename(root / "d2/moved")
    (root / "d3/new").write_bytes(b"new" * 1000)
    (root / "d4/made").mkdir()
    (root / "d4").chmod(0o700)
    (root / "d5/f00005").unlink()
    (root / "d5/f00005").write_bytes(b"another")


@pytest.mark.promise("FA-17")
@pytest.mark.parametrize("mode", ["none", "metadata", "full", "mutable"])
def test_changes_show_at_once(mount: MakeMount, runtime: Runtime, tmp_path: Path, mode: str) -> None:
    source = tmp_path / "source"
    make_source(source)
    m = mount(source, *MODES[mode], "--attr-timeout", "600")
    overflow(m, runtime)
    change_everything(m.path)
    assert not (m.path / "d0/f00000").exists() and not (m.path / "d1/f00001").exists()
    assert (m.path / "d4").stat().st_mode & 0o777 == 0o700
    m.drop_caches()
    assert seen(m.path) == seen(source)
    assert (m.path / "d5/f00005").read_bytes() == b"another"
    for number in range(300):
        (m.path / f"d0/more{number}-{'x' * 200}").write_bytes(b"%d" % number)
    assert seen(m.path) == seen(source)
    runtime.free()
    wait_for(m.log, lambda log: "can be written again" in log)
    m.drop_caches()
    assert seen(m.path) == seen(source)


def is_one_line_that_says_where(answer: str, runtime: Runtime) -> bool:
    return len(answer.strip().splitlines()) == 1 and str(runtime.path) in answer and "Traceback" not in answer


@pytest.mark.promise("FA-18")
@pytest.mark.fastpath
@pytest.mark.parametrize("mode", ["none", "full", "read-only"])
def test_a_restart_works_or_says_what_to_free(mount: MakeMount, runtime: Runtime, many: Path, mode: str) -> None:
    m = mount(many, *MODES[mode], "--attr-timeout", "600")
    expected = seen(many)
    if mode == "read-only":  # all is pinned, and leaves the session
        runtime.fill_up()
    else:
        overflow(m, runtime)
    pid = m.status()["pid"]
    done = cachefs("restart", m.path, check=False)
    if done.returncode:
        assert is_one_line_that_says_where(done.stderr, runtime), done.stderr
        assert m.status()["pid"] == pid
    assert (done.returncode == 0) == (mode == "read-only"), done.stderr
    m.drop_caches()
    assert seen(m.path) == expected
    runtime.free()
    cachefs("restart", m.path)
    m.pid = m.status()["pid"]
    assert m.pid != pid
    m.drop_caches()
    assert seen(m.path) == expected


@pytest.mark.promise("FA-19")
@pytest.mark.parametrize(("mode", "kills"), [("none", 1), ("none", 2), ("full", 2), ("read-only-none", 1)])
def test_after_a_kill_the_next_daemon_compares_everything(
    mount: MakeMount, runtime: Runtime, tmp_path: Path, mode: str, kills: int
) -> None:
    source = tmp_path / "source"
    make_source(source)
    arguments = (*MODES[mode], "--attr-timeout", "600", "--revalidate", "never")
    m = mount(source, *arguments)
    overflow(m, runtime)
    change_everything(source if "--read-only" in arguments else m.path)
    if "--read-only" in arguments:
        cachefs("invalidate", m.path)
    settle()
    expected = seen(source)
    for _ in range(kills):
        assert seen(m.path) == expected
        m.kill()
        done = cachefs("mount", source, m.path, "--cache-dir", m.cache, *arguments, *m.given(), check=False)
        if done.returncode:
            assert is_one_line_that_says_where(done.stderr, runtime), done.stderr
            runtime.free()
            m.start()
            runtime.fill_up()
        m.pid = int(m.status()["pid"])
        assert seen(m.path) == expected
        m.drop_caches()
        assert seen(m.path) == expected
    runtime.free()
    assert seen(m.path) == expected


@pytest.mark.promise("FA-21")
def test_a_new_mount_says_what_to_free(runtime: Runtime, many: Path, tmp_path: Path) -> None:
    runtime.fill_up()
    place = tmp_path / "mnt"
    place.mkdir()
    done = cachefs("mount", many, place, "--cache-dir", tmp_path / "cache", check=False)
    assert done.returncode == 1 and is_one_line_that_says_where(done.stderr, runtime), done.stderr
    assert not mounted_on(place)


def test_an_unmount_leaves_nothing_behind(mount: MakeMount, runtime: Runtime, many: Path) -> None:
    m = mount(many, "--cache", "none")
    overflow(m, runtime)
    m.umount()
    assert os.listdir(runtime.path) == ["filler"]


@pytest.mark.promise("FA-20")
@pytest.mark.fastpath
def test_a_full_cache_disk_hinders_neither_a_restart_nor_a_mount_after_a_kill(
    mount: MakeMount, many: Path, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", "32M") as disk:
        m = mount(many, "--read-only", "--cache-size", "1G", cache=disk / "cache")
        expected = seen(many)
        assert contents(m.path / "d0") == contents(many / "d0")
        m.flush()
        Runtime(disk).fill_up()
        assert seen(m.path) == expected
        wait_for(m.status, lambda status: status["errors"] >= 1)
        cachefs("restart", m.path)
        m.pid = int(m.status()["pid"])
        m.drop_caches()
        assert seen(m.path) == expected
        Runtime(disk).fill_up()  # what the last daemon had allocated and not used was given back
        m.kill()
        m.start()
        m.drop_caches()
        assert seen(m.path) == expected
        Runtime(disk).free()
        m.umount()
