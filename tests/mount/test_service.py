"""A mount as a service: its messages to the service manager, and the effect of a restart on jobs."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.client.client import Client
from daemon.cli import mount_helper
from daemon.cli.mount import mount as mount_command
from tests.conftest import CLI, REPOSITORY, Mount, cachefs, contents, make_files, mounted_on, settle, wait_for
from tests.load import Load, sums_of
from tests.machine import machine
from tests.processes import stop
from tests.service_manager import ServiceManager, services, status

MakeMount = Callable[..., Mount]
UNIT = REPOSITORY / "systemd/cachefs@.service"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[..., ServiceManager]]:
    with services(tmp_path) as start:
        yield start


def test_ready_when_it_answers_and_gone_when_it_ends(
    service: Callable[..., ServiceManager], source: Path, tmp_path: Path
) -> None:
    manager = service(source, "--read-only")
    assert contents(tmp_path / "mnt") == contents(source)  # at once
    assert any(line.startswith(f"STATUS={source} on {tmp_path}/mnt: ") for line in manager.said)
    assert manager.kill_and_wait(signal.SIGTERM) == 0
    assert manager.heard("STOPPING=1") and not manager.stored
    assert not mounted_on(tmp_path / "mnt")
    manager.said.clear()
    manager.start()
    wait_for(lambda: manager.heard("READY=1"), bool)
    assert status(tmp_path / "mnt")["cached_files"] == 40  # flushed before it ended


def test_reload(service: Callable[..., ServiceManager], source: Path, tmp_path: Path) -> None:
    file = tmp_path / "set.toml"
    file.write_text('cache-size = "20M"\n')
    manager = service(source, "--config", file)
    file.write_text('cache-size = "30M"\n')
    before = len(manager.said)
    assert manager.process is not None
    manager.process.send_signal(signal.SIGHUP)
    wait_for(lambda: manager.heard("READY=1", since=before), bool)
    assert "RELOADING=1" in manager.said[before:]
    assert any(line.startswith("MONOTONIC_USEC=") for line in manager.said[before:])
    assert status(tmp_path / "mnt")["cache_size_bytes"] == 30 << 20


@pytest.mark.promise("LC-4")
@pytest.mark.fastpath
@pytest.mark.slow
def test_a_restart_keeps_the_mount(service: Callable[..., ServiceManager], tmp_path: Path) -> None:
    source = tmp_path / "dataset"
    make_files(source, 500, (1, 60_000), directories=8)
    settle()
    sums = sums_of(source)
    manager = service(source, "--read-only")
    load = Load(tmp_path / "mnt", sums, None)
    for _ in range(4):
        before = status(tmp_path / "mnt")
        assert manager.kill_and_wait(signal.SIGUSR1) == 0  # what ExecStop= sends when it is a restart
        manager.start()
        after = wait_for(lambda: status(tmp_path / "mnt"), bool)
        assert after["pid"] != before["pid"] and after["fastpath"]["pid"] == before["fastpath"]["pid"]
    longest = load.finish()
    print(f"4 restarts: longest stall {longest:.3f} s")


@pytest.mark.promise("LC-26")
@pytest.mark.fastpath
@pytest.mark.parametrize("changed", ["read-only", "source", "cache-dir"])
def test_a_service_keeps_its_mount_when_its_file_changes_what_needs_a_new_one(
    service: Callable[..., ServiceManager],
    source: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    changed: str,
) -> None:
    """Regression: the successor refused the options, and left the jobs without a daemon."""
    manager = service(source, "--read-only", "--retention", "lru")

    def now() -> tuple[object, ...]:
        values = Client(tmp_path / "mnt").settings()
        return tuple(values[key]["value"] for key in ("source", "read-only", "cache-dir", "retention"))

    before, kept = status(tmp_path / "mnt"), (str(source), True, str(tmp_path / "cache"), "lru")
    other = {"read-only": "--no-read-only", "source": str(source / "d0"), "cache-dir": str(tmp_path / "elsewhere")}
    given = manager.command
    if changed == "source":
        given[given.index(str(source))] = other["source"]
    else:
        given += [other[changed]] if changed == "read-only" else ["--cache-dir", other["cache-dir"]]
    given[given.index("lru")] = "fifo"
    assert manager.kill_and_wait(signal.SIGUSR1) == 0
    manager.start()
    after = wait_for(lambda: status(tmp_path / "mnt"), bool)
    assert after["pid"] != before["pid"]
    assert now() == kept
    assert contents(tmp_path / "mnt") == contents(source)  # of which nothing was read before
    said = capfd.readouterr().err
    assert said.count("keeps the options that it was mounted with") == 1 and changed in said
    assert manager.kill_and_wait(signal.SIGTERM) == 0
    if changed == "source":  # the cache directory belongs to the old one
        return
    manager.start()  # a new mount has the new options
    wait_for(lambda: status(tmp_path / "mnt"), bool)
    assert now()[-1] == "fifo" and sum(new != old for new, old in zip(now(), kept, strict=True)) == 2


@pytest.mark.alone
def test_the_watchdog_is_fed_as_long_as_the_mount_answers(
    service: Callable[..., ServiceManager], source: Path, tmp_path: Path
) -> None:
    manager = service(source, "--read-only", watchdog_s=1.5)
    wait_for(lambda: manager.heard("WATCHDOG=1"), bool)
    before = status(tmp_path / "mnt")["source_ops"]
    seen = len(manager.said)
    wait_for(lambda: manager.heard("WATCHDOG=1", since=seen), bool)
    assert status(tmp_path / "mnt")["source_ops"] == before  # the source is not asked
    assert manager.process is not None
    # With a fast path the daemon itself is well, and notices.
    stopped = manager.process.pid if Mount.no_fastpath else status(tmp_path / "mnt")["fastpath"]["pid"]
    stop(stopped)
    try:
        manager.collect()
        seen = len(manager.said) + 1  # one may be on its way
        with pytest.raises(AssertionError):
            wait_for(lambda: manager.heard("WATCHDOG=1", since=seen), bool, timeout_s=4)
        assert Mount.no_fastpath or len(manager.said) > seen
    finally:
        os.kill(stopped, signal.SIGCONT)
    seen = len(manager.said)
    wait_for(lambda: manager.heard("WATCHDOG=1", since=seen), bool)


@pytest.mark.promise("LC-21")
@pytest.mark.alone
@pytest.mark.parametrize("mode", [["--read-only"], [], ["--cache", "none"]], ids=["read-only", "read-write", "none"])
def test_the_watchdog_is_fed_while_the_source_hangs(
    service: Callable[..., ServiceManager], faulty: tuple[Path, Path], mode: list[str]
) -> None:
    """A hanging source is no reason to kill the daemon: hits go on."""
    source, faults = faulty
    manager = service(source, *mode, watchdog_s=1.5)
    (faults / "hang").touch()
    (faults / "hang-all").touch()
    for _ in range(6):  # the kernel caches nothing of a read-write mount for longer than a second
        seen = len(manager.said)
        wait_for(lambda seen=seen: manager.heard("WATCHDOG=1", since=seen), bool, timeout_s=10)  # type: ignore[misc]
    for fault in faults.iterdir():
        fault.unlink()


# --- the unit itself -------------------------------------------------------------------------------------------------

MAKES_A_NAMESPACE = """
    BindPaths BindReadOnlyPaths DynamicUser ExecPaths ExtensionDirectories ExtensionImages InaccessiblePaths
    IPCNamespacePath LogNamespace MountAPIVFS MountFlags MountImages NetworkNamespacePath NoExecPaths PrivateDevices
    PrivateIPC PrivateMounts PrivateNetwork PrivateTmp ProcSubset ProtectControlGroups ProtectHome ProtectKernelLogs
    ProtectKernelModules ProtectKernelTunables ProtectProc ProtectSystem ReadOnlyPaths ReadWritePaths RootDirectory
    RootEphemeral RootHash RootImage TemporaryFileSystem
