"""`cachefs doctor`: what of this machine, or of a mount, is in the way of speed or safety; what to change, and why."""

import json
import os
import platform
import random
import resource
import shutil
import socket
import stat
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil
from rich.filesize import decimal

from cachefs.client import mount_table
from cachefs.client.client import Client
from cachefs.client.locations import cache_root, is_root
from cachefs.errors import CacheFsError
from daemon.config.parameters import Place, one_line_errors
from daemon.kernel import probe
from daemon.kernel.mounts import MAX_BACKGROUND, READ_AHEAD_KIB
from daemon.output import say

TEST_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20
SAMPLE_FILES = 32
MAX_LISTED = 5000
SLOW_DISK_MB = 300
SLOW_SOURCE_MS = 20.0
MANY_CAPS = 800_000
ADMIN_TIMEOUT_S = 2.0
SOURCE_TIMEOUT_S = 20.0
MAX_ANSWER_BYTES = 1 << 20
RESEND = (6, 9)
_ASK_SOURCE = """
import json, os, sys
from dataclasses import asdict
from daemon.cli import doctor
findings = doctor.ask_source(*sys.argv[1:])
os.write(1, json.dumps([asdict(finding) for finding in findings]).encode())
"""


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    value: str
    advice: str = ""
    """What to change, and why. Empty: it is fine."""


def version_of(release: str) -> tuple[int, int]:
    parts = release.split(".")
    return int(parts[0]), int("".join(c for c in parts[1] if c.isdigit()) or 0)


def machine() -> Iterator[Finding]:
    from cachefs.fastpath import processes  # trio takes its time to load

    release = platform.release()
    old = version_of(release) < RESEND
    yield Finding("kernel", release, "before 6.9 a killed fast path may cost a request an EIO: update" if old else "")
    fuse = Path("/dev/fuse")
    usable = fuse.exists() and os.access(fuse, os.R_OK | os.W_OK)
    yield Finding("/dev/fuse", "usable" if usable else "not usable", "" if usable else "modprobe fuse; check its mode")
    built = processes.is_built()
    advice = "install gcc, liblmdb-dev and libxxhash-dev, and cachefs again: Python alone is 4 times slower"
    yield Finding("fast path", "built" if built else "not built", "" if built else advice)
    if not is_root():
        there = shutil.which("fusermount3") is not None
        yield Finding("fusermount3", "there" if there else "missing", "" if there else "install fuse3")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = hard != resource.RLIM_INFINITY and hard < 65536
    yield Finding("open files", f"{hard:,} at most", "raise LimitNOFILE: writers hold one each" if few else "")
    memory = psutil.virtual_memory()
    tight = memory.available < memory.total * 0.05
    advice = "little is left for the page cache, which answers fastest" if tight else ""
    yield Finding("memory", f"{decimal(memory.available)} of {decimal(memory.total)} available", advice)
    swap = psutil.swap_memory()
    if swap.total:
        used = swap.used > swap.total * 0.5
        yield Finding("swap", f"{decimal(swap.used)} used", "a daemon that is swapped out is slow" if used else "")


def disk(directory: Path, wanted_bytes: int | None) -> Iterator[Finding]:
    """The local disk: kind, room, speed."""
    place = directory
    while not place.exists():
        place = place.parent
    kind = _kind(os.path.realpath(place))
    remote = kind in ("nfs", "nfs4", "ceph", "lustre", "fuse", "cifs", "gpfs", "beegfs")
    yield Finding("cache disk", f"{place}, {kind}", "not a local disk: put --cache-dir on one" if remote else "")
    device = os.stat(place).st_dev
    rotational = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/queue/rotational")
    if rotational.exists() and rotational.read_text().strip() == "1":
        yield Finding("cache disk turns", "yes", "random reads of small files need an SSD")
    usage = psutil.disk_usage(str(place))
    short = wanted_bytes is not None and usage.total < wanted_bytes
    advice = f"--cache-size is {decimal(wanted_bytes or 0)}: more than the disk has" if short else ""
    yield Finding("cache disk room", f"{decimal(usage.free)} of {decimal(usage.total)} free", advice)
    yield from speed(place)


def _kind(path: str) -> str:
    """The filesystem type; no mount is touched, because any may hang."""
    mount = mount_table.covering(path)
    return mount.fstype if mount else "unknown"


