"""A machine that only systemd runs on, in namespaces of its own. It shares this machine's files, /tmp among them.

With `separate`, what it changes in the named directories stays in the machine: packages can be installed in it.

It must not see a unit of this machine: systemd-tmpfiles-setup.service, for one, would empty the shared /tmp. So the
directories of units are empty in it.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests.conftest import mount_lines, wait_for

INIT = """
set -e
units=$1; shift
mount --make-rprivate /
umount --all --lazy --types fuse.cachefs # copies of mounts of other tests: their daemons would not end before this
mount -t tmpfs tmpfs /run
mkdir /run/lock
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
for place; do
    upper=/run/changes$place
    mkdir -p "$upper/new" "$upper/work"
    mount -t overlay overlay -o "lowerdir=$place,upperdir=$upper/new,workdir=$upper/work" "$place"
done
for place in /etc/systemd/system /lib/systemd/system /usr/lib/tmpfiles.d /usr/lib/sysctl.d; do
    mount -t tmpfs tmpfs "$place"
done
mount --make-rshared / # as systemd has it on a node
exec env -i container=other PATH="$PATH" \\
    SYSTEMD_UNIT_PATH="$units:/etc/systemd/system:/run/systemd/system:/lib/systemd/system" \\
    /lib/systemd/systemd --system --unit=idle.target --log-target=console --show-status=no
"""
IDLE = "[Unit]\nDescription=Nothing\nDefaultDependencies=no\n"
NUMBERS = count()
TARGETS = ("idle", "sysinit", "basic", "shutdown", "umount", "network-online", "remote-fs", "multi-user")


class Machine:
    def __init__(self, directory: Path, separate: Sequence[str]) -> None:
        self.units = directory / "units"
        self.units.mkdir()
        for name in TARGETS:
            (self.units / f"{name}.target").write_text(IDLE)
        self.log = directory / "systemd.log"
        # A cgroup of its own: systemd leaves filters of network addresses on its cgroups when it is killed.
        cgroups = next(Path(line.split()[4]) for line in mount_lines() if " - cgroup2 " in line)
        self.cgroup = cgroups / f"cachefs-test-{os.getpid()}-{next(NUMBERS)}"
        self.cgroup.mkdir()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--cgroup", "--ipc", "--uts",
                 "bash", "-c", INIT, "init", self.units, *separate],
                stdout=log, stderr=log, preexec_fn=lambda: (self.cgroup / "cgroup.procs").write_text("0"),
            )  # fmt: skip
        self.pid = 0
        """Of its systemd."""

    def start(self) -> bool:
        """False where it cannot be had."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        try:
            self.pid = int(wait_for(lambda: self.process.poll() is not None or children.read_text().split(), bool)[0])
            wait_for(
                lambda: self.systemctl("is-system-running"), lambda state: state.strip() in ("running", "degraded")
            )
        except (AssertionError, TypeError, OSError):
            return False
        return True

    def enter(self, *command: object) -> list[str]:
        """A command line that runs a command on the machine."""
        return ["nsenter", "-t", str(self.pid), "-m", "-p", "-C", "-i", "-u", *map(str, command)]

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.enter(*command), capture_output=True, text=True, timeout=90, check=False)

    def systemctl(self, *arguments: str) -> str:
        done = self.run("systemctl", *arguments)
        return done.stdout or done.stderr

    def show(self, name: str, unit: str = "cachefs@set") -> str:
        return self.systemctl("show", "--property", name, "--value", unit).strip()

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)  # and everything in it
        self.process.kill()
        self.process.wait(20)
        for path, _, _ in os.walk(self.cgroup, topdown=False):
            wait_for(lambda path=path: removed(Path(path)), bool)  # type: ignore[misc]


def removed(cgroup: Path) -> bool:
    """Remove a cgroup. False: a process in it has not ended yet."""
    try:
        cgroup.rmdir()
    except OSError:
        return False
    return True


@contextmanager
def machine(directory: Path, separate: Sequence[str] = ()) -> Iterator[Machine]:
    if not os.path.exists("/lib/systemd/systemd") or not any(" - cgroup2 " in line for line in mount_lines()):
        pytest.skip("no systemd, or no cgroup2")
    made = Machine(directory, separate)
    try:
        if not made.start():
            pytest.skip(f"no systemd can be run here: {made.log.read_text()[-300:]}")
        yield made
    finally:
        made.close()
