"""`cachefs doctor`: find problems of this machine, a mount or a source that cost speed or safety, and advise."""

import json
import os
import platform
import random
import re
import resource
import shutil
import socket
import stat
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil

from cachefs.client import mount_table
from cachefs.client.client import Client
from cachefs.client.locations import cache_root, is_root
from cachefs.errors import CacheFsError
from cachefs.system.descriptors import closing
from daemon.config.parameters import PLACE, json_option
from daemon.kernel import probe
from daemon.kernel.mounts import MAX_BACKGROUND, READ_AHEAD_KIB
from daemon.output import print_json, readable_size, say

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
REMOTE = ("nfs", "nfs4", "ceph", "lustre", "fuse", "cifs", "gpfs", "beegfs")
_VIRTUAL_DISK = re.compile(r"/virtio\d|/(xvd|nbd|rbd|zram)[a-z0-9]+$|/vbd-")
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
    """What to change, and why. Empty: no problem."""


def found(name: str, value: str, problem: object, advice: str) -> Finding:
    """With advice if there is a problem."""
    return Finding(name, value, advice if problem else "")


def machine() -> Iterator[Finding]:
    from cachefs.fastpath import processes  # trio is slow to load

    yield Finding("kernel", platform.release())
    usable = os.access("/dev/fuse", os.R_OK | os.W_OK)
    yield found("/dev/fuse", "usable" if usable else "not usable", not usable, "run modprobe fuse; check its mode")
    built = processes.is_built()
    advice = "install gcc, liblmdb-dev and libxxhash-dev, then reinstall cachefs-ml: Python alone is 4 times slower"
    yield found("fast path", "built" if built else "not built", not built, advice)
    if not is_root():
        missing = shutil.which("fusermount3") is None
        yield found("fusermount3", "missing" if missing else "installed", missing, "install fuse3")
    memory = psutil.virtual_memory()
    tight = memory.available < memory.total * 0.05
    value = f"{readable_size(memory.available)} of {readable_size(memory.total)} available"
    yield found("memory", value, tight, "free memory: little is left for the page cache, which answers fastest")
    swap = psutil.swap_memory()
    if swap.total:
        swapped = swap.used > swap.total * 0.5
        yield found("swap", f"{readable_size(swap.used)} used", swapped, "free memory: a swapped-out daemon is slow")


