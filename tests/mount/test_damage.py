"""The cache may fail, the mount may not: damaged blobs, lost indexes, full disks."""

import errno
import json
import os
import random
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Mount, cachefs, contents, contents_of_damaged, make_files, settle, small_disk, wait_for
from tests.processes import fastpath_pid, kill_fastpath

pytestmark = pytest.mark.promise("FA-16")

MakeMount = Callable[..., Mount]
PAGE = 4096


def filled(mount: MakeMount, source: Path, *arguments: object) -> tuple[Mount, dict[Path, bytes]]:
    """A mount whose cache holds the whole source."""
    m = mount(source, "--read-only", *arguments)
    expected = contents(m.path)
    assert expected == contents(source)
    assert m.flush()["cached_files"] == 40  # the empty file takes no record
    return m, expected


@pytest.mark.promise("TE-2")
@pytest.mark.parametrize("seed", range(5))
def test_flipped_bits_are_noticed_counted_and_fetched_again(mount: MakeMount, source: Path, seed: int) -> None:
    m, expected = filled(mount, source)
    draw = random.Random(seed)
    size = m.status()["blob_bytes"]  # behind it lies space that is allocated and not used
    with open(m.cache / "blob", "r+b") as blob:
        for _ in range(60):
            offset = draw.randrange(size)
            blob.seek(offset)
            byte = blob.read(1)[0]
            blob.seek(offset)
            blob.write(bytes([byte ^ (1 << draw.randrange(8))]))
    m.drop_caches()
    assert contents(m.path) == expected
    status = wait_for(m.status, lambda s: s["cached_files"] == 40 and s["uncommitted"] == 0)
    assert status["corrupt_records"] >= 10 and status["errors"] >= 10
    assert status["source_ops"]["open"] == 40 + status["corrupt_records"]
    m.drop_caches()
    assert contents(m.path) == expected
    assert m.status()["source_ops"] == status["source_ops"]  # fetched again, and cached again


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
def test_a_truncated_blob(mount: MakeMount, source: Path, restart: bool) -> None:
    m, expected = filled(mount, source)
    size = m.status()["blob_bytes"]
    if restart:
        m.umount()
    os.truncate(m.cache / "blob", size // 2)
    if restart:
        m.start("--revalidate", "never")
    m.drop_caches()
    assert contents(m.path) == expected
    status = wait_for(m.status, lambda s: s["cached_files"] == 40 and s["uncommitted"] == 0)
    assert 10 <= status["corrupt_records"] <= 30
    m.drop_caches()
    assert contents(m.path) == expected


@pytest.mark.promise("TE-2")
def test_a_deleted_index_is_rebuilt_from_the_blob_and_revalidated(mount: MakeMount, source: Path) -> None:
    m, expected = filled(mount, source)
    before = m.status()
    m.umount()
    shutil.rmtree(m.cache / "index")
    m.start("--revalidate", "never")
    status = m.status()
    for key in ("cached_files", "cached_bytes", "blob_bytes"):
        assert status[key] == before[key]
    assert contents(m.path) == expected
    assert "open" not in m.ops()  # the data are still there
    assert m.ops()["lstat"] >= 40  # but were compared


def test_a_rebuilt_index_does_not_serve_what_has_changed(mount: MakeMount, source: Path) -> None:
    m, expected = filled(mount, source)
    m.umount()
    shutil.rmtree(m.cache / "index")
    changed = Path("d0/f00000")
    (source / changed).write_bytes(b"x" * len(expected[changed]))
    settle()
    m.start("--revalidate", "never")
    assert contents(m.path) == contents(source) != expected


def test_what_was_dropped_does_not_come_back_to_life(mount: MakeMount, source: Path) -> None:
    m, _ = filled(mount, source)
    cachefs("invalidate", m.path / "d0")
    status = m.flush()
    assert status["cached_files"] == 30
    wait_for(lambda: (m.cache / "blob").stat().st_blocks * 512, lambda size: size < 300_000)
    m.umount()
    shutil.rmtree(m.cache / "index")
    m.start()
    assert m.status()["cached_files"] == 30


def test_an_unreadable_index_is_kept_aside_and_rebuilt(mount: MakeMount, source: Path) -> None:
    m, expected = filled(mount, source)
    m.umount()
    (m.cache / "index/data.mdb").write_bytes(b"this is no database" * 1000)
    m.start()
    assert contents(m.path) == expected
    assert (m.cache / "index.broken").exists()
    assert "open" not in m.ops()


@pytest.mark.promise("FA-33")
def test_an_index_that_was_cut_off_is_rebuilt(mount: MakeMount, source: Path) -> None:
    """Before: the mount failed ("the daemon ended without a message"), or served with files that could not be read."""
    m, expected = filled(mount, source)
    m.umount()
    whole = (m.cache / "index/data.mdb").read_bytes()
    for length in (0, 1, 2 * PAGE, len(whole) // 2, len(whole) - 1):
        shutil.rmtree(m.cache / "index.broken", ignore_errors=True)
        (m.cache / "index/data.mdb").write_bytes(whole[:length])
        m.start()
        assert (m.cache / "index.broken").exists(), length
        assert contents(m.path) == expected
        assert "open" not in m.ops(), length  # the data are still there
        m.umount()


def test_no_damaged_page_of_the_index_stops_a_mount(mount: MakeMount, source: Path) -> None:
    """LMDB finds some of them when the mount begins, others when a request needs them; then the next mount rebuilds it.

    Before: some ended the mount, and a request that met one left a traceback and the damage.
    """
    m, expected = filled(mount, source)
    m.umount()
    whole = (m.cache / "index/data.mdb").read_bytes()
    rebuilt = 0
    for at in range(2 * PAGE, len(whole), PAGE):  # LMDB has two meta pages
        shutil.rmtree(m.cache / "index.broken", ignore_errors=True)
        (m.cache / "index/damaged").unlink(missing_ok=True)
        (m.cache / "index/data.mdb").write_bytes(whole[:at] + bytes(PAGE) + whole[at + PAGE :])
        m.start()
        assert contents(m.path) == expected
        m.umount()
        if (m.cache / "index/damaged").exists():
            m.start()
            assert contents(m.path) == expected
            m.umount()
        rebuilt += (m.cache / "index.broken").exists()
    assert rebuilt
    assert "Traceback" not in m.log()


@pytest.mark.promise("FA-40")
@pytest.mark.parametrize("revalidate", ["auto", "never"])
def test_a_flipped_bit_hides_no_name_of_an_unmounted_cache(mount: MakeMount, source: Path, revalidate: str) -> None:
    """Found by tests/damage: the number of the directory in the key of a row of its listing was another one. The page
    was consistent, and the name was missing, for ever."""
    m, expected = filled(mount, source)
    m.umount()
    name = next(path.name.encode() for path in sorted(expected) if len(path.name) > 5 and path.parent.name)
    data = bytearray((m.cache / "index/data.mdb").read_bytes())
    found, at = 0, data.find(bytes(3) + name)
    while at >= 0:
        row = data[at - 17 : at + 3]  # the key of a listing, two numbers, and the flags
        if row[8:14] == bytes(6):
            data[at - 17] ^= 1
            found += 1
        at = data.find(bytes(3) + name, at + 1)
    assert found
    (m.cache / "index/data.mdb").write_bytes(data)
    m.start("--revalidate", revalidate)
    assert contents(m.path) == expected
    assert (m.cache / "index.broken").exists()
    assert "open" not in m.ops()  # the data are still there


@pytest.mark.promise("FA-34", "FA-35", "TE-2")
@pytest.mark.parametrize("mode", [["--read-only"], []], ids=["read-only", "read-write"])
def test_pages_that_are_damaged_while_a_mount_serves(mount: MakeMount, source: Path, mode: list[str]) -> None:
    """Before: EIO for what they held, in every epoch until the next mount."""
    m = mount(source, *mode)
    expected = contents(m.path)
    m.flush()
    with open(m.cache / "index/data.mdb", "r+b") as index:
        size = os.fstat(index.fileno()).st_size
        for at in range(2 * PAGE, size, PAGE):
            index.seek(at)
            index.write(bytes(PAGE))
            index.flush()
            assert contents(m.path) == expected, at
            m.drop_caches()
            assert contents(m.path) == expected, at
    assert m.status()["index_problem"]
    assert m.log().count("the index is damaged") == 1


def pages_of_links(index: bytes) -> Iterator[int]:
    """Where the leaf pages of the table LINKS begin: keys of two numbers and a name, values of four bytes."""
    for at in range(2 * PAGE, len(index), PAGE):
        flags, lower = struct.unpack_from("<2H", index, at + 10)
        if flags == 2 and lower > 16:
            (first,) = struct.unpack_from("<H", index, at + 16)
            value_bytes, _, _, key_bytes = struct.unpack_from("<4H", index, at + first)
            if value_bytes == 4 and key_bytes > 16:
                yield at


@pytest.mark.fastpath
@pytest.mark.promise("FA-34")
def test_a_report_of_the_fast_path_that_is_the_first_to_meet_damage(mount: MakeMount, source: Path) -> None:
    """An attack saw "bug in a report of the fast path". This test has not shown it: a request met the damage first."""
    m = mount(source, "--mutable", "*.log")
    files = sorted(path for path in m.path.rglob("*") if path.is_file())
    first, rest = files[: len(files) // 2], files[len(files) // 2 :]
    expected = {path: (source / path.relative_to(m.path)).read_bytes() for path in files}
    assert {path: path.read_bytes() for path in first} == {path: expected[path] for path in first}
    m.flush()
    data = m.cache / "index/data.mdb"
    with open(data, "r+b") as index:
        for at in pages_of_links(data.read_bytes()):
            index.seek(at)
            index.write(bytes(PAGE))
    assert {path: path.read_bytes() for path in rest} == {path: expected[path] for path in rest}
    wait_for(lambda: m.status()["index_problem"], bool)
    assert "bug in" not in m.log() and m.status()["fastpath"]["starts"] == 1


@pytest.mark.fastpath
@pytest.mark.promise("FA-34")
@pytest.mark.parametrize("mode", [["--read-only"], []], ids=["read-only", "read-write"])
def test_the_fast_path_survives_a_meta_page_of_zeros(mount: MakeMount, source: Path, mode: list[str]) -> None:
    """LMDB ended it where it looked for the tables. A request that was on its way to the daemon could get EIO."""
    m, expected = filled(mount, source, *mode)
    pid = fastpath_pid(m)
    with open(m.cache / "index/data.mdb", "r+b") as file:
        transactions = [int.from_bytes(os.pread(file.fileno(), 8, number * PAGE + 144), "little") for number in (0, 1)]
        os.pwrite(file.fileno(), bytes(PAGE), transactions.index(max(transactions)) * PAGE)
    m.drop_caches()
    assert contents_of_damaged(m.path) == expected
    assert fastpath_pid(m) == pid


@pytest.mark.promise("FA-34")
@pytest.mark.parametrize("mode", [["--read-only"], [], ["--no-fastpath"]], ids=["read-only", "read-write", "Python"])
def test_the_daemon_survives_meta_pages_of_other_bytes(mount: MakeMount, source: Path, mode: list[str]) -> None:
    """Before: EIO for everything, because LMDB finds that another process has enlarged the index."""
    m = mount(source, *mode)
    expected = contents(m.path)
    m.flush()
    with open(m.cache / "index/data.mdb", "r+b") as file:
        os.pwrite(file.fileno(), random.Random(1).randbytes(2 * PAGE), 0)
    m.drop_caches()
    assert contents_of_damaged(m.path) == expected
    if "--read-only" not in mode:
        (m.path / "new").write_bytes(b"content")
    m.drop_caches()
    assert contents(m.path) == contents(source)


@pytest.mark.fastpath
@pytest.mark.promise("FA-34")
@pytest.mark.parametrize("mode", [["--read-only"], []], ids=["read-only", "read-write"])
def test_a_directory_is_listed_although_its_name_is_lost(mount: MakeMount, source: Path, mode: list[str]) -> None:
    """Found by tests/damage: ESTALE, in each epoch until the kernel forgot the directory."""
    m = mount(source, *mode)
    expected = contents(m.path)
    m.flush()
    cachefs("restart", m.path)  # the kernel knows directories that the daemon has not looked up
    m.pid = int(m.status()["pid"])
    with open(m.cache / "index/data.mdb", "r+b") as index:
        lost = list(pages_of_links(index.read()))
        for at in lost:
            os.pwrite(index.fileno(), bytes(PAGE), at)
    assert lost
    for _ in range(2):
        assert contents(m.path) == expected
        m.drop_caches()
    assert m.status()["index_problem"]


@pytest.mark.promise("FA-34")
def test_damage_that_the_end_of_a_mount_meets_is_no_failure(mount: MakeMount, source: Path) -> None:
    """Found by tests/damage: "the daemon has failed", with a traceback, because those who are told were closed."""
    m, expected = filled(mount, source)
    with open(m.cache / "index/data.mdb", "r+b") as index:
        size = os.fstat(index.fileno()).st_size
        os.pwrite(index.fileno(), bytes(size - 2 * PAGE), 2 * PAGE)
    m.umount()
    assert "Traceback" not in m.log()
    m.start()
    assert contents(m.path) == expected


@pytest.mark.promise("FA-35")
def test_a_command_that_is_the_first_to_meet_damage_is_answered(mount: MakeMount, source: Path) -> None:
    """Found by tests/damage: `cachefs status` failed with the error of LMDB."""
    m, expected = filled(mount, source)
    with open(m.cache / "index/data.mdb", "r+b") as index:
        size = os.fstat(index.fileno()).st_size
        index.seek(2 * PAGE)
        index.write(bytes(size - 2 * PAGE))
        index.flush()
    assert m.status()["pid"] == m.pid
    cachefs("invalidate", m.path / "d0")
    assert "run `cachefs restart`" in " ".join(cachefs("status", m.path).stdout.split())
    assert contents(m.path) == expected


@pytest.mark.fastpath
@pytest.mark.promise("FA-36")
@pytest.mark.parametrize(
    ("damage", "way"), [("zeroed", "restart"), ("exchanged", "restart"), ("zeroed", "kill"), ("cut off", "kill")]
)
def test_the_next_daemon_of_a_mount_rebuilds_a_damaged_index(
    mount: MakeMount, source: Path, damage: str, way: str
) -> None:
    """Before: "internal error", or "…/session is gone", and no daemon any more."""
    m, expected = filled(mount, source)
    index = m.cache / "index/data.mdb"
    count = index.stat().st_size // PAGE
    if way == "kill":
        m.kill()
    with open(index, "r+b") as file:
        first = os.pread(file.fileno(), PAGE, 2 * PAGE)
        for number in range(2, count):
            os.pwrite(file.fileno(), bytes(PAGE) if damage == "zeroed" else first, number * PAGE)
    if damage == "cut off":
        os.truncate(index, 5 * PAGE)
    if way == "kill":
        m.start()
    else:
        assert contents_of_damaged(m.path) == expected
        cachefs("restart", m.path)
    m.drop_caches()
    assert contents(m.path) == expected
    status = m.status()
    assert not status["index_problem"] and (m.cache / "index.broken").exists()
    assert status["cached_files"] == 40
    m.drop_caches()
    before = m.ops().get("open", 0)
    assert contents(m.path) == expected
    assert m.ops().get("open", 0) == before  # served from the blob again


@pytest.mark.fastpath
@pytest.mark.promise("FA-41")
@pytest.mark.parametrize("damage", ["deleted", "zeroed"])
def test_files_that_were_open_when_the_index_was_lost_must_be_opened_again(
    mount: MakeMount, source: Path, damage: str
) -> None:
    m, expected = filled(mount, source)
    opened = {path: os.open(m.path / path, os.O_RDONLY) for path in expected}
    index = m.cache / "index/data.mdb"
    if damage == "deleted":
        index.unlink()
    else:
        with open(index, "r+b") as file:
            os.pwrite(file.fileno(), bytes(index.stat().st_size - 2 * PAGE), 2 * PAGE)
    m.kill()
    m.start()
    m.drop_caches()
    for path, fd in opened.items():
        try:
            assert os.pread(fd, len(expected[path]), 0) == expected[path]
        except OSError as error:
            assert error.errno == errno.ESTALE
        os.close(fd)
    assert contents(m.path) == expected


@pytest.mark.fastpath
@pytest.mark.promise("FA-43")
@pytest.mark.parametrize("mode", [["--read-only"], []], ids=["read-only", "read-write"])
def test_the_next_fast_path_does_not_use_an_older_copy_of_the_index(
    mount: MakeMount, source: Path, mode: list[str]
) -> None:
    """A backup was put in the place of the cache of a mount. Files had the attributes of one version, the data of
    another."""
    m = mount(source, *mode)
    expected = contents(m.path)
    m.flush()
    backup = m.cache.with_name("backup")
    shutil.copytree(m.cache, backup)
    for path, data in expected.items():
        (source / path).write_bytes(data[::-1] + b"longer")
    settle()
    for path in expected:
        cachefs("invalidate", m.path / path)
    assert contents(m.path) == contents(source)
    m.flush()
    m.cache.rename(m.cache.with_name("moved"))
    backup.rename(m.cache)
    kill_fastpath(m)
    m.drop_caches()
    assert contents(m.path) == contents(source)
    assert {path: (m.path / path).stat().st_size for path in expected} == {
        path: (source / path).stat().st_size for path in expected
    }


def test_a_lost_secret_empties_the_cache(mount: MakeMount, source: Path) -> None:
    m, expected = filled(mount, source)
    m.umount()
    (m.cache / "secret").unlink()
    m.start()
    assert m.status()["cached_files"] == 0
    assert contents(m.path) == expected


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MiB."""
    with small_disk(tmp_path / "disk", "3M") as place:
        yield place


@pytest.mark.promise("TE-2")
def test_a_disk_that_fills_up_costs_hits_and_nothing_else(tiny_disk: Path, mount: MakeMount, tmp_path: Path) -> None:
    source = tmp_path / "bigger"
    make_files(source, 100, (90_000, 110_000))
    settle()
    m = mount(source, "--cache-size", "1G", cache=tiny_disk / "cache")
    expected = contents(source)
    for _ in range(2):
        assert contents(m.path) == expected
        m.drop_caches()
    wait_for(m.status, lambda status: status["errors"] >= 1 and status["skipped_admissions"] >= 1)
    assert "cannot be written" in m.log()
    (m.path / "still writable").write_bytes(b"yes")
    cachefs("invalidate", m.path / "d0")
    assert contents(m.path) == contents(source)


def test_a_command_that_a_full_disk_prevents_says_so(mount: MakeMount, tiny_disk: Path, source: Path) -> None:
    """Before: "could not write everything within 60 s", at once."""
    m = mount(source, "--read-only", cache=tiny_disk / "cache")
    with suppress(OSError), open(tiny_disk / "filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    assert contents(m.path) == contents(source)
    wait_for(m.status, lambda status: status["errors"])
    done = cachefs("snapshot", "export", m.path, tiny_disk.parent / "snapshot", check=False)
    assert done.returncode == 1 and done.stderr.startswith("cachefs: the index cannot be written (a full disk")


@pytest.mark.parametrize("moment", range(6))
def test_a_kill_at_any_moment_of_the_first_epoch(mount: MakeMount, source: Path, moment: int) -> None:
    """Committed data are served, other data are fetched again; never a wrong byte."""
    make_files(source, 400, (1000, 60_000), directories=6, seed=moment)
    settle()
    m = mount(source)
    expected = contents(source)
    for index, path in enumerate(expected):
        (m.path / path).read_bytes()
        if index == 70 * moment:
            break
    m.kill()
    m.start("--revalidate", "never")
    assert contents(m.path) == expected
    assert m.flush()["errors"] == 0
    asked = [m.ops()]
    while asked[-10:] != 10 * asked[-1:]:  # the directories above are compared after the files have been opened
        time.sleep(0.05)
        asked.append(m.ops())
    before = asked[-1]
    m.drop_caches()
    assert {path: (m.path / path).read_bytes() for path in expected} == expected
    assert m.ops() == before


@pytest.mark.promise("IM-5", "CL-15")
@pytest.mark.parametrize("way", ["unlinked", "replaced"])
@pytest.mark.parametrize("lost", ["damaged", "evicted"])
def test_an_open_file_without_a_name_outlives_its_data_in_the_cache(
    mount: MakeMount, source: Path, way: str, lost: str
) -> None:
    """It was completely cached when its name was removed."""
    (source / "victim").write_bytes(os.urandom(300_000))
    others = make_files(source / "others", 300, (60_000, 70_000))
    settle()
    m = mount(source, "--retention", "lru", "--cache-size", "8M")
    path = m.path / "victim"
    content = path.read_bytes()
    wait_for(lambda: misses(m, path), lambda count: count == 0)
    with open(path, "rb", buffering=0) as opened:
        if way == "unlinked":
            path.unlink()
        else:
            (m.path / "new").write_bytes(b"the new one")
            (m.path / "new").rename(path)
        if lost == "damaged":
            with open(m.cache / "blob", "r+b") as blob:
                blob.truncate(0)
        else:
            wait_for(partial(read_all, m, others), lambda status: status["evictions"] > 10)
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert opened.read() == content
    wait_for(lambda: descriptors_of(m.pid, "victim"), lambda count: count == 0)


def read_all(m: Mount, names: Iterable[str]) -> dict[str, Any]:
    """Past the kernel's pages. Data for which the cache is too slow are not cached."""
    m.drop_caches()
    for name in names:
        (m.path / "others" / name).read_bytes()
    return m.flush()


def misses(m: Mount, path: Path) -> int:
    """While it is read past the kernel's page cache."""
    before = m.status()["misses"]
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.read()
    return int(m.status()["misses"] - before)


def descriptors_of(pid: int, name: str) -> int:
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += name in os.readlink(link)
    return found


IDENTITY_DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: os.truncate(file, 9),
    "empty": lambda file: os.truncate(file, 0),
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "a bit in the path": lambda file: file.write_bytes(file.read_bytes().replace(b"trees", b"uress")),
    "a bit in the format": lambda file: file.write_bytes(file.read_bytes().replace(b": 1,", b": 3,")),
    "not an object": lambda file: file.write_text("[1, 2]"),
    "missing": lambda file: file.unlink(),
}


@pytest.mark.promise("FA-29")
@pytest.mark.parametrize("damage", IDENTITY_DAMAGE)
def test_a_damaged_identity_of_the_cache_costs_the_cache(mount: MakeMount, source: Path, damage: str) -> None:
    """Regression: the mount was refused, and after a bit in the path it said that the cache was another source's."""
    m, expected = filled(mount, source)
    m.umount()
    IDENTITY_DAMAGE[damage](m.cache / "cache.json")
    done = cachefs("mount", source, m.path, "--cache-dir", m.cache, *Mount.given(), "--read-only")
    m.pid = int(m.status()["pid"])
    assert done.stderr.count("\n") == 1 and "the cache starts empty" in done.stderr, done.stderr
    assert contents(m.path) == expected
    status = m.flush()
    assert status["cached_files"] == 40 and status["source_ops"]["open"] >= 40  # nothing of the old cache is used
    m.remount("--read-only")
    assert contents(m.path) == expected
    assert m.status()["misses"] == 0


@pytest.mark.promise("FA-29")
@pytest.mark.fastpath
@pytest.mark.parametrize("damage", IDENTITY_DAMAGE)
@pytest.mark.parametrize("killed", [False, True])
def test_a_damaged_identity_of_the_cache_of_a_living_mount(
    mount: MakeMount, source: Path, damage: str, killed: bool
) -> None:
    m, expected = filled(mount, source)
    whole = json.loads((m.cache / "cache.json").read_bytes())
    fetched = m.ops()["open"]
    if killed:
        m.kill()
    IDENTITY_DAMAGE[damage](m.cache / "cache.json")
    cachefs("restart", m.path)
    m.pid = int(m.status()["pid"])
    again = json.loads((m.cache / "cache.json").read_bytes())
    assert again["source"] == whole["source"] and again["filesystem"] != whole["filesystem"]
    assert contents(m.path) == expected and m.ops()["open"] == fetched
    m.umount()
    m.start()  # nothing proves that the source is still the same filesystem
    assert m.status()["cached_files"] == 0 and contents(m.path) == expected
