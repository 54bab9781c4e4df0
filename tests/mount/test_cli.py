"""The command line, with good input and bad."""

import json
import os
import pwd
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.conftest import REPOSITORY, Mount, cachefs, contents, mounted_on, small_disk, wait_for
from tests.users import cachefs_as

MakeMount = Callable[..., Mount]

STATUS_KEYS = {
    "source", "mountpoint", "cache", "pid", "uptime_s", "pinned_inodes", "cached_files", "cached_bytes", "blob_bytes",
    "cache_size_bytes", "hits", "misses", "hit_bytes", "miss_bytes", "source_ops", "skipped_admissions", "errors",
}  # fmt: skip


def refused(*arguments: object, status: int = 1) -> str:
    """One clear line on stderr, and nothing else."""
    done = cachefs(*arguments, check=False)
    assert done.returncode == status, done
    assert "Traceback" not in done.stderr and done.stdout == ""
    if status == 1:
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("cachefs: ")
    return done.stderr


def test_help_reads_well() -> None:
    text = cachefs("--help").stdout
    for command in ("mount", "umount", "status", "invalidate"):
        assert re.search(rf"^  {command} +\w", text, re.MULTILINE)
        assert "Example" in cachefs(command, "--help").stdout
    assert max(map(len, text.splitlines())) <= 100


def test_a_configuration_file(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    file = tmp_path / "mount.toml"
    file.write_text('read-only = true\ncache-size = "12M"\n')
    m = mount(source, "--config", file, "--cache-size", "10M")
    assert contents(m.path) == contents(source)
    status = m.status()
    assert status["read_only"] is True and status["cache_size_bytes"] == 10 << 20  # the command line wins


def test_status(mount: MakeMount, source: Path) -> None:
    m = mount(source, "--cache-size", "10M")
    for path in m.path.rglob("f*"):
        path.read_bytes()
    status = m.flush()
    assert set(status) >= STATUS_KEYS
    assert (status["source"], status["mountpoint"]) == (str(source), str(m.path))
    assert (status["cached_files"], status["misses"], status["cache_size_bytes"]) == (40, 40, 10 << 20)
    assert status["cached_bytes"] == status["miss_bytes"] == sum(p.stat().st_size for p in source.rglob("f*"))
    assert status["pinned_inodes"] == 40 + 4 + 1
    for path in m.path.rglob("f*"):
        path.read_bytes()  # from the kernel's page cache
    assert m.status()["misses"] == 40
    text = cachefs("status", m.path).stdout
    assert "40 files" in text and max(map(len, text.splitlines())) <= 80


def test_bad_input_gets_one_clear_line(source: Path, tmp_path: Path) -> None:
    place, cache = tmp_path / "place", tmp_path / "cache"
    place.mkdir()
    (tmp_path / "file").touch()
    assert "No such file" in refused("mount", tmp_path / "nothing", place, "--cache-dir", cache)
    for arguments in (("", place), (source, "")):  # as of an unset variable
        assert "the path is empty" in refused("mount", *arguments, "--cache-dir", cache, status=2)
    assert "not a directory" in refused("mount", tmp_path / "file", place, "--cache-dir", cache)
    assert "its parent is no directory" in refused("mount", source, tmp_path / "nothing/place", "--cache-dir", cache)
    assert "not a directory" in refused("mount", source, tmp_path / "file", "--cache-dir", cache)
    assert "10Q" in refused("mount", source, place, "--cache-size", "10Q", status=2)
    assert "is not a time" in refused("mount", source, place, "--source-timeout", "soon", status=2)
    assert "read-only" in refused("mount", source, place, "--attr-timeout", "inf", status=2)
    assert "--mutable" in refused("mount", source, place, "--mutable", "../x", status=2)
    assert "revalidate" in refused("mount", source, place, "--revalidate", "maybe", status=2)
    assert "no cachefs is mounted" in refused("umount", place)
    assert "no cachefs is mounted" in refused("status", place)
    assert "not on a cachefs mount" in refused("invalidate", tmp_path / "file")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").touch()
    assert "not a cache directory" in refused("mount", source, place, "--cache-dir", tmp_path / "mine")
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]
    assert not mounted_on(place)


