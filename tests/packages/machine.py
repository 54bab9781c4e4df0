"""A new machine: a tree that debootstrap has made, in namespaces of its own. What runs in it ends with it."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY, wait_for

CODENAME = next(
    line.partition("=")[2].strip() for line in Path("/etc/os-release").read_text().splitlines() if "CODENAME=" in line
)
BASE = REPOSITORY / "build" / f"debootstrap-{CODENAME}"
INIT = """
import os, signal, subprocess, sys
tree, site = sys.argv[1:]
run = lambda *command: subprocess.run(command, check=True)
run("mount", "--make-rprivate", "/")
run("mount", "--bind", tree, tree)
run("mount", "-t", "proc", "proc", f"{tree}/proc")
run("mount", "--rbind", "/sys", f"{tree}/sys")
run("mount", "--bind", "/dev/fuse", f"{tree}/dev/fuse")
run("mount", "--bind", site, f"{tree}/mnt")
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whatever is left to the first process is reaped
open(f"{tree}/run/started", "w").close()
while True:
    signal.pause()
"""
BOOT = """
set -e
mount -t tmpfs tmpfs /run
mkdir /run/lock
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
exec env container=other /lib/systemd/systemd --system --unit=idle.target --log-target=console --show-status=no
"""
TARGETS = ("idle", "sysinit", "basic", "shutdown", "umount", "network-online", "remote-fs", "multi-user")
VARIES = (
    "run/mount",
    "var/lib/dpkg",
    "var/lib/apt",
    "var/lib/systemd",
    "var/log",
    "var/cache/apt",
    "var/cache/ldconfig",
)
"""Written by package managers and mount(8)."""


def make_base() -> Path:
    """The tree of a minimal system; made once, because that takes a minute."""
    if not BASE.exists():
        new = BASE.with_name(f"{BASE.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        subprocess.run(["debootstrap", "--variant=minbase", CODENAME, new], check=True, stdout=subprocess.DEVNULL)
        new.rename(BASE)
    return BASE


class Machine:
    def __init__(self, directory: Path) -> None:
        self.tree = directory / "tree"
        subprocess.run(["cp", "-a", "--reflink=auto", make_base(), self.tree], check=True)
        (self.tree / "dev/fuse").touch()
        (self.tree / "etc/mtab").symlink_to("/proc/self/mounts")  # as installers do
        shutil.copy("/etc/resolv.conf", self.tree / "etc/resolv.conf")
        site = Path(os.__file__).parent / "site-packages" if sys.prefix == sys.base_prefix else None
        packages = site or next(Path(sys.prefix).glob("lib/python3*/site-packages"))
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        self.processes_here = [subprocess.Popen([*unshare, sys.executable, "-c", INIT, self.tree, packages])]
        wait_for((self.tree / "run/started").exists, bool)
        (self.tree / "run/started").unlink()
        self.init = self.pid = child_of(self.processes_here[0].pid)

    def command(self, *command: object) -> list[str]:
        inside = ["nsenter", "--target", self.pid, "--mount", "--pid", "chroot", str(self.tree)]
        return [*inside, "env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND=noninteractive",
                *map(str, command)]  # fmt: skip

    def run(self, *command: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(self.command(*command), capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0 or not check, (command, done.returncode, done.stdout[-3000:], done.stderr[-3000:])
        return done

    def start(self, *command: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def boot(self) -> None:
        """From here on commands run beside a systemd, which has started nothing."""
        for name in TARGETS:
            unit = self.tree / f"etc/systemd/system/{name}.target"
            unit.write_text("[Unit]\nDescription=Nothing\nDefaultDependencies=no\n")
        unshare = [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--cgroup",
            "--ipc",
            "--uts",
        ]
        with open(self.tree / "root/systemd.log", "wb") as log:
            self.processes_here.append(
                subprocess.Popen(self.command(*unshare, "sh", "-c", BOOT), stdout=log, stderr=log)
            )
        self.pid = child_of(child_of(self.processes_here[-1].pid))  # of nsenter, of unshare

        def state() -> str:
            return self.run("systemctl", "is-system-running", check=False).stdout.strip()

        wait_for(state, lambda state: state in ("running", "degraded"))

    def apt(self, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("apt-get", "-qq", "-y", "--no-install-recommends", *arguments, check=check)

    def put(self, file: Path) -> str:
        """The path in the tree of a copy of a package."""
        shutil.copy(file, self.tree / "root" / file.name)
        return f"/root/{file.name}"

    def files(self) -> set[str]:
        """Everything on its disk that does not vary anyway."""
        found: set[str] = set()
        for place, directories, names in os.walk(self.tree):
            inside = os.path.relpath(place, self.tree)
            if inside.startswith(VARIES) or inside in ("proc", "sys", "mnt", "tmp", "root"):
                directories.clear()
                continue
            found.update(os.path.normpath(f"{inside}/{name}") for name in directories + names)
        return found

    def processes(self) -> Iterator[str]:
        """The command lines of all that run on it."""
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if os.path.samefile(command.parent / "root", self.tree):
                    yield command.read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue

    def close(self) -> None:
        os.kill(int(self.init), signal.SIGKILL)  # and everything in it
        for process in self.processes_here:
            process.wait(30)
        subprocess.run(["rm", "-rf", "--one-file-system", self.tree], check=False)


def child_of(pid: str | int) -> str:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    (child,) = wait_for(lambda: children.read_text().split(), bool)
    return child


def repacked(package: Path, version: str, directory: Path) -> Path:
    """The same package with another version."""
    root = directory / "root"
    subprocess.run(["dpkg-deb", "-R", package, root], check=True)
    control = root / "DEBIAN/control"
    before = field(package, "Version")
    control.write_text(control.read_text().replace(f"Version: {before}\n", f"Version: {version}\n"))
    (module,) = root.glob("opt/cachefs/lib/python3*/site-packages/cachefs/__init__.py")
    module.write_text(module.read_text().replace(f'"{before}"', f'"{version}"'))
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "-b", root, directory], check=True, capture_output=True)
    shutil.rmtree(root)
    (made,) = directory.glob("*.deb")
    return made


def field(package: Path, name: str) -> str:
    done = subprocess.run(["dpkg-deb", "-f", package, name], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def given(**environment: Any) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in environment.items())]
