"""Warm-up, hints, evict, pin, unpin and info, on real mounts."""

import errno
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.client.client import Client, Progress
from cachefs.errors import CacheFsError
from tests.conftest import (
    CLI,
    REPOSITORY,
    Mount,
    cachefs,
    contents,
    make_files,
    mounted_on,
    raises_errno,
    settle,
    wait_for,
)
from tests.terminal import Terminal

MakeMount = Callable[..., Mount]


def start_warm_up(path: Path, *, jobs: int) -> subprocess.Popen[str]:
    command = [*CLI, "warmup", path, "--jobs", str(jobs)]
    return subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)


def reads(m: Mount) -> int:
    return m.ops().get("read", 0)


@pytest.mark.promise("PI-12")
@pytest.mark.parametrize("mode", [("--read-only",), ()], ids=["read-only", "read-write"])
def test_what_was_warmed_up_is_not_fetched_again(mount: MakeMount, source: Path, mode: tuple[str, ...]) -> None:
    m = mount(source, *mode)
    done = cachefs("warmup", m.path, "--json")
    report = json.loads(done.stdout)
    expected = contents(source)
    size = sum(map(len, expected.values()))
    assert report["is_complete"] and not report["problems"]
    assert (report["files"], report["cached_files"], report["bytes"], report["cached_bytes"]) == (41, 41, size, size)
    assert report["fetched_files"] == 40  # but for the empty one
    before = m.ops()
    assert contents(m.path) == expected
    assert m.ops().get("read", 0) == before["read"] and m.ops().get("open", 0) == before["open"]
    if mode:
        assert m.ops() == before
    again = json.loads(cachefs("warmup", m.path / "d0", m.path / "d1/f00001", "--json").stdout)
    assert again["files"] == again["cached_files"] == 11 and again["fetched_files"] == 0
    assert cachefs("warmup", m.path, "--check").stdout.startswith("41 of 41 files cached (100.0 %)")


