"""Files that changed a moment ago (hazard 25): their data are served, but neither cached nor kept by the kernel."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from cachefs.client.client import Client
from tests.conftest import Mount, cachefs, drop_caches_of, make_files, settle, wait_for
from tests.holder import Holder
from tests.stalled_write import HALF, StalledWrite

pytestmark = pytest.mark.full_age  # what it is about

MakeMount = Callable[..., Mount]
MODES = pytest.mark.parametrize(
    "mode", [("--read-only",), (), ("--mutable", "victim")], ids=["read-only", "read-write", "mutable"]
)
HOUR_S = 3600
MANY = 1500


@pytest.mark.promise("CH-13")
@MODES
def test_what_is_read_during_a_write_is_not_there_afterwards(
    mount: MakeMount, source: Path, tmp_path: Path, faulty: tuple[Path, Path], mode: tuple[str, ...]
) -> None:
    """The kernel sets the times before it copies, so no comparison of times can tell."""
    slow, faults = faulty
    place = tmp_path / "place"
    place.mkdir()
    old, new = b"a" * 2 * HALF, b"b" * 2 * HALF
    (place / "victim").write_bytes(old)
    (slow / "rest").write_bytes(new[HALF:])
    drop_caches_of(slow)  # the rest must come from there
    settle()
    m = mount(place, *mode)
    with StalledWrite(place / "victim", new[:HALF], slow / "rest", faults):
        opened = os.open(m.path / "victim", os.O_RDONLY)
        torn = os.read(opened, 4 * HALF)
    try:
        assert (place / "victim").read_bytes() == new
        wait_for((m.path / "victim").read_bytes, lambda content: bool(content == new))
        if torn != old:  # the same version, by a handle that stays open
            wait_for(lambda: os.pread(opened, 4 * HALF, 0), lambda content: bool(content == new))
    finally:
        os.close(opened)
    if "--mutable" in mode:
        return

    def is_cached() -> bool:
        m.drop_caches()
        assert (m.path / "victim").read_bytes() == new
        return bool(m.flush()["cached_bytes"] == len(new))

    wait_for(is_cached, bool)


@pytest.mark.promise("CH-14")
@pytest.mark.parametrize("mode", [("--read-only",), ()], ids=["read-only", "read-write"])
def test_a_young_file_is_served_and_counted_and_cached_when_it_is_old_enough(
    mount: MakeMount, source: Path, mode: tuple[str, ...]
) -> None:
    m = mount(source, *mode)
    path = source / "d0/f00000"
    os.utime(path, (1, 1))
    content = path.read_bytes()
    assert (m.path / "d0/f00000").read_bytes() == content
    first = m.flush()
    assert (first["cached_files"], first["young_reads"], first["skipped_admissions"]) == (0, 1, 0)

    def is_cached() -> bool:
        m.drop_caches()
        assert (m.path / "d0/f00000").read_bytes() == content
        return bool(m.flush()["cached_files"])

    wait_for(is_cached, bool)


@pytest.mark.promise("CH-13")
def test_each_open_of_a_young_file_reads_it_anew(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    os.utime(source / "d0/f00000", (1, 1))
    for count in range(1, 4):
        (m.path / "d0/f00000").read_bytes()
        assert m.status()["young_reads"] == count


EVERY_MODE = pytest.mark.parametrize(
    "mode",
    [("--read-only",), (), ("--mutable", "**"), ("--cache", "none"), ("--cache", "metadata")],
    ids=["read-only", "read-write", "mutable", "none", "metadata"],
)


def replace_processes(m: Mount, what: str) -> None:
    if what == "daemon":
        m.kill()
        m.start()
    elif what == "fast path":
        os.kill(m.status()["fastpath"]["pid"], signal.SIGKILL)
        m.killed_fastpaths += 1
    else:
        cachefs("restart", m.path)
        m.pid = int(m.status()["pid"])


@pytest.mark.promise("CH-16")
@pytest.mark.fastpath
@EVERY_MODE
@pytest.mark.parametrize("what", ["daemon", "fast path", "both by restart"])
def test_pages_of_a_young_file_are_dropped_whatever_dies(
    mount: MakeMount, source: Path, mode: tuple[str, ...], what: str
) -> None:
    """Also files that Python has read, which the fast path does not know."""
    m = mount(source, *mode)
    (source / "d0/f00000").write_bytes(b"x" * 5000)
    with Holder(m.path / "d0/f00000", flags=os.O_RDONLY) as holder:

        def reads() -> int:
            assert holder.ask("kinds", 0) == "x"
            return m.ops().get("read", 0)

        reads()
        replace_processes(m, what)
        before = m.ops().get("read", 0)
        wait_for(reads, lambda count: count > before)


@pytest.mark.promise("CH-16")
@pytest.mark.fastpath
@EVERY_MODE
@pytest.mark.parametrize("what", ["daemon", "both by restart"])
def test_what_is_read_during_a_write_is_not_there_after_a_take_over(
    mount: MakeMount, tmp_path: Path, faulty: tuple[Path, Path], mode: tuple[str, ...], what: str
) -> None:
    """A daemon that dies within two seconds of the read cannot drop the kernel's pages; its successor does."""
    slow, faults = faulty
    place = tmp_path / "place"
    place.mkdir()
    old, new = b"a" * 2 * HALF, b"b" * 2 * HALF
    (place / "victim").write_bytes(old)
    (slow / "rest").write_bytes(new[HALF:])
    drop_caches_of(slow)  # the rest must come from there
    settle()
    m = mount(place, *mode)
    with ExitStack() as cleanup:
        with StalledWrite(place / "victim", new[:HALF], slow / "rest", faults):
            holder = cleanup.enter_context(Holder(m.path / "victim", flags=os.O_RDONLY))
            read = holder.ask("kinds", 0)
            replace_processes(m, what)
        assert (place / "victim").read_bytes() == new
        if read != "a":  # the same version, by a handle that stays open: an open might drop the pages
            wait_for(lambda: holder.ask("kinds", 0), lambda kinds: kinds == "b")
        wait_for((m.path / "victim").read_bytes, lambda content: bool(content == new))


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Enough files that fetching them takes longer than they stay young."""
    root = tmp_path / "many"
    make_files(root, MANY, (100, 4000), directories=1)
    return root


def touch(root: Path) -> None:
    """Make all files young for two seconds."""
    for path in root.rglob("f*"):
        os.utime(path, (1, 1))


def look_at(root: Path) -> None:
    for directory, _, _ in os.walk(root):
        with os.scandir(directory) as entries:
            for entry in entries:
                entry.stat(follow_symlinks=False)


@pytest.mark.parametrize("mode", [("--read-only",), ()], ids=["read-only", "read-write"])
def test_a_warm_up_waits_until_young_files_are_old_enough(mount: MakeMount, many: Path, mode: tuple[str, ...]) -> None:
    """Regression: files that were looked at while young expired during the warm-up and were not fetched."""
    m = mount(many, *mode, "--simulate-latency", "1")
    touch(many)
    look_at(m.path)
    report = json.loads(cachefs("warmup", m.path, "--json", "--jobs", "1", check=False).stdout)
    assert (report["files"], report["cached_files"], report["problems"]) == (MANY, MANY, [])
    assert m.status()["cached_files"] == MANY


def test_prefetching_waits_until_young_files_are_old_enough(mount: MakeMount, many: Path) -> None:
    """Regression: as with a warm-up."""
    touch(many)
    m = mount(many, "--read-only", "--prefetch", "all", "--simulate-latency", "10")
    look_at(m.path)
    wait_for(lambda: m.status()["cached_files"], lambda count: count == MANY)


def test_hints_wait_until_young_files_are_old_enough(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    touch(source)
    Client(m.path).will_read([m.path / "d0/f00000", m.path / "d1/f00001"])
    wait_for(lambda: m.status()["cached_files"], lambda count: count == 2)


def test_a_young_large_file_claims_its_room_once(mount: MakeMount, source: Path) -> None:
    """Regression: the rest was requested again when the file's record had expired, and its room was claimed again."""
    with open(source / "large", "wb") as file:
        file.truncate(96 << 20)
    m = mount(source, "--read-only", "--cache-size", "128M", "--simulate-latency", "100")
    os.utime(source / "large", (1, 1))
    report = json.loads(cachefs("warmup", m.path / "large", "--json", "--jobs", "1", check=False).stdout)
    assert (report["cached_files"], report["problems"]) == (1, [])


