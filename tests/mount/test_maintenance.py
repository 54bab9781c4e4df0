"""verify, gc and doctor."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from daemon.output import readable_size
from tests.conftest import Mount, cachefs, contents, make_files, settle

MakeMount = Callable[..., Mount]


def spoil(m: Mount, path: Path) -> int:
    """Flip a byte of a file's record; return its place in the blob."""
    (extent,) = json.loads(cachefs("info", path, "--json").stdout)["extents"]
    with open(m.cache / "blob", "r+b") as blob:
        blob.seek(extent["blob_offset"] + 10)
        byte = blob.read(1)
        blob.seek(-1, os.SEEK_CUR)
        blob.write(bytes([byte[0] ^ 0x40]))
        blob.flush()
        os.fsync(blob.fileno())
    return int(extent["blob_offset"])


def test_verify_finds_and_repairs(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    cachefs("warmup", m.path)
    done = cachefs("verify", m.path)
    assert done.stdout == f"40 records, {size(m)}: 0 corrupt, 0 of files that are gone\n"
    spoil(m, m.path / "d0/f00000")
    spoil(m, m.path / "d3/f00003")
    done = cachefs("verify", m.path, check=False)
    assert done.returncode == 1 and ": 2 corrupt, 0 of files that are gone" in done.stdout
    assert done.stderr.count("payload checksum") == 2
    done = cachefs("verify", m.path, "--repair")
    assert "2 dropped; they will be fetched again" in done.stdout
    status = m.flush()
    assert status["cached_files"] == 38 and status["corrupt_records"] == 2
    assert ": 0 corrupt, " in cachefs("verify", m.path).stdout
    assert contents(m.path) == contents(source)
    assert m.flush()["cached_files"] == 40
    assert m.ops()["read"] == 42


def size(m: Mount) -> str:
    return readable_size(m.status()["cached_bytes"])


def test_verify_while_it_is_read_and_evicted(mount: MakeMount, tmp_path: Path) -> None:
    make_files(tmp_path / "source", 200, (30_000, 40_000))
    settle()
    m = mount(tmp_path / "source", "--read-only", "--cache-size", "3M", "--retention", "lru")
    for _ in range(3):
        assert contents(m.path) == contents(tmp_path / "source")
        assert ": 0 corrupt, 0 of files that are gone" in cachefs("verify", m.path).stdout


def test_gc(source: Path, mount: MakeMount, tmp_path: Path) -> None:
    root = tmp_path / "caches"
    gone = tmp_path / "gone"
    make_files(gone, 10)
    settle()
    used = mount(source, "--read-only", cache=root / "used")
    for name, place in (("kept", source), ("lost", gone)):
        m = mount(place, "--read-only", name=f"mnt-{name}", cache=root / name)
        contents(m.path)
        m.umount()
    (root / "other").mkdir()
    shutil.rmtree(gone)
    done = cachefs("gc", "--root", root)
    assert done.stdout.startswith(f"{root}/lost: ") and f"source {gone} does not exist" in done.stdout
    assert "1 caches, " in done.stdout and (root / "lost/blob").exists()
    (root / "link").symlink_to(root / "lost")
    for name, user in (("fifo", 0), ("theirs", 12345)):
        (root / name).mkdir()
        os.mkfifo(root / name / "cache.json")  # before, gc waited for a writer
        os.chown(root / name, user, user)
    (root / "theirs/cache.json").unlink()
    shutil.copy(root / "lost/cache.json", root / "theirs/cache.json")
    assert "deleted" in cachefs("gc", "--root", root, "--delete").stdout
    assert sorted(path.name for path in root.iterdir()) == ["fifo", "kept", "link", "other", "theirs", "used"]
    assert cachefs("gc", "--root", root).stdout == "nothing to delete: no source is missing\n"
    assert "does not exist" in cachefs("gc", "--root", tmp_path / "nowhere", check=False).stderr
    assert contents(used.path) == contents(source)


def test_doctor(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    m = mount(source, "--read-only")
    contents(m.path)
    before = m.ops()
    findings = {each["name"]: each for each in json.loads(cachefs("doctor", m.path, "--json", check=False).stdout)}
    assert m.ops() == before
    assert findings["/dev/fuse"]["value"] == "usable" and not findings["/dev/fuse"]["advice"]
    assert findings["readahead"]["value"] == "1,024" and not findings["readahead"]["advice"]
    assert findings["cache disk speed"]["value"].startswith("writes ")
    assert findings["source latency"]["value"].startswith("stat ")
    assert "stale reads" not in findings
    assert not [path for path in m.cache.iterdir() if "doctor" in path.name]
    device = os.stat(m.path).st_dev
    Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").write_text("128")
    done = cachefs("doctor", m.path, check=False)
    assert (
        done.returncode == 1
        and "! readahead: 128" in done.stdout
        and "large reads are split into small requests" in done.stdout
    )
    assert "source latency" in cachefs("doctor", source, check=False).stdout
    assert "kernel" in cachefs("doctor", check=False).stdout
    done = cachefs("doctor", tmp_path / "nobody", check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [("verify",), ("snapshot", "export"), ("config", "show"), ("restart",)])
def test_what_is_no_mount(command: tuple[str, ...], tmp_path: Path) -> None:
    more = [tmp_path / "file"] if command[0] == "snapshot" else []
    done = cachefs(*command, tmp_path, *more, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "no cachefs is mounted" in done.stderr


@pytest.mark.parametrize("of", ["nothing", "mount", "source"])
def test_doctor_waits_for_nothing_that_hangs(mount: MakeMount, faulty: tuple[Path, Path], of: str) -> None:
    """It waits neither for an unrelated mount, nor for ever for the source."""
    mountpoint, faults = faulty
    m = mount(mountpoint, "--read-only", "--source-timeout", "1")
    contents(m.path)
    for fault in ("hang", "hang-all"):
        (faults / fault).touch()
    if of == "nothing":
        assert "cache disk speed" in cachefs("doctor", check=False).stdout
        return
    done = cachefs("doctor", m.path if of == "mount" else mountpoint, "--json", check=False)
    if of == "source":
        assert (done.returncode, done.stderr) == (1, f"cachefs: {mountpoint} does not answer\n")
        return
    findings = {each["name"]: each for each in json.loads(done.stdout)}
    assert "hangs on this node" in findings["source answers"]["advice"]
    assert "cache disk speed" in findings


def test_a_command_on_a_disk_that_became_read_only_says_so_in_one_line(
    mount: MakeMount, source: Path, beneath: ExitStack
) -> None:
    m = mount(source, "--read-only")
    cachefs("warmup", m.path)
    for options in (["--bind"], ["-o", "remount,ro,bind"]):
        subprocess.run(["mount", *options, m.cache, m.cache], check=True)
    beneath.callback(subprocess.run, ["umount", "-l", m.cache], check=True)
    done = cachefs("verify", m.path, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "Read-only" in done.stderr, done.stderr