def test_check_fetches_nothing_and_says_what_is_missing(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only")
    cachefs("warmup", m.path / "d0")
    before = reads(m)
    done = cachefs("warmup", "--check", m.path, check=False)
    assert done.returncode == 1 and done.stdout.startswith("11 of 41 files cached (26.8 %)")
    assert done.stderr.count("not cached") == 20 and reads(m) == before
    cachefs("warmup", m.path, "--metadata-only")
    assert reads(m) == before
    before_ops = m.ops()
    assert len(list(m.path.rglob("*"))) == 46
    assert m.ops() == before_ops
    assert cachefs("warmup", m.path, "--check", "--metadata-only").stdout.startswith("41 of 41 files")


def test_a_list_of_paths(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    m = mount(source, "--read-only")
    names = [m.path / "d0/f00000", m.path / "d1/f00001", m.path / "d1/nobody"]
    done = subprocess.run(
        [*CLI, "warmup", "--from-list", "-", "--json"],
        input="\n".join(map(str, names)) + "\n", capture_output=True, text=True, cwd=REPOSITORY, timeout=60,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["files"] == report["cached_files"] == 2 and report["errors"] == 1
    assert report["problems"] == [f"{m.path}/d1/nobody: No such file or directory"]
    (tmp_path / "list").write_text(f"{tmp_path}/elsewhere\n")
    done = cachefs("warmup", "--from-list", tmp_path / "list", check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "not on a cachefs mount" in done.stderr


def test_what_cannot_be_read_is_named(mount: MakeMount, faulty: tuple[Path, Path]) -> None:
    place, faults = faulty
    m = mount(place, "--read-only")
    (faults / "fails").write_text("read EIO d0/f00000")
    done = cachefs("warmup", m.path, check=False)
    assert done.returncode == 1 and "d0/f00000: Input/output error" in done.stderr
    assert "40 of 41 files cached (97.6 %)" in done.stdout


def test_a_cache_that_is_too_small(mount: MakeMount, tmp_path: Path) -> None:
    make_files(tmp_path / "source", 50, (20_000, 20_001))
    settle()
    m = mount(tmp_path / "source", "--read-only", "--cache-size", "500K")
    done = cachefs("warmup", m.path, check=False)
    assert done.returncode == 1 and "no room in the cache (--cache-size)" in done.stderr
    status = m.flush()
    assert 15 <= status["cached_files"] <= 25 and status["blob_bytes"] <= 500 << 10
    assert contents(m.path) == contents(tmp_path / "source")


def test_a_full_cache_that_evicts_takes_what_is_warmed_up(mount: MakeMount, tmp_path: Path) -> None:
    make_files(tmp_path / "source", 60, (20_000, 20_001), directories=3)
    settle()
    m = mount(tmp_path / "source", "--read-only", "--cache-size", "600K", "--retention", "lru")
    cachefs("warmup", m.path / "d0")
    report = json.loads(cachefs("warmup", m.path / "d1", "--json").stdout)
    assert report["is_complete"] and report["fetched_files"] == 20


def test_large_files_and_links(mount: MakeMount, tmp_path: Path) -> None:
    root = tmp_path / "source"
    root.mkdir()
    (root / "large").write_bytes(os.urandom(9_000_000))
    os.link(root / "large", root / "other")
    (root / "away").symlink_to("/etc/hostname")
    settle()
    m = mount(root, "--read-only")
    report = json.loads(cachefs("warmup", m.path, "--json").stdout)
    assert report["files"] == 1 and report["cached_bytes"] == 9_000_000
    before = m.ops()
    assert (m.path / "other").read_bytes() == (root / "large").read_bytes()
    assert os.readlink(m.path / "away") == "/etc/hostname"
    assert m.ops() == before
    (tmp_path / "link").symlink_to(m.path / "other")
    assert cachefs("info", tmp_path / "link").stdout.splitlines()[0].split() == ["path", "other"]


def test_in_the_background(mount: MakeMount, faulty: tuple[Path, Path]) -> None:
    """The warm-up lasts until the test has looked at it: one file hangs."""
    source, faults = faulty
    m = mount(source, "--read-only", "--source-timeout", "120")
    (faults / "hang").write_text("f00001")
    done = cachefs("warmup", m.path, "--background", "--jobs", "1")
    assert done.stdout.startswith(f"{m.path}: warm-up 1 runs in the background")
    assert "warm-up" in cachefs("status", m.path).stdout
    (faults / "hang").unlink()
    wait_for(m.status, lambda status: not status["warm_ups"])
    assert json.loads(cachefs("warmup", "--check", m.path, "--json").stdout)["is_complete"]


def test_a_client_that_hangs_up_ends_its_warm_up(mount: MakeMount, tmp_path: Path) -> None:
    make_files(tmp_path / "source", 3000)
    settle()
    m = mount(tmp_path / "source", "--read-only", "--simulate-latency", "5")

    def interrupt(progress: Progress) -> None:
        if m.status()["prefetched"]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Client(m.path).warm_up([m.path], jobs=1, on_progress=interrupt)
    first = wait_for(lambda: [reads(m), m.flush(), reads(m)], lambda seen: seen[0] == seen[2], timeout_s=60)[0]
    assert first < 2500
    assert cachefs("warmup", m.path, "--jobs", "64").returncode == 0
    assert reads(m) == 3000


@pytest.mark.fastpath
def test_sigkill_of_the_daemon_loses_nothing(mount: MakeMount, tmp_path: Path) -> None:
    make_files(tmp_path / "source", 2000)
    settle()
    m = mount(tmp_path / "source", "--read-only", "--simulate-latency", "2")
    warming = start_warm_up(m.path, jobs=2)  # takes four seconds
    wait_for(m.status, lambda status: status["cached_files"] > 300)
    m.kill()
    _, said = warming.communicate(timeout=30)
    assert warming.returncode == 1 and said.count("\n") == 1 and "does not answer" in said
    m.start()
    report = json.loads(cachefs("warmup", m.path, "--jobs", "8", "--json").stdout)
    assert report["is_complete"] and report["files"] == 2000 and 0 < report["fetched_files"] < 2000
    assert reads(m) == 2000  # counted where it outlives the daemon
    assert json.loads(cachefs("warmup", m.path, "--check", "--json").stdout)["cached_files"] == 2000


@pytest.mark.promise("PI-12")
def test_hints(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only", "--simulate-latency", "2")
    client = Client(m.path)
    paths = [m.path / name for name in contents(source)]
    assert client.will_read([*paths, m.path / "nobody"]) == 42
    wait_for(m.flush, lambda status: status["cached_files"] == 40)
    before = m.ops()
    assert all(path.read_bytes() == (source / path.relative_to(m.path)).read_bytes() for path in paths)
    assert m.ops() == before
    with pytest.raises(CacheFsError, match="is not on"):
        client.will_read(["/etc/hostname"])
    assert client.will_read([]) == 0


def test_hints_that_are_taken_back(mount: MakeMount, tmp_path: Path) -> None:
    make_files(tmp_path / "source", 2000)
    settle()
    m = mount(tmp_path / "source", "--simulate-latency", "5")
    client = Client(m.path)
    client.will_read(sorted(m.path / name for name in contents(tmp_path / "source")))
    client.will_read([])
    assert m.status()["hints_waiting"] == 0
    wait_for(lambda: [reads(m), m.flush(), reads(m)], lambda seen: seen[0] == seen[2], timeout_s=60)
    assert reads(m) < 1500


@pytest.mark.promise("PI-13")
def test_evict_gives_the_room_back(mount: MakeMount, tmp_path: Path) -> None:
    root = tmp_path / "source"
    make_files(root, 200, (40_000, 50_000))
    settle()
    m = mount(root, "--read-only")
    cachefs("warmup", m.path)
    before = m.flush()
    held = (m.cache / "blob").stat().st_blocks
    said = cachefs("evict", m.path / "d0", m.path / "d1/f00001").stdout
    assert f"{m.path}: 51 files evicted" in said
    status = m.status()
    assert status["cached_files"] == 149 and status["cached_bytes"] < before["cached_bytes"] - 51 * 40_000
    assert (m.cache / "blob").stat().st_blocks * 512 < held * 512 - 51 * 36_000
    operations = m.ops()
    names = sorted(p for p in m.path.rglob("*"))
    assert len(names) == 204 and m.ops() == operations  # metadata stay
    assert contents(m.path) == contents(root)
    assert reads(m) == 251
    done = cachefs("evict", m.path / "nobody", check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1


@pytest.mark.promise("EX-9")
def test_pin_and_unpin(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    made = m.path / "made"
    made.write_bytes(b"one")
    assert made.read_bytes() == b"one"
    assert os.getxattr(made, "user.cachefs.state") == b"written"
    assert f"{m.path}: 1 files are immutable" in cachefs("pin", made).stdout
    assert os.getxattr(made, "user.cachefs.state") == b"immutable"
    raises_errno(errno.EPERM, lambda: made.write_bytes(b"two"))
    assert cachefs("unpin", made).stdout == f"{m.path}: 1 immutable files made writable\n"
    made.write_bytes(b"three")
    assert made.read_bytes() == b"three" and (source / "made").read_bytes() == b"three"
    with open(made, "r+b"):
        assert "; 1 skipped: they stay mutable" in cachefs("pin", made).stdout
    file = m.path / "d0/f00000"
    old = file.read_bytes()
    raises_errno(errno.EPERM, lambda: file.write_bytes(b"new"))
    assert cachefs("unpin", m.path / "d0").stdout == f"{m.path}: 1 immutable files made writable\n"
    assert file.read_bytes() == old
    file.write_bytes(b"new")
    assert file.read_bytes() == b"new" == (source / "d0/f00000").read_bytes()
    assert os.getxattr(file, "user.cachefs.state") == b"written"
    r = mount(source, "--read-only", name="read-only")
    done = cachefs("unpin", r.path / "d0", check=False)
    assert done.returncode == 1 and "unpin is for read-write mounts" in done.stderr


def test_info_and_attributes(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--mutable", "d3")
    file = m.path / "d0/f00000"
    info = json.loads(cachefs("info", file, "--json").stdout)
    assert info["state"] == "unpinned" and info["cached_bytes"] == 0 and info["type"] == "file"
    size = len(file.read_bytes())
    m.flush()
    info = json.loads(cachefs("info", file, "--json").stdout)
    assert info["state"] == "immutable" and info["cached_bytes"] == info["size"] == size
    assert info["extent_count"] == 1 and info["extents"][0]["length"] == size
    assert info["validated_run"] == m.status()["run"] and info["is_valid"]
    assert abs(info["validated_ns"] / 1e9 - os.stat(m.cache / "lock").st_mtime) < 60
    said = cachefs("info", file).stdout
    assert "immutable: served from the cache" in said and f"bytes 0 + {size:,} at" in said
    assert os.getxattr(file, "user.cachefs.state") == b"immutable"
    assert int(os.getxattr(file, "user.cachefs.cached_bytes")) == size
    assert int(os.getxattr(file, "user.cachefs.validated_run")) == info["validated_run"]
    assert not [name for name in os.listxattr(file) if "cachefs" in name]  # or cp -a would copy them
    raises_errno(errno.ENODATA, lambda: os.getxattr(file, "user.cachefs.nothing"))
    raises_errno(errno.EPERM, lambda: os.setxattr(m.path / "d1/f00001", "user.cachefs.state", b"1"))
    assert os.getxattr(m.path / "d3/f00003", "user.cachefs.state") == b"mutable"
    assert "mutable, never cached" in cachefs("info", m.path / "d3").stdout
    assert json.loads(cachefs("info", m.path, "--json").stdout)["type"] == "directory"
    report = json.loads(cachefs("warmup", m.path, "--json").stdout)
    assert report["mutable_files"] == 10 and report["cached_files"] == 31 and report["is_complete"]


@pytest.mark.parametrize("command", ["warmup", "evict", "invalidate", "pin", "unpin", "info", "status", "umount"])
def test_what_is_no_mount(command: str, tmp_path: Path) -> None:
    done = cachefs(command, tmp_path, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert "on a cachefs mount" in done.stderr or "no cachefs is mounted" in done.stderr


def test_a_daemon_that_has_died(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    m.kill()
    for command in ("warmup", "evict", "invalidate", "pin", "unpin", "info", "status"):
        done = cachefs(command, m.path / "d0" if command != "status" else m.path, check=False)
        assert done.returncode == 1 and done.stderr.count("\n") == 1 and "has died" in done.stderr, command
    cachefs("umount", m.path)
    assert not mounted_on(m.path)


def test_what_may_not_be_pinned_is_missing(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--read-only", "--metadata-limit", "20")
    done = cachefs("warmup", m.path, check=False)
    assert done.returncode == 1 and "beyond --metadata-limit" in done.stderr and "of 41 files cached" in done.stdout
    assert contents(m.path) == contents(source)


def test_levels_that_keep_nothing(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--cache", "metadata")
    done = cachefs("warmup", m.path, check=False)
    assert done.returncode == 1 and "--metadata-only" in done.stderr
    cachefs("warmup", m.path, "--metadata-only")
    n = mount(source, "--cache", "none", name="none")
    assert cachefs("warmup", n.path, "--metadata-only", check=False).returncode == 1


def test_signals_end_a_warm_up_at_once(mount: MakeMount, tmp_path: Path) -> None:
    make_files(tmp_path / "source", 3000)
    settle()
    m = mount(tmp_path / "source", "--read-only", "--simulate-latency", "5")
    warming = subprocess.Popen(
        [*CLI, "warmup", m.path, "--jobs", "1"], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
    )
    wait_for(m.status, lambda status: status["prefetched"] > 0)
    warming.send_signal(signal.SIGINT)
    _, said = warming.communicate(timeout=10)
    assert warming.returncode == 130 and "Traceback" not in said


def test_a_bar_on_a_terminal(mount: MakeMount, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    make_files(tmp_path / "source", 400)
    settle()
    m = mount(tmp_path / "source", "--read-only", "--simulate-latency", "10")
    terminal = Terminal(tmp_path, [*CLI, "warmup", m.path, "--jobs", "1"])
    request.addfinalizer(terminal.close)
    screen = wait_for(terminal.screen, lambda screen: "/400 files" in screen and "/s" in screen)
    assert "warming up" in screen and max(map(len, screen.splitlines())) <= 80
    wait_for(terminal.screen, lambda screen: "400 of 400 files cached (100.0 %)" in screen, timeout_s=60)
