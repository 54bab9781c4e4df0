"""For the maintainer scripts: the mounts whose daemons run from this installation.

    mounts.py restart   let the installed version take them over; those of units cachefs@NAME are restarted by systemd
    mounts.py check     exit 1 if there are any, with one line for each

Mounts of daemons in containers, or from other installations, do not count. A daemon can only be reached by its user, so
the script starts itself again as each user who has a mount (`restart-own`, `check-own`).
"""

import os
import pwd
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from cachefs.client import mount_table
from cachefs.client.client import server

COMMAND = str(Path(sys.executable).with_name("cachefs"))
User = tuple[int, int, str]
"""uid, gid, XDG_RUNTIME_DIR"""


def is_of_this_installation(process: psutil.Process) -> bool:
    program = "".join(process.cmdline()[:1]).split(" ")[0]  # after a restart the command line is one text
    if Path(program).parent != Path(sys.executable).parent:
        return False
    here, there = Path("/proc/self"), Path(f"/proc/{process.pid}")
    same_namespace = os.readlink(there / "ns/mnt") == os.readlink(here / "ns/mnt")
    return same_namespace and os.path.samefile(there / "root", here / "root")


def runtime_directory(process: psutil.Process) -> str:
    """XDG_RUNTIME_DIR of a daemon, from its session index: after a restart its environment cannot be read."""
    for file in process.open_files():
        if match := re.fullmatch(r"(.*)/cachefs/session-[^/]+/.*", file.path):
            return match[1]
    return process.environ().get("XDG_RUNTIME_DIR", "")


def users() -> set[User]:
    found = set()
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and is_of_this_installation(process):
                found.add((process.uids().effective, process.gids().effective, runtime_directory(process)))
        except (psutil.Error, OSError):  # it has ended
            continue
    return found


def run_as(user: User, step: str) -> int:
    uid, gid, directory = user
    try:
        groups = os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:  # a user without a name
        groups = []
    environment = {"PATH": os.environ["PATH"], **({"XDG_RUNTIME_DIR": directory} if directory else {})}
    command = [sys.executable, "-I", __file__, step]
    return subprocess.run(command, user=uid, group=gid, extra_groups=groups, env=environment, check=False).returncode


# --- as the user of the daemons --------------------------------------------------------------------------------------


def own() -> Iterator[tuple[str, psutil.Process]]:
    for place in dict.fromkeys(m.mountpoint for m in mount_table.mounts() if m.fstype == mount_table.FSTYPE):
        pid = server(place)
        try:
            if pid is not None and is_of_this_installation(daemon := psutil.Process(pid)):
                yield place, daemon
        except (psutil.Error, OSError):
            continue


def unit_of(daemon: psutil.Process) -> str:
    """The unit that a process belongs to, such as cachefs@imagenet.service."""
    return Path(f"/proc/{daemon.pid}/cgroup").read_text().strip().rpartition("/")[2]


def restart_own() -> int:
    failed = 0
    for place, daemon in list(own()):
        command = [COMMAND, "restart", place]
        if "NOTIFY_SOCKET" in daemon.environ():
            unit = unit_of(daemon)
            if not unit.startswith("cachefs@"):  # another service manager's, which restarts it when it is told to
                continue
            # systemd ends the old daemon first. If the new version could not take over, the mount would have none.
            if subprocess.run([*command, "--check"], check=False).returncode:
                failed = 1
                continue
            command = ["deb-systemd-invoke", "try-restart", unit]
        failed |= subprocess.run(command, check=False).returncode
    return failed


def check_own() -> int:
    places = [place for place, _ in own()]
    for place in places:
        print(f"cachefs: {place} is mounted: run cachefs umount {place}, or stop its service", file=sys.stderr)
    return 1 if places else 0


def main(step: str) -> int:
    if step == "restart-own":
        return restart_own()
    if step == "check-own":
        return check_own()
    return max((run_as(user, f"{step}-own") for user in sorted(users())), default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
