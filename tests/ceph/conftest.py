"""A real CephFS on this machine, whose MDS recalls caps all the time.

CEPHFS_TOOLS names a directory with `cephfs-up` and `cephfs-down`, which start and stop a cluster.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Mount, contents, free_port, make_files, wait_for

TOOLS = os.environ.get("CEPHFS_TOOLS")
MODES = {"read-only": ["--read-only"], "read-write": [], "mutable": ["--mutable", "**"]}
CACHED = ["read-only", "read-write"]
BACK_WITHIN_S = 5.0
FEW_CAPS = 20
"""So many a client may have: of 40 files it must give back half, all the time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            for marker in (pytest.mark.mount, pytest.mark.slow, pytest.mark.timeout(300)):
                item.add_marker(marker)
            if TOOLS is None or os.geteuid() != 0:
                item.add_marker(pytest.mark.skip(reason="needs root and CEPHFS_TOOLS"))


def drop_caches() -> None:
    """Of the whole machine: also of what lies beneath the mount."""
    Path("/proc/sys/vm/drop_caches").write_text("3")


class CephFs:
    def __init__(self, base: Path) -> None:
        self.directory, self.path = base / "cluster", base / "cephfs"
        limits = {"mds_min_caps_per_client": 10, "mds_tick_interval": 1, "mds_beacon_grace": 6}
        settings = [part for name, value in limits.items() for part in ("--mds-set", f"{name}={value}")]
        self._up(
            *("--osd", "memstore", "--no-mgr", "--mon-port", free_port(), "--mds-max-caps", FEW_CAPS),
            *settings,
            self.path,
        )
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

    def _pid(self, name: str) -> int:
        (file,) = (self.directory / "run").glob(f"{name}.pid")
        return int(file.read_text())

    def client_pid(self) -> int:
        return self._pid("fuse-*")

    def sessions(self) -> list[dict[str, Any]]:
        return list(self._ceph("tell", "mds.0", "session", "ls"))

    def evict(self) -> None:
        """As an operator does it, or the cluster to a client that is silent for too long."""
        for session in self.sessions():
            self._ceph("tell", "mds.0", "session", "evict", f"id={session['id']}")

    def blocklist(self) -> None:
        for session in self.sessions():
            self._ceph("osd", "blocklist", "add", session["inst"].split(" ")[1].removeprefix("v1:"))

    def kill(self) -> None:
        """The client's caps go at once, not after 30 s: the next client would wait for them."""
        os.kill(self.client_pid(), signal.SIGKILL)
        self.evict()

    def again(self) -> None:
        """The client, mounted anew."""
        subprocess.run(["umount", "-l", self.path], check=True)
        self._up(self.path)

    def kill_mds(self) -> None:
        pidfd = os.pidfd_open(self._pid("mds.a"))
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)

    def start_mds(self) -> None:
        """Returns when it serves."""
        self._up("--no-mount")

    def stop_osd(self) -> None:
        os.kill(self._pid("osd.0"), signal.SIGSTOP)

    def continue_osd(self) -> None:
        """Other OSDs would have said long ago that it is down. Here nobody does, and its placement groups, whose read
        leases have run out (after 16 s), stay laggy until it peers anew."""
        self._ceph("osd", "down", "0")
        os.kill(self._pid("osd.0"), signal.SIGCONT)

    def rctime(self, path: Path) -> float:
        return float(os.getxattr(path, "ceph.dir.rctime"))

    def close(self) -> None:
        self._run("cephfs-down", "--force", "--delete")


@pytest.fixture(scope="session")
def cephfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephFs]:
    base = tmp_path_factory.mktemp("ceph")
    try:
        made = CephFs(base)
    except BaseException:
        assert TOOLS is not None
        subprocess.run(
            [str(Path(TOOLS) / "cephfs-down"), "--dir", base / "cluster", "--force", "--delete"], check=False
        )
        raise
    yield made
    made.close()


Dataset = tuple[Path, dict[Path, bytes]]
"""A directory of the CephFS, and what is in it."""


def flush(root: Path) -> None:
    """Of what was written, to the cluster: sync does not."""
    for path in root.rglob("f*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


@pytest.fixture
def dataset(cephfs: CephFs, tmp_path: Path) -> Dataset:
    local = tmp_path / "local"
    make_files(local, 40)
    root = cephfs.path / tmp_path.name
    subprocess.run(["cp", "-r", local, root], check=True)
    flush(root)
    wait_for(time.time, lambda now: now - cephfs.rctime(root) > Mount.minimum_age_s)
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


def halves(files: dict[Path, bytes]) -> tuple[dict[Path, bytes], dict[Path, bytes]]:
    """What is cached when something happens, and what is not."""
    items = list(files.items())
    return dict(items[::2]), dict(items[1::2])