def speed(place: Path) -> Iterator[Finding]:
    """Written and read past the page cache, a few tens of megabytes."""
    path = place / f".cachefs-doctor-{os.getpid()}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        yield Finding("cache disk speed", "unknown", f"cannot write there: {error.strerror}")
        return
    try:
        block = os.urandom(BLOCK_BYTES)
        started = time.perf_counter()
        for _ in range(TEST_BYTES // BLOCK_BYTES):
            os.write(fd, block)
        os.fdatasync(fd)
        written = TEST_BYTES / (time.perf_counter() - started)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        for start in range(0, TEST_BYTES, BLOCK_BYTES):
            os.pread(fd, BLOCK_BYTES, start)
        read = TEST_BYTES / (time.perf_counter() - started)
    except OSError as error:
        yield Finding("cache disk speed", "unknown", f"it failed: {error.strerror}")
        return
    finally:
        os.close(fd)
        path.unlink()
    advice = "slower than most parallel filesystems: a first epoch is not cached as fast as it is read"
    yield Finding(
        "cache disk speed",
        f"writes {decimal(int(written))}/s, reads {decimal(int(read))}/s",
        advice if written < SLOW_DISK_MB * 1e6 else "",
    )


def source(place: str) -> Iterator[Finding]:
    """The parallel filesystem: kind, latency, what its clients are known to do."""
    kind = _kind(place)
    yield Finding("source", f"{place}, {kind}")
    answer = probe.answer_of_child(_ASK_SOURCE, place, kind, timeout_s=SOURCE_TIMEOUT_S)
    if answer is None:
        advice = "the parallel filesystem hangs for this node: only what is cached can be read"
        yield Finding("source answers", f"not within {SOURCE_TIMEOUT_S:.0f} s", advice)
        return
    yield from (Finding(**finding) for finding in json.loads(answer or b"[]"))


def ask_source(place: str, kind: str) -> Iterator[Finding]:
    samples = _sample(place)
    if samples:
        stat_ms = 1e3 * statistics.median(_timed(os.stat, path) for path in samples)
        open_ms = 1e3 * statistics.median(_timed(_read_a_byte, path) for path in samples)
        slow = max(stat_ms, open_ms) > SLOW_SOURCE_MS
        advice = "warm up before the first epoch, with more --jobs than usual" if slow else ""
        yield Finding("source latency", f"stat {stat_ms:.2f} ms, open and read {open_ms:.2f} ms", advice)
    if kind == "ceph":
        yield from map(_caps, _kernel_caps())
    elif kind == "fuse.ceph-fuse":
        yield from map(_caps, fuse_caps(place, Path("/proc/net/unix")))


def _sample(place: str) -> list[str]:
    found: list[str] = []
    for path, _, files in os.walk(place):
        found += [os.path.join(path, name) for name in files]
        if len(found) > MAX_LISTED:
            break
    return random.Random(0).sample(found, min(SAMPLE_FILES, len(found)))


def _timed(call: Callable[[str], object], path: str) -> float:
    started = time.perf_counter()
    with suppress(OSError):
        call(path)
    return time.perf_counter() - started


def _read_a_byte(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.read(fd, 1)
    finally:
        os.close(fd)


def _caps(held: int) -> Finding:
    advice = "near mds_max_caps_per_client (1 Mi): the MDS recalls them. Pin the metadata: --read-only"
    return Finding("CephFS caps", f"{held:,} held", advice if held > MANY_CAPS else "")


def _kernel_caps() -> Iterator[int]:
    """Capabilities that each of CephFS's kernel clients holds; needs debugfs."""
    for file in Path("/sys/kernel/debug/ceph").glob("*/caps"):
        lines = [line.split() for line in file.read_text().splitlines()]
        yield next((int(line[1]) for line in lines if len(line) > 1 and line[0] == "total"), 0)


def fuse_caps(place: str, sockets: Path) -> Iterator[int]:
    """Those that the ceph-fuse of this place holds; needs the right to use its admin socket.

    `sockets`: /proc/net/unix, which says where the admin sockets of this machine are.
    """
    try:
        client = int(os.getxattr(place, "ceph.client_id").removeprefix(b"client"))
    except (OSError, ValueError):
        return
    paths = {line.split(" ")[-1] for line in sockets.read_text().splitlines() if line.endswith(".asok")}
    for path in sorted(paths):
        with suppress(OSError, ValueError, KeyError, TypeError):  # of another daemon, or not for us
            sessions = _ask_admin_socket(path, "mds_sessions")
            if sessions["id"] == client:
                yield sum(session["num_caps"] for session in sessions["sessions"])
                return


def _ask_admin_socket(path: str, command: str) -> Any:
    """A Ceph daemon answers with the length of a JSON text, and that."""
    if os.stat(path).st_uid not in (0, os.geteuid()):
        raise PermissionError(path)
    with socket.socket(socket.AF_UNIX) as admin:
        admin.settimeout(ADMIN_TIMEOUT_S)
        admin.connect(path)
        admin.sendall(json.dumps({"prefix": command}).encode() + b"\0")
        with admin.makefile("rb") as answer:
            length = int.from_bytes(answer.read(4), "big")
            return json.loads(answer.read(min(length, MAX_ANSWER_BYTES)))


def mounted(mountpoint: str, status: dict[str, Any]) -> Iterator[Finding]:
    """A mount of ours: limits of the kernel, and what it counted."""
    top = mount_table.top_mount(mountpoint)
    if top is None:
        return
    minor = top.device.partition(":")[2]
    for name, path, wanted in (
        ("read-ahead", Path(f"/sys/class/bdi/{top.device}/read_ahead_kb"), READ_AHEAD_KIB),
        ("requests at once", Path(f"/sys/fs/fuse/connections/{minor}/max_background"), MAX_BACKGROUND),
    ):
        try:
            value = int(path.read_text())
        except (OSError, ValueError):
            continue
        advice = f"echo {wanted} > {path}, as root: large reads come in small pieces" if value < wanted else ""
        yield Finding(name, f"{value:,}", advice)
    if not status["fastpath"]:
        yield Finding("fast path of the mount", "none", "Python answers alone: 4 times slower")
    for key, name, advice in (
        ("errors", "cache errors", "the log names the first of each kind: disk full, or broken"),
        ("stale_reads", "stale reads", "the dataset changes while it is read: --mutable, or --profile changing"),
        ("corrupt_records", "corrupt records", "the local disk gives back other bytes than were written: replace it"),
        ("source_stuck_calls", "stuck calls", "the parallel filesystem hangs for this node"),
        ("source_timeouts", "timeouts", "the source is slow at times: raise --source-timeout if that is usual"),
    ):
        count = status[key]
        if count:
            yield Finding(name, f"{count:,}", advice)
    size, used = status["cache_size_bytes"], status["blob_bytes"]
    full = used > 0.98 * size and status["skipped_admissions"]
    advice = "the dataset does not fit: `cachefs simulate` says what a larger cache would hit" if full else ""
    yield Finding("cache", f"{decimal(used)} of {decimal(size)}", advice)


def _is_directory(path: str) -> bool:
    try:
        return stat.S_ISDIR(probe.mode_of(path, timeout_s=SOURCE_TIMEOUT_S))
    except TimeoutError:
        raise CacheFsError(f"{path} does not answer") from None
    except OSError:
        return False


@click.command()
@click.argument("path", required=False, type=Place())
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@one_line_errors
def doctor(path: str | None, as_json: bool) -> None:
    """Look at this machine, at a mount of ours, or at a directory that is to become a source.

    The exit status is 1 if there is something to change. Writes and deletes 64 MB on the cache disk.

    \b
    Examples:
      cachefs doctor
      cachefs doctor /data/imagenet
      cachefs doctor /ceph/imagenet
    """
    findings = list(machine())
    if path is None:
        findings += disk(cache_root(), None)
    else:
        place = mount_table.absolute(path, partial(probe.realpath, timeout_s=SOURCE_TIMEOUT_S))
        if mount_table.is_mounted(place):
            client = Client(place)
            settings, status = client.settings(), client.status()
            findings += mounted(place, status)
            findings += disk(Path(settings["cache-dir"]["value"]), status["cache_size_bytes"])
            if settings["source"]["value"] != place:  # else only the daemon can reach it
                findings += source(settings["source"]["value"])
        elif _is_directory(place):
            findings += source(place)
            findings += disk(cache_root(), None)
        else:
            raise CacheFsError(f"{path} is no directory")
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            say(f"{'!' if finding.advice else '·'} {finding.name}: {finding.value}")
            if finding.advice:
                say(f"    {finding.advice}")
    if any(finding.advice for finding in findings):
        sys.exit(1)