def test_a_mountpoint_in_use(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    m = mount(source)
    assert "in use" in refused("mount", source, m.path, "--cache-dir", tmp_path / "c2")
    assert mounted_on(m.path) == ["fuse.cachefs"]


def test_one_daemon_for_each_cache_directory(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    m = mount(source)
    (tmp_path / "second").mkdir()
    said = refused("mount", source, tmp_path / "second", "--cache-dir", m.cache)
    assert "in use by another cachefs daemon" in said and str(m.pid) in said
    m.umount()
    (tmp_path / "other").mkdir()
    said = refused("mount", tmp_path / "other", tmp_path / "second", "--cache-dir", m.cache)
    assert "was made for" in said and str(source) in said
    assert m.cache.stat().st_mode & 0o777 == 0o700


def test_a_cache_made_by_a_newer_version(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    m.umount()
    identity = m.cache / "cache.json"
    content = json.loads(identity.read_text()) | {"format": 99}
    content["crc32"] = zlib.crc32(json.dumps([99, content["source"], content["filesystem"]]).encode())
    identity.write_text(json.dumps(content))
    assert "format 99" in refused("mount", source, m.path, "--cache-dir", m.cache)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "64k") as place:
        yield place


def test_a_cache_directory_on_a_full_or_read_only_disk(disk: Path, source: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with open(disk / "filler", "wb", buffering=0) as filler, pytest.raises(OSError):
        while True:
            filler.write(bytes(4096))
    assert "No space" in refused("mount", source, place, "--cache-dir", disk / "cache")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert "Read-only" in refused("mount", source, place, "--cache-dir", disk / "cache2")
    assert not mounted_on(place)


@pytest.mark.promise("FA-22")
def test_a_dead_daemon_is_reported_and_replaced(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    m.kill()
    assert "has died" in refused("status", m.path)
    m.start()
    assert (m.path / "d0").is_dir()
    m.kill()
    cachefs("umount", m.path)
    assert not mounted_on(m.path)


def test_a_busy_mount_is_not_unmounted(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    with open(m.path / "d0/f00000", "rb"):
        assert "in use" in refused("umount", m.path)
    assert (m.path / "d0").is_dir()


def test_foreground_and_sigterm(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    command = [
        sys.executable,
        "-m",
        "daemon",
        "mount",
        source,
        place,
        "--cache-dir",
        tmp_path / "cache",
        "--foreground",
    ]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: mounted_on(place), bool)
    assert (place / "d0").is_dir()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0 and "Traceback" not in said
    assert not mounted_on(place)


@pytest.mark.alone
def test_simulated_latency(mount: MakeMount, source: Path) -> None:
    import time

    m = mount(source, "--read-only", "--simulate-latency", "30")
    started = time.perf_counter()
    (m.path / "d0/f00000").read_bytes()
    assert time.perf_counter() - started > 4 * 0.03  # two look-ups, open, read
    started = time.perf_counter()
    (m.path / "d0/f00000").read_bytes()
    assert time.perf_counter() - started < 0.03


def install_metadata(site: Path, name: str, version: str, package: str) -> dict[str, str]:
    """The metadata of a distribution that owns `package`; the environment in which it is found."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(f"{package}\n")
    (info / "RECORD").write_text(f"{package}/__init__.py,,\n")
    return os.environ | {"PYTHONPATH": str(site)}


@pytest.mark.parametrize("listed", ["top_level.txt", "RECORD"])
def test_another_distribution_named_daemon_is_noticed(tmp_path: Path, source: Path, listed: str) -> None:
    environment = install_metadata(tmp_path / "site", "python-daemon", "3.0.1", "daemon")
    for each in {"top_level.txt", "RECORD"} - {listed}:
        (tmp_path / "site/python_daemon-3.0.1.dist-info" / each).unlink()
    done = cachefs("mount", source, tmp_path, check=False, env=environment)
    assert done.returncode == 1 and "python-daemon" in done.stderr and done.stderr.count("\n") == 1


def test_a_client_of_another_version_is_noticed(tmp_path: Path, source: Path) -> None:
    install_metadata(tmp_path / "site", "cachefs-ml", "0.2.0", "daemon")
    environment = install_metadata(tmp_path / "site", "cachefs-ml-client", "0.1.0", "cachefs")
    done = cachefs("mount", source, tmp_path, check=False, env=environment)
    assert done.returncode == 1 and "cachefs-ml-client" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.full_age
@pytest.mark.alone
def test_an_unprivileged_user(user: pwd.struct_passwd, source: Path, tmp_path: Path) -> None:
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == 0 and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    for path in (source, *source.parents):
        if path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    home = tmp_path / "home"
    home.mkdir()
    (home / "place").mkdir()
    (home / "run").mkdir(mode=0o700)
    for path in (home, home / "place", home / "run"):
        os.chown(path, user.pw_uid, user.pw_gid)
    environment = {"XDG_RUNTIME_DIR": str(home / "run"), "XDG_CACHE_HOME": str(home / "cache")}
    run = partial(cachefs_as, user.pw_uid, user.pw_gid, environment)

    if "user_allow_other" not in re.findall(r"^\w+", Path("/etc/fuse.conf").read_text(), re.MULTILINE):
        done = run("mount", source, home / "place", "--allow-other")
        assert done.returncode == 1 and done.stderr.count("\n") == 1 and "allow_other" in done.stderr
    done = run("mount", source, home / "place", "--read-only")
    assert done.returncode == 0, done.stderr
    try:
        expected = (source / "d0/f00000").read_bytes()
        assert run("read", home / "place/d0/f00000").stdout == expected.hex()
        done = run("status", home / "place", "--json")
        assert json.loads(done.stdout)["misses"] >= 1, done.stderr
        assert next(iter((home / "cache/cachefs").iterdir())).stat().st_mode & 0o777 == 0o700
    finally:
        done = run("umount", home / "place")
    assert done.returncode == 0, done.stderr
    assert not mounted_on(home / "place")

    def daemon() -> int:
        done = run("mount", source, home / "place", "--read-only")
        assert done.returncode == 0, done.stderr
        return int(json.loads(run("status", home / "place", "--json").stdout)["pid"])

    pid = daemon()
    assert "was mounted by another user" in refused("status", home / "place")
    assert cachefs("umount", home / "place").stderr == ""  # as root
    assert not mounted_on(home / "place")
    wait_for(lambda: psutil.pid_exists(pid), lambda lives: not lives)

    pid = daemon()
    (home / "run/cachefs").chmod(0o755)
    assert "must be closed to others" in run("umount", home / "place").stderr
    os.kill(pid, signal.SIGTERM)  # the daemon has checked it when it began
    wait_for(lambda: mounted_on(home / "place"), lambda there: there == [])
    wait_for(lambda: psutil.pid_exists(pid), lambda lives: not lives)