"""


def test_no_option_hides_the_mount_from_the_jobs() -> None:
    used = set(re.findall(r"^(\w+)=", UNIT.read_text(), re.MULTILINE))
    assert {"Type", "ExecStart", "KillMode", "FileDescriptorStoreMax", "WatchdogSec"} <= used
    assert not used & set(MAKES_A_NAMESPACE.split())


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, with an installed program."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    path = tmp_path / "cachefs@.service"
    path.write_text(UNIT.read_text().replace("/opt/cachefs/bin/cachefs", "/bin/true"))
    return path


def test_the_unit_is_sound(unit: Path) -> None:
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_unit_is_hardened(unit: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", unit], capture_output=True, text=True, check=False
    )
    score = re.search(r"Overall exposure level for \S+: (\d+\.\d+)", done.stdout)
    assert score is not None, done
    assert float(score[1]) <= 4.5


# --- a real systemd, in namespaces of its own ------------------------------------------------------------------------

READ = """
import hashlib, os, random, sys, time
root, stop = sys.argv[1:]
paths = [os.path.join(d, f) for d, _, files in os.walk(root) for f in files]
sums = {path: hashlib.sha256(open(path, "rb").read()).digest() for path in paths}
open(stop + ".started", "w").close()
count = 0
while not os.path.exists(stop):
    path = random.choice(paths)
    assert hashlib.sha256(open(path, "rb").read()).digest() == sums[path]
    count += 1
