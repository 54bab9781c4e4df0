"""A CephFS of one node on the loopback interface: a monitor, an OSD in memory, an MDS and a ceph-fuse.

    python -m tests.ceph.cluster COMMAND…

starts one, runs the command with its mountpoint in the environment variable CEPHFS, and ends it. Needs root, /dev/fuse
and Debian's packages of Ceph: `scripts/system-packages --ceph`. No authentication, no replicas, no mgr: for tests only.

The MDS lets a client have few capabilities, so that it recalls them all the time. All processes are children of this
one, and die with it.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.conftest import free_port, mounted_on

FEW_CAPS = 20
"""So many a client may have: of 40 files it must give back half, all the time."""
_STARTS_WITHIN_S = 60.0
_ENDS_WITHIN_S = 10.0
_CONFIGURATION = """
[global]
fsid = {fsid}
mon_host = v2:127.0.0.1:{port}
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_msgr1 = false
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
auth_allow_insecure_global_id_reclaim = false
keyring = /dev/null
run_dir = {place}
crash_dir = {place}
admin_socket = {place}/$name.asok
log_file = {place}/$name.log
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
[mon]
mon_data = {place}/mon
mon_cluster_log_file = {place}/cluster.log
mon_allow_pool_size_one = true
mon_data_avail_crit = 1
mgr_initial_modules =
paxos_propose_interval = 0.05
paxos_min_wait = 0.02
[osd]
osd_data = {place}/osd
osd_objectstore = memstore
osd_op_queue = wpq
memstore_device_bytes = 8589934592
[mds]
mds_data = {place}/mds
mds_reconnect_timeout = 10
mds_max_caps_per_client = {caps}
mds_min_caps_per_client = 10
mds_tick_interval = 1
mds_beacon_grace = 6
"""


class CephFs:
    """Runs from the moment it is made until `close`. `path` is where its ceph-fuse is mounted."""

    def __init__(self, base: Path, few_caps: int = FEW_CAPS) -> None:
        self._place, self.path = base / "cluster", base / "cephfs"
        self._configuration = self._place / "ceph.conf"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for directory in (self.path, *(self._place / name for name in ("mon", "osd", "mds"))):
            directory.mkdir(parents=True)
        self._monitor, fsid = f"v2:127.0.0.1:{free_port()}", str(uuid.uuid4())
        self._configuration.write_text(
            _CONFIGURATION.format(fsid=fsid, port=self._monitor.rpartition(":")[2], place=self._place, caps=few_caps)
        )
        try:
            self._make(fsid)
        except BaseException:
            self.close()
            raise

    def _make(self, fsid: str) -> None:
        osd, map_of_monitors = str(uuid.uuid4()), self._place / "monmap"
        addresses = ["--addv", "a", f"[{self._monitor}]"]
        self._run("monmaptool", "--create", "--fsid", fsid, *addresses, "--enable-all-features", map_of_monitors)
        self._run("ceph-mon", "-i", "a", "--mkfs", "--monmap", map_of_monitors, "-c", self._configuration)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd, "--no-mon-config", "-c", self._configuration)
        self._start("mon", "ceph-mon", "-f", "-i", "a")
        self._ceph("osd", "new", osd)
        self._start("osd", "ceph-osd", "-f", "-i", "0")
        self.start_mds(wait=False)
        for pool in ("metadata", "data"):
            self._ceph("osd", "pool", "create", pool)
        self._ceph("fs", "new", "cephfs", "metadata", "data")
        self._ceph("fs", "set", "cephfs", "session_autoclose", "30")
        self._until(self._active_mds, bool, "the MDS is not active")
        self._mount()

    def _run(self, *command: str | Path) -> None:
        with (self._place / "log").open("ab") as log:
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True, timeout=60)

    def _start(self, name: str, *command: str | Path) -> None:
        with (self._place / "log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command, "-c", self._configuration],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _until(self, probe: Callable[[], Any], accept: Callable[[Any], bool], otherwise: str) -> None:
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while not accept(answer := probe()):
            ended = [name for name, process in self._processes.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"{otherwise}: {answer!r}; ended: {ended}; see {self._place}")
            time.sleep(0.05)

    def _ceph(self, *arguments: str) -> Any:
        command = ["ceph", "-c", self._configuration, "--connect-timeout", "20", "-f", "json", *arguments]
        said = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
        return json.loads(said) if said.strip() else None

    def _end(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Kills what does not end: the MDS of Ceph 16 often hangs when it is told to, as may a child of faketime."""
        if (process := self._processes.pop(name, None)) is None:
            return
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ENDS_WITHIN_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_ENDS_WITHIN_S)

    # the client

    def _mount(self) -> None:
        self._start("client", "ceph-fuse", "-f", "--name", "client.admin", self.path)
        self._until(self._is_mounted, bool, "ceph-fuse has not mounted")

    @contextmanager
    def another_client(self, path: Path, clock_s: int = 0) -> Iterator[None]:
        """Mounted at `path`, on a node whose clock is ahead by `clock_s` seconds."""
        path.mkdir()
        self._start("another", "faketime", "-f", f"{clock_s:+}s", "ceph-fuse", "-f", "--name", "client.admin", path)
        try:
            self._until(lambda: mounted_on(path), bool, "another ceph-fuse has not mounted")
            yield
        finally:
            subprocess.run(["umount", path], check=True)
            self._end("another")

    def _is_mounted(self) -> bool:
        """Not os.path.ismount(): that would wait for the cluster."""
        return bool(mounted_on(self.path))

    def client_pid(self) -> int:
        return self._processes["client"].pid

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
        self._end("client", signal.SIGKILL)
        self.evict()

    def again(self) -> None:
        """The client, mounted anew."""
        subprocess.run(["umount", "-l", self.path], check=True)
        self._end("client")
        self._mount()

    # the servers

    def _active_mds(self) -> set[int]:
        """Its number: each process has another one."""
        filesystems = self._ceph("mds", "stat")["fsmap"]["filesystems"]
        known = [each for one in filesystems for each in one["mdsmap"]["info"].values()]
        return {each["gid"] for each in known if each["state"] == "up:active"}

    def kill_mds(self) -> None:
        self._end("mds", signal.SIGKILL)

    def start_mds(self, *, wait: bool = True) -> None:
        """Returns when it serves."""
        before = self._active_mds() if wait else set()
        self._start("mds", "ceph-mds", "-f", "-i", "a")
        if wait:
            self._until(self._active_mds, lambda now: bool(now - before), "the MDS is not active again")

    def stop_osd(self) -> None:
        self._processes["osd"].send_signal(signal.SIGSTOP)

    def continue_osd(self) -> None:
        """Other OSDs would have said long ago that it is down. Here nobody does, and its placement groups, whose read
        leases have run out (after 16 s), stay laggy until it peers anew."""
        self._ceph("osd", "down", "0")
        self._processes["osd"].send_signal(signal.SIGCONT)

    def rctime(self, path: Path) -> float:
        return float(os.getxattr(path, "ceph.dir.rctime"))

    def close(self) -> None:
        if self._is_mounted():
            subprocess.run(["umount", "-l", self.path], check=False)
        for name in ("client", "mds", "osd", "mon"):
            with suppress(subprocess.TimeoutExpired):
                self._end(name, signal.SIGKILL if name == "mds" else signal.SIGTERM)


def main(command: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="cachefs-ceph-") as base:
        Path(base).chmod(0o755)
        cephfs = CephFs(Path(base))
        try:
            return subprocess.run(command, env={**os.environ, "CEPHFS": str(cephfs.path)}, check=False).returncode
        finally:
            cephfs.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