def disk(directory: Path, wanted_bytes: int = 0) -> Iterator[Finding]:
    """The local disk: type, free space, speed."""
    place = directory
    while not place.exists():
        place = place.parent
    kind = _filesystem_type(os.path.realpath(place))
    yield found("cache disk", f"{place}, {kind}", kind in REMOTE, "put --cache-dir on a local disk")
    device = os.stat(place).st_dev
    if turns(Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")):
        yield Finding("cache disk rotates", "yes", "use an SSD: random reads of small files are slow on this disk")
    usage = psutil.disk_usage(str(place))
    advice = f"reduce --cache-size: {readable_size(wanted_bytes)} is more than the disk has"
    value = f"{readable_size(usage.free)} of {readable_size(usage.total)} free"
    yield found("cache disk room", value, usage.total < wanted_bytes, advice)
    yield speed(place)


def turns(device: Path) -> bool:
    """Is this a disk with moving parts, or a partition of one? `device`: its directory in /sys/dev/block.

    The flag of a virtual disk says nothing about the disk beneath it.
    """
    device = device.resolve()
    whole = device.parent if (device / "partition").exists() else device
    with suppress(OSError):
        rotates = (whole / "queue/rotational").read_text().strip() == "1"
        return rotates and not _VIRTUAL_DISK.search(str(whole))
    return False


def _filesystem_type(path: str) -> str:
    """Reads the mount table only: an access to a mount may hang."""
    mount = mount_table.covering(path)
    return mount.fstype if mount else "unknown"


def speed(place: Path) -> Finding:
    """Write and read some tens of megabytes, past the page cache."""
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            fd = file.fileno()
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
        return Finding("cache disk speed", "unknown", f"cannot write to {place} and read it: {error.strerror}")
    advice = "use a faster disk: data that arrive faster than it can write are not cached"
    value = f"writes {readable_size(int(written))}/s, reads {readable_size(int(read))}/s"
    return found("cache disk speed", value, written < SLOW_DISK_MB * 1e6, advice)


def source(place: str) -> Iterator[Finding]:
    """The parallel filesystem: type, latency, known problems of its clients."""
    kind = _filesystem_type(place)
    yield Finding("source", f"{place}, {kind}")
    answer = probe.answer_of_child(_ASK_SOURCE, place, kind, timeout_s=SOURCE_TIMEOUT_S)
    if answer is None:
        advice = "check the parallel filesystem: it hangs on this node, and only cached data can be read"
        yield Finding("source answers", f"not within {SOURCE_TIMEOUT_S:.0f} s", advice)
        return
    yield from (Finding(**finding) for finding in json.loads(answer or b"[]"))


def ask_source(place: str, kind: str) -> Iterator[Finding]:
    samples = _sample(place)
    if samples:
        stat_ms = 1e3 * statistics.median(_timed(os.stat, path) for path in samples)
        open_ms = 1e3 * statistics.median(_timed(_read_a_byte, path) for path in samples)
        slow = max(stat_ms, open_ms) > SLOW_SOURCE_MS
        value = f"stat {stat_ms:.2f} ms, open and read {open_ms:.2f} ms"
        yield found("source latency", value, slow, "run cachefs warmup before the first epoch, with more --jobs")
    if (refused := refused_to_root(place)) is not None:
        advice = "export the source with no_root_squash: files that only their owner may read are not cached in advance"
        yield Finding("root at the source", f"squashed: {refused} is refused", advice)
    if kind == "ceph":
        yield from map(_caps, _kernel_caps())
    elif kind == "fuse.ceph-fuse":
        yield from map(_caps, fuse_caps(place, Path("/proc/net/unix")))


def _sample(place: str) -> list[str]:
    listed: list[str] = []
    for path, _, files in os.walk(place):
        listed += [os.path.join(path, name) for name in files]
        if len(listed) > MAX_LISTED:
            break
    return random.Random(0).sample(listed, min(SAMPLE_FILES, len(listed)))


def refused_to_root(place: str) -> str | None:
    """A file or directory that the source refuses root, as NFS servers do with root_squash. None: none was found."""
    looked_at = 0
    waiting = [place] if is_root() else []
    while waiting and looked_at < MAX_LISTED:
        directory = waiting.pop()
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    looked_at += 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.is_file(follow_symlinks=False) and not entry.stat().st_mode & stat.S_IROTH:
                        _read_a_byte(entry.path)
        except PermissionError as error:
            return error.filename or directory
        except OSError:
            continue
    return None


def _timed(call: Callable[[str], object], path: str) -> float:
    started = time.perf_counter()
    with suppress(OSError):
        call(path)
    return time.perf_counter() - started


def _read_a_byte(path: str) -> None:
    with closing(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as fd:
        os.read(fd, 1)


def _caps(count: int) -> Finding:
    advice = "pin the metadata (--read-only): the MDS recalls caps near mds_max_caps_per_client (1 Mi)"
    return found("CephFS caps", f"{count:,} held", count > MANY_CAPS, advice)


def _kernel_caps() -> Iterator[int]:
    """The capabilities that each kernel client of CephFS holds. Needs debugfs."""
    for file in Path("/sys/kernel/debug/ceph").glob("*/caps"):
        lines = [line.split() for line in file.read_text().splitlines()]
        yield next((int(line[1]) for line in lines if len(line) > 1 and line[0] == "total"), 0)


def fuse_caps(place: str, sockets: Path) -> Iterator[int]:
    """The capabilities that the ceph-fuse of this place holds. Needs permission to use its admin socket.

    `sockets`: /proc/net/unix, which lists the admin sockets of this machine.
    """
    try:
        client = int(os.getxattr(place, "ceph.client_id").removeprefix(b"client"))
    except (OSError, ValueError):
        return
    paths = {line.split(" ")[-1] for line in sockets.read_text().splitlines() if line.endswith(".asok")}
    for path in sorted(paths):
        with suppress(OSError, ValueError, KeyError, TypeError):  # of another daemon, or not permitted
            sessions = _ask_admin_socket(path, "mds_sessions")
            if sessions["id"] == client:
                yield sum(session["num_caps"] for session in sessions["sessions"])
                return


def _ask_admin_socket(path: str, command: str) -> Any:
    """A Ceph daemon answers with the length of a JSON text, and the text."""
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
    """A mount: limits of the kernel, and counters."""
    top = mount_table.top_mount(mountpoint)
    if top is None:
        return
    minor = top.device.partition(":")[2]
    for name, path, wanted in (
        ("readahead", Path(f"/sys/class/bdi/{top.device}/read_ahead_kb"), READ_AHEAD_KIB),
        ("requests at once", Path(f"/sys/fs/fuse/connections/{minor}/max_background"), MAX_BACKGROUND),
    ):
        with suppress(OSError, ValueError):
            value = int(path.read_text())
            advice = f"run echo {wanted} > {path} as root: large reads are split into small requests"
            yield found(name, f"{value:,}", value < wanted, advice)
    yield from open_files(status["pid"])
    if status.get("index_problem"):
        yield Finding("index of the cache", "damaged", status["index_problem"])
    if status["source_problem"]:
        advice = "mount the source again" if status["source_lost"] else "unmount cachefs and mount it again"
        yield Finding("source of the mount", status["source_problem"], advice)
    if problem := status.get("prefetch_problem"):  # a daemon of an older version does not say
        yield Finding("prefetch graph", problem, "build the graph again, with --root")
    if not status["fastpath"]:
        yield Finding("fast path of the mount", "none", "mount with the fast path: Python alone is 4 times slower")
    for key, name, advice in (
        ("errors", "cache errors", "see the log, which names each kind once a minute: the disk may be full or broken"),
        ("refused_changes", "refused changes", "see the log for the files: use --mutable for what jobs write to again"),
        ("stale_reads", "stale reads", "use --mutable or --profile changing: the dataset changes while it is read"),
        ("corrupt_records", "corrupt records", "replace the local disk: it returns other bytes than were written"),
        ("source_stuck_calls", "stuck calls", "check the parallel filesystem: it hangs on this node"),
        ("source_timeouts", "timeouts", "raise --source-timeout if the source is often slow"),
    ):
        if status[key]:
            yield Finding(name, f"{status[key]:,}", advice)
    size, used = status["cache_size_bytes"], status["blob_bytes"]
    full = used > 0.98 * size and status["skipped_admissions"]
    advice = "the dataset does not fit: `cachefs simulate` computes the hits of a larger cache"
    yield found("cache", f"{readable_size(used)} of {readable_size(size)}", full, advice)


def open_files(pid: int) -> Iterator[Finding]:
    """Of a daemon: the limits of this shell are not its own."""
    with suppress(OSError):
        used, limit = len(os.listdir(f"/proc/{pid}/fd")), resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
        few = limit != resource.RLIM_INFINITY and used > limit / 2
        advice = "raise LimitNOFILE of the service: each file open for writing needs one"
        yield found("open files", f"{used:,} of {limit:,}" if limit > 0 else f"{used:,}", few, advice)


def _is_directory(path: str) -> bool:
    try:
        return stat.S_ISDIR(probe.mode_of(path, timeout_s=SOURCE_TIMEOUT_S))
    except TimeoutError:
        raise CacheFsError(f"{path} does not answer") from None
    except OSError:
        return False


@click.command()
@click.argument("path", required=False, type=PLACE)
@json_option
def doctor(path: str | None, as_json: bool) -> None:
    """Check this machine, a mount or a source.

    PATH is a cachefs mount, or a directory that will be a source.
    The exit status is 1 if there is advice. Writes and deletes 64 MB on the cache disk.

    \b
    Examples:
      cachefs doctor
      cachefs doctor /data/imagenet
      cachefs doctor /ceph/imagenet
    """
    findings = list(machine())
    if path is None:
        findings += disk(cache_root())
    else:
        place = mount_table.absolute(path, partial(probe.realpath, timeout_s=SOURCE_TIMEOUT_S))
        covering = mount_table.covering(place)
        if covering is not None and covering.fstype == mount_table.FSTYPE:
            client = Client(covering.mountpoint)
            status = client.status()
            findings += mounted(covering.mountpoint, status)
            findings += disk(client.cache_dir(), status["cache_size_bytes"])
            if status["source"] != covering.mountpoint:  # else only the daemon can reach it
                findings += source(status["source"])
        elif _is_directory(place):
            findings += source(place)
            findings += disk(cache_root())
        else:
            raise CacheFsError(f"{path} is not a directory")
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            say(f"{'!' if finding.advice else '·'} {finding.name}: {finding.value}")
            if finding.advice:
                say(f"    {finding.advice}")
    if any(finding.advice for finding in findings):
        sys.exit(1)