print(count)
"""


@pytest.mark.full_age
@pytest.mark.fastpath
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_under_a_real_systemd(tmp_path: Path) -> None:
    source, place, config = tmp_path / "dataset", tmp_path / "mnt", tmp_path / "set.toml"
    make_files(source, 300, (1, 60_000), directories=4)
    settle()
    place.mkdir()
    config.write_text(
        f'source = "{source}"\nmountpoint = "{place}"\ncache-dir = "{tmp_path}/cache"\n'
        'read-only = true\ncache-size = "1G"\n'
    )
    with machine(tmp_path) as m:
        unit = UNIT.read_text().replace("/etc/cachefs/%i.toml", str(config))
        unit = unit.replace("/opt/cachefs/bin/cachefs", " ".join(CLI)).replace("WatchdogSec=60", "WatchdogSec=3")
        unit += f"\n[Service]\nWorkingDirectory={REPOSITORY}\nStandardError=append:{tmp_path}/service.log\n"
        (m.units / "cachefs@.service").write_text(unit)
        m.systemctl("daemon-reload")
        said = m.systemctl("start", "cachefs@set")
        assert m.show("ActiveState") == "active", (said, m.log.read_text())
        assert f"{source} on {place}: 0 files cached" in m.show("StatusText")
        assert m.run("stat", "-f", "-c", "%T", place).stdout.strip() == "fuseblk"  # in the machine's own namespace
        assert m.show("NFileDescriptorStore") == "4"
        stop = tmp_path / "stop"
        enter = ["nsenter", "-t", str(m.pid), "-m", "-p"]
        reader = subprocess.Popen(
            [*enter, sys.executable, "-c", READ, place, stop], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        wait_for(Path(f"{stop}.started").exists, bool)
        pids = [m.show("MainPID")]
        for action in ("restart", "kill", "watchdog"):
            if action == "restart":
                m.systemctl("restart", "cachefs@set")
            elif action == "kill":
                m.systemctl("kill", "--kill-who=main", "--signal=KILL", "cachefs@set")
            else:
                m.systemctl("kill", "--kill-who=main", "--signal=STOP", "cachefs@set")
            wait_for(lambda: m.show("MainPID"), lambda now: now not in ("0", pids[-1]), timeout_s=60)
            wait_for(lambda: m.show("ActiveState"), lambda state: state == "active")
            pids.append(m.show("MainPID"))
        config.write_text(config.read_text().replace("1G", "2G"))
        m.systemctl("reload", "cachefs@set")
        wait_for(lambda: m.show("StatusText"), lambda text: "of 2 GiB" in text)
        stop.touch()
        read, wrong = reader.communicate(timeout=90)
        assert reader.returncode == 0 and int(read) > 300, (wrong, (tmp_path / "service.log").read_text())
        m.systemctl("stop", "cachefs@set")
        assert m.show("ActiveState") == "inactive" and m.show("Result") == "success"
        assert str(place) not in m.run("cat", "/proc/self/mountinfo").stdout
        assert m.run("pgrep", "-f", "cachefs-fastpath").stdout == ""


# --- mount(8) --------------------------------------------------------------------------------------------------------


def test_options_of_mount_8() -> None:
    given = [
        "/ceph/a b",
        "/data",
        "-o",
        "ro,cache-size=5G,mutable=*.log,mutable=runs/**,allow_other,_netdev,x-systemd.automount",
    ]
    with mount_command.make_context("mount", mount_helper.arguments(given)) as context:
        names = "source", "mountpoint", "read_only", "cache_size", "mutable", "allow_other"
        assert [context.params[name] for name in names] == [
            "/ceph/a b", "/data", True, 5 << 30, ("*.log", "runs/**"), True,
        ]  # fmt: skip
    with mount_command.make_context("mount", mount_helper.arguments(["-n", "-o", "rw,noatime,nofail", "/a", "/b"])):
        pass


def test_mount_8(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "mnt"
    place.mkdir()
    helper = [sys.executable, "-c", "from daemon.cli.mount_helper import main; main()"]
    options = f"ro,cache-dir={tmp_path}/cache,cache-size=1G,_netdev"
    if Mount.no_fastpath:
        options += ",no-fastpath"
    done = subprocess.run(
        [*helper, source, place, "-o", options], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert contents(place) == contents(source)
    cachefs("umount", place)
    for bad, code in (("cache-sise=5G", 1), ("cache-size=5 bananas", 1)):
        done = subprocess.run(
            [*helper, source, place, "-o", bad], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr.count("\n")) == (code, 1) and done.stderr.startswith(
            "mount.fuse.cachefs: "
        )
    done = subprocess.run(
        [*helper, tmp_path / "no", place], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 32 and done.stderr.count("\n") == 1
