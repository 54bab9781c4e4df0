"""A real CephFS whose ceph-fuse is killed and mounted again, or whose client is evicted.

Hits never fail, and misses work within `BACK_WITHIN_S` seconds of the source's return.

CEPHFS_TOOLS names a directory with `cephfs-up` and `cephfs-down`, which start and stop a cluster on this machine.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Mount, cachefs, contents, make_files, mounted_on, settle, wait_for

pytestmark = pytest.mark.full_age  # times of files come from another clock

MakeMount = Callable[..., Mount]
TOOLS = os.environ.get("CEPHFS_TOOLS")

pytestmark = [
    pytest.mark.mount,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(TOOLS is None or os.geteuid() != 0, reason="needs root and CEPHFS_TOOLS"),
]

MODES = {"read-only": ["--read-only"], "read-write": [], "mutable": ["--mutable", "**"]}
CACHED = ["read-only", "read-write"]
BACK_WITHIN_S = 5.0


def drop_caches() -> None:
    """Of the whole machine: also of what lies beneath the mount."""
    Path("/proc/sys/vm/drop_caches").write_text("3")


class CephFs:
    def __init__(self, base: Path) -> None:
        self.directory, self.path = base / "cluster", base / "cephfs"
        self._up("--osd", "memstore", "--no-mgr", "--mon-port", "3391", self.path)
        self._ceph("fs", "set", "cephfs", "session_autoclose", "30")

    def _run(self, tool: str, *arguments: object) -> None:
        assert TOOLS is not None
        command = [str(Path(TOOLS) / tool), "--dir", str(self.directory), *map(str, arguments)]
        # No pipe: the processes that it starts would keep it open.
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True, timeout=200)

    def _up(self, *arguments: object) -> None:
        self._run("cephfs-up", *arguments)

    def _ceph(self, *arguments: str) -> Any:
        command = ["ceph", "-c", str(self.directory / "ceph.conf"), "-f", "json", *arguments]
        said = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
        return json.loads(said) if said.strip() else None

    def client_pid(self) -> int:
        (file,) = (self.directory / "run").glob("fuse-*.pid")
        return int(file.read_text())

    def sessions(self) -> list[int]:
        return [session["id"] for session in self._ceph("tell", "mds.0", "session", "ls")]

    def evict(self) -> None:
        """As an operator does it, or the cluster to a client that is silent for too long."""
        for session in self.sessions():
            self._ceph("tell", "mds.0", "session", "evict", f"id={session}")

    def kill(self) -> None:
        """The client's caps go at once, not after 30 s: the next client would wait for them."""
        os.kill(self.client_pid(), signal.SIGKILL)
        self.evict()

    def again(self) -> None:
        subprocess.run(["umount", "-l", self.path], check=True)
        self._up(self.path)

    def close(self) -> None:
        self._run("cephfs-down", "--force", "--delete")


@pytest.fixture(scope="module")
def cephfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephFs]:
    made = CephFs(tmp_path_factory.mktemp("ceph"))
    yield made
    made.close()


@pytest.fixture
def dataset(cephfs: CephFs, tmp_path: Path) -> tuple[Path, dict[Path, bytes]]:
    """A directory of the CephFS, and what is in it."""
    local = tmp_path / "local"
    make_files(local, 40)
    root = cephfs.path / tmp_path.name
    subprocess.run(["cp", "-r", local, root], check=True)
    subprocess.run(["sync", "-f", root], check=True)
    for path in root.rglob("f*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    settle()
    return root, contents(local)


def check(m: Mount, expected: dict[Path, bytes]) -> None:
    for path, data in expected.items():
        assert (m.path / path).read_bytes() == data


def check_back(m: Mount, expected: dict[Path, bytes]) -> None:
    """The source has just returned: the first of these misses must work soon, and the others with it."""
    returned = time.monotonic()
    path, data = next(iter(expected.items()))
    assert (m.path / path).read_bytes() == data
    elapsed = time.monotonic() - returned
    print(f"the first miss worked {elapsed:.2f} s after the source's return")
    assert elapsed < BACK_WITHIN_S
    check(m, expected)


@pytest.mark.promise("FA-10")
@pytest.mark.parametrize("restarts", [False, True], ids=["", "restart"])
@pytest.mark.parametrize("mode", MODES)
def test_a_client_that_is_killed_and_mounted_again(
    cephfs: CephFs, dataset: tuple[Path, dict[Path, bytes]], mount: MakeMount, mode: str, restarts: bool
) -> None:
    root, files = dataset
    items = list(files.items())
    first, rest = dict(items[::2]), dict(items[1::2])
    m = mount(root, *MODES[mode])
    if restarts and m.no_fastpath:
        pytest.skip("needs a fast path")
    check(m, first)
    if mode in CACHED:
        m.flush()
    cephfs.kill()
    drop_caches()
    if restarts:
        cachefs("restart", m.path)
        m.pid = int(m.status()["pid"])
    if mode in CACHED:
        check(m, first)
    cephfs.again()
    check_back(m, rest)
    check(m, first)
    status = m.status()
    assert (status["source_lost"], status["source_reconnects"]) == (False, 1)


@pytest.mark.promise("FA-10")
@pytest.mark.parametrize("mode", CACHED)
def test_a_client_that_is_evicted(
    cephfs: CephFs, dataset: tuple[Path, dict[Path, bytes]], mount: MakeMount, mode: str
) -> None:
    """Its mount answers, with errors, until the operator mounts it again."""
    root, files = dataset
    items = list(files.items())
    first, rest = dict(items[::2]), dict(items[1::2])
    m = mount(root, *MODES[mode])
    check(m, first)
    m.flush()
    old = cephfs.client_pid()
    cephfs.evict()
    drop_caches()
    check(m, first)
    os.kill(old, signal.SIGKILL)
    cephfs.again()
    assert mounted_on(cephfs.path)
    check_back(m, rest)
    wait_for(lambda: m.status()["source_lost"], lambda is_lost: not is_lost)
    check(m, first)