def test_a_warm_up_says_what_changes_all_the_time(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    stop = threading.Event()

    def touch_often() -> None:
        while not stop.wait(0.05):
            os.utime(source / "d0/f00000", (1, 1))

    os.utime(source / "d0/f00000", (1, 1))

    toucher = threading.Thread(target=touch_often)
    toucher.start()
    try:
        report = json.loads(cachefs("warmup", m.path, "--json", check=False).stdout)
    finally:
        stop.set()
        toucher.join()
    assert (report["files"], report["cached_files"]) == (41, 40)
    assert report["problems"] == [f"{m.path}/d0/f00000: it changes again and again, or changed a moment ago"]


# --- with a shorter minimum age -----------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--no-fastpath",)], ids=["", "no-fastpath"])
def test_a_smaller_minimum_age_is_kept_by_every_daemon_and_said_to_be_for_tests(
    mount: MakeMount, source: Path, more: tuple[str, ...]
) -> None:
    m = mount(source, "--read-only", "--minimum-age", "0.1", *more)
    served_by_python = bool(more) or m.no_fastpath

    def is_cached(name: str) -> bool:
        """A file that was read as soon as it was a tenth of a second old."""
        before = m.flush()["cached_files"]
        (source / name).write_bytes(b"content")
        time.sleep(0.15)
        assert (m.path / name).read_bytes() == b"content"
        return bool(m.flush()["cached_files"] == before + 1)

    assert is_cached("first")
    if served_by_python:
        m.umount()
        m.start()
    else:
        cachefs("restart", m.path)
        m.pid = int(m.status()["pid"])
        assert is_cached("second")
        m.kill()
        m.start()
    assert is_cached("third")
    assert m.log().count("--minimum-age is for tests") == (2 if served_by_python else 3)
    m.umount()
    m.arguments = ("--read-only", *more)
    m.start()
    assert not is_cached("fourth")


@pytest.mark.promise("CH-12")
@pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
def test_attributes_and_names_of_what_is_young_are_asked_for_again(
    mount: MakeMount, source: Path, mode: list[str]
) -> None:
    m = mount(source, "--read-only", *mode)
    (source / "young").write_bytes(b"1")
    (source / "directory").mkdir()
    assert (m.path / "young").stat().st_size == 1 and os.listdir(m.path / "directory") == []
    (source / "young").write_bytes(b"12345")
    (source / "directory/new").touch()
    wait_for((m.path / "young").stat, lambda now: now.st_size == 5)
    wait_for(lambda: os.listdir(m.path / "directory"), lambda names: names == ["new"])


@pytest.mark.promise("CH-13", "CH-29")
@MODES
def test_a_write_that_began_late_in_a_second_leaves_no_mix_of_versions(
    mount: MakeMount, old_ext4: Path, faulty: tuple[Path, Path], mode: tuple[str, ...]
) -> None:
    """Times in whole seconds: the file seemed to be two seconds old one second after the write had begun."""
    slow, faults = faulty
    old, new = b"a" * 2 * HALF, b"b" * 2 * HALF
    (old_ext4 / "victim").write_bytes(old)
    (slow / "rest").write_bytes(new[HALF:])
    settle()
    m = mount(old_ext4, *mode)
    for _ in range(5):
        drop_caches_of(slow)  # the rest must come from there
        time.sleep(1.9 - time.time() % 1)
        began_s = time.time()
        with StalledWrite(old_ext4 / "victim", new[:HALF], slow / "rest", faults):
            changed_s = int(os.stat(old_ext4 / "victim").st_ctime)
            time.sleep(max(0.0, changed_s + 2.03 - time.time()))
            torn = (m.path / "victim").read_bytes()
            took_s = time.time() - began_s
        if changed_s < began_s and took_s < 1.9 and torn != new:
            break
        (old_ext4 / "victim").write_bytes(old)
        settle()
    else:
        raise AssertionError("no write was quick enough")
    wait_for(lambda: (m.path / "victim").read_bytes() == new, bool)


@pytest.mark.promise("CH-12", "CH-48")
@pytest.mark.parametrize(
    ("mode", "again"),
    [([], "later"), ([], "restart"), ([], "new mount"), (["--no-fastpath"], "later"), (["--no-fastpath"], "new mount")],
)
def test_names_that_come_and_go_in_the_second_of_a_listing_and_of_an_absence_show_up(
    mount: MakeMount, old_ext4: Path, mode: list[str], again: str
) -> None:
    """Times in whole seconds: the directory has the same times before and after. The listing was empty for good: the
    former name was gone, and the new one was not known."""
    m = mount(old_ext4, "--read-only", *mode)
    for attempt in range(10):
        listed, asked = (f"{each}{attempt}" for each in ("listed", "asked"))
        time.sleep(1.02 - time.time() % 1)
        for directory in (listed, asked):
            (old_ext4 / directory).mkdir()
            (old_ext4 / directory / "former").touch()
        before = [os.stat(old_ext4 / directory).st_ctime_ns for directory in (listed, asked)]
        assert os.listdir(m.path / listed) == ["former"] and not (m.path / asked / "new").exists()
        for directory in (listed, asked):
            (old_ext4 / directory / "former").rename(old_ext4 / directory / "new")
        if before == [os.stat(old_ext4 / directory).st_ctime_ns for directory in (listed, asked)]:
            break
    else:
        raise AssertionError("nothing was quick enough")
    settle()
    if again == "restart":
        cachefs("restart", m.path)
    wait_for(lambda: os.listdir(m.path / listed), lambda names: names == ["new"])
    if again == "new mount":
        m.umount()
        m.start()
    assert os.listdir(m.path / listed) == ["new"] and (m.path / asked / "new").exists()


@pytest.mark.promise("CH-48")
@pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
def test_a_name_that_was_missing_from_a_new_directory_shows_up(mount: MakeMount, source: Path, mode: list[str]) -> None:
    """Before: it stayed missing, although the times of the directory had changed."""
    m = mount(source, "--read-only", *mode)
    (source / "directory").mkdir()
    assert not (m.path / "directory/name").exists()
    time.sleep(0.3)
    (source / "directory/name").touch()
    wait_for((m.path / "directory/name").exists, bool)
    assert not (m.path / "directory/other").exists()
    settle()
    assert not (m.path / "directory/other").exists()
    (source / "directory/other").touch()
    settle()
    assert not (m.path / "directory/other").exists()  # the directory had settled


@pytest.mark.promise("CH-13", "CH-14")
@pytest.mark.parametrize("mode", [["--read-only"], [], ["--read-only", "--no-fastpath"]], ids="-".join)
@pytest.mark.parametrize("which", ["ctime", "mtime"])
def test_the_change_time_makes_a_file_young(mount: MakeMount, source: Path, mode: list[str], which: str) -> None:
    """A modification time can be set, and says nothing where there are change times."""
    path, future = source / "d0/f00000", time.time() + HOUR_S
    if which == "mtime":
        os.utime(path, (future, future))
        settle()
    m = mount(source, *mode)
    if which == "ctime":
        os.utime(path, (1, 1))
    (m.path / "d0/f00000").read_bytes()
    assert (m.flush()["cached_files"], m.status()["young_reads"]) == ((0, 1) if which == "ctime" else (1, 0))
