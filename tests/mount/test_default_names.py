"""Default names: files that lie beside data, and that their readers write to, stay mutable without an option."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.options import MUTABLE_NAMES
from tests.conftest import Mount, cachefs, settle

MakeMount = Callable[..., Mount]
BESIDE = (
    *("lock.mdb", "x.lock", ".lock", "x.lck", "x.db-journal", "x.db-wal", "x.db-shm", ".nfs0001", ".x.swp", "x.tmp"),
    *("x.part", "x.incomplete", "__0_0.distcp", ".metadata"),
)
DATA = ("data.mdb", "lock", "xlock.mdb", "x.lock.bin", "nfs0001", "metadata", "x.temp", "x.distcp.pt")


@pytest.fixture
def data(source: Path) -> Path:
    (source / "data").mkdir()
    for name in (*BESIDE, *DATA):
        (source / "data" / name).write_bytes(b"old")
    settle()
    return source


def is_writable(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR))
    except PermissionError:
        return False
    return True


def read_and_write(directory: Path) -> set[str]:
    """The names of those files that can be written to after each was read, in the way that a job reads them."""
    for path in directory.iterdir():
        path.read_bytes()
    return {path.name for path in directory.iterdir() if is_writable(path)}


@pytest.mark.parametrize("read_by", ["a reader", "a warm-up"])
@pytest.mark.parametrize(
    "arguments",
    [(), ("--no-fastpath",), ("--profile", "workspace", "--immutable", "data/**"), ("--mutable", "runs/**")],
    ids=["fast path", "python", "workspace", "mutable"],
)
@pytest.mark.promise("EX-16", "EX-18")
def test_files_beside_data_can_be_written_to_after_they_were_read(
    mount: MakeMount, data: Path, arguments: tuple[str, ...], read_by: str
) -> None:
    m = mount(data, *arguments)
    if read_by == "a warm-up":
        cachefs("warmup", m.path / "data")
    assert read_and_write(m.path / "data") == set(BESIDE)


@pytest.mark.promise("EX-16")
def test_they_are_read_from_the_source(mount: MakeMount, data: Path) -> None:
    m = mount(data)
    for path in (m.path / "data").iterdir():
        path.read_bytes()
    (data / "data/__0_0.distcp").write_bytes(b"another node's")
    (data / "data/data.mdb").write_bytes(b"another node's")
    assert (m.path / "data/__0_0.distcp").read_bytes() == b"another node's"
    assert (m.path / "data/data.mdb").read_bytes() == b"old"
    assert "default names" in cachefs("info", m.path / "data/lock.mdb").stdout


@pytest.mark.promise("EX-17")
def test_a_directory_with_such_a_name_is_like_any_other(mount: MakeMount, source: Path) -> None:
    (source / "set.tmp").mkdir()
    (source / "set.tmp/data").write_bytes(b"old")
    settle()
    m = mount(source)
    assert (m.path / "set.tmp/data").read_bytes() == b"old"
    assert os.getxattr(m.path / "set.tmp", "user.cachefs.state") == b"pinned"
    assert not is_writable(m.path / "set.tmp/data")
    m.flush()
    before = m.ops()
    assert (m.path / "set.tmp/data").read_bytes() == b"old"
    assert m.ops() == before


@pytest.mark.promise("EX-18")
def test_the_default_names_can_be_switched_off_and_replaced(mount: MakeMount, data: Path) -> None:
    m = mount(data, "--no-mutable-defaults", "--mutable", "*.lock")
    assert read_and_write(m.path / "data") == {"x.lock", ".lock"}


@pytest.mark.promise("EX-19")
def test_a_read_only_mount_caches_them_and_a_read_write_mount_compares_them_once(mount: MakeMount, data: Path) -> None:
    m = mount(data, "--read-only")
    for path in (m.path / "data").iterdir():
        path.read_bytes()
    assert m.flush()["cached_files"] == len(BESIDE) + len(DATA)
    m.remount("--revalidate", "never")
    assert read_and_write(m.path / "data") == set(BESIDE)
    m.flush()
    m.remount("--read-only", "--revalidate", "never")
    before = m.ops()
    assert (m.path / "data/data.mdb").read_bytes() == b"old"
    assert m.ops() == before


@pytest.mark.promise("EX-16")
def test_readers_of_lmdb_and_users_of_a_lock_file_work_after_a_warm_up(mount: MakeMount, data: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(data / "db"), map_size=1 << 20) as made, made.begin(write=True) as transaction:
        transaction.put(b"k", b"v")
    settle()
    m = mount(data)
    cachefs("warmup", m.path)
    script = "import lmdb, sys; print(lmdb.open(sys.argv[1], readonly=True).stat()['entries'])"
    assert (
        subprocess.run([sys.executable, "-c", script, m.path / "db"], capture_output=True, check=True).stdout == b"1\n"
    )
    with open(m.path / "data/x.lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def test_the_documents_have_the_list() -> None:
    repository = Path(__file__).resolve().parents[2]
    text = (repository / "docs/SEMANTICS.md").read_text()
    assert ", ".join(f"`{name}`" for name in MUTABLE_NAMES) in " ".join(text.split())
