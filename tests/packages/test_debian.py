"""The Debian package, on a new machine: installed, mounted, upgraded under readers, removed, purged."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, make_files, wait_for
from tests.packages.machine import Machine, field, given, repacked

pytestmark = [pytest.mark.packages, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]

TORCH = {"PYTHONPATH": "/mnt"}
"""Where a machine sees the packages of the Python that runs the tests."""
READ = """
import hashlib, json, os, random, sys
root, stop, sums = sys.argv[1], sys.argv[2], json.load(open(sys.argv[3]))
open(stop + ".started", "w").close()
count = 0
while not os.path.exists(stop):
    name = random.choice(list(sums))
    with open(os.path.join(root, name), "rb") as file:
        assert hashlib.sha256(file.read()).hexdigest() == sums[name], name
    count += 1
print(count)
"""


class Readers:
    """Read random files of a mount, and compare them with what the source has."""

    def __init__(self, machine: Machine, source: str, place: str, number: int, name: str) -> None:
        tree = machine.tree / source.lstrip("/")
        files = [path for path in tree.rglob("*") if path.is_file()]
        sums = {str(path.relative_to(tree)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        (machine.tree / f"root/{name}.json").write_text(json.dumps(sums))
        self.stop = machine.tree / f"root/{name}.stop"
        command = ["python3", "-c", READ, place, f"/root/{name}.stop", f"/root/{name}.json"]
        self.processes = [machine.start(*command) for _ in range(number)]
        wait_for(Path(f"{self.stop}.started").exists, bool)

    def finish(self) -> None:
        """Fails if a reader has failed."""
        self.stop.touch()
        for process in self.processes:
            read, wrong = process.communicate(timeout=60)
            assert process.returncode == 0 and int(read) > 100, wrong


def status(machine: Machine, place: str, user: str = "root") -> dict:
    return json.loads(as_user(machine, user, "cachefs", "status", place, "--json").stdout)


def as_user(machine: Machine, user: str, *command: object) -> subprocess.CompletedProcess[str]:
    login = [] if user == "root" else ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
    home = [] if user == "root" else given(HOME=f"/home/{user}", XDG_RUNTIME_DIR=f"/run/user-{user}")
    return machine.run(*login, *home, *command)


def add_user(machine: Machine, name: str, place: str) -> None:
    machine.run("useradd", "--create-home", name)
    machine.run("chmod", "666", "/dev/fuse")
    machine.run("install", "-d", "-o", name, "-m", "700", place, f"/run/user-{name}", f"/run/user-{name}/cachefs")


def check_installed(machine: Machine) -> None:
    """A new installation: everything is in its place, and nothing runs."""
    assert not any("cachefs" in command for command in machine.processes())
    for name in ("gcc", "cc", "pip", "pip3"):
        assert not (machine.tree / "usr/bin" / name).exists()
    assert machine.run("cachefs", "--version").stdout.startswith("cachefs, version ")
    for helper in ("/sbin/mount.cachefs", "/sbin/mount.fuse.cachefs"):
        assert "usage: " in machine.run(helper, check=False).stderr
    for path in ("usr/share/man/man1/cachefs-mount.1.gz", "usr/share/bash-completion/completions/cachefs",
                 "usr/share/zsh/vendor-completions/_cachefs", "usr/share/fish/vendor_completions.d/cachefs.fish",
                 "lib/systemd/system/cachefs@.service", "etc/cachefs/example.toml"):  # fmt: skip
        assert (machine.tree / path).exists(), path
    words = given(COMP_WORDS="cachefs warm", COMP_CWORD="1", _CACHEFS_COMPLETE="bash_complete")
    assert "warmup" in machine.run(*words, "cachefs").stdout


def train(machine: Machine, data: str) -> None:
    """examples/train.py, whose torch is the one of the Python that runs the tests, if that can use it."""
    shutil.copy(REPOSITORY / "examples/train.py", machine.tree / "root/train.py")
    command = ["python3", "-B", "/root/train.py", data, "--epochs", "2", "--workers", "2"]
    done = machine.run(*given(**TORCH), *command, "--checkpoint", "/root/last.pt")
    assert "epoch 1" in done.stdout, done


def test_install_mount_train_upgrade_remove_purge(machine: Machine, package: Path, tmp_path: Path) -> None:
    images = [sys.executable, REPOSITORY / "examples/make_images.py", machine.tree / "srv/images", "--images", "200"]
    subprocess.run([*map(str, images)], check=True, capture_output=True)
    make_files(machine.tree / "srv/files", 200, (1, 60_000), directories=4)
    machine.apt("update")
    machine.apt("satisfy", field(package, "Depends"))
    machine.run("mkdir", "/data", "/data/images", "/data/files")
    add_user(machine, "alice", "/home/alice/files")
    before = machine.files()

    machine.apt("install", machine.put(package))
    check_installed(machine)
    machine.run("mount", "-t", "cachefs", "-o", "ro,cache-size=100M,_netdev", "/srv/images", "/data/images")
    machine.run("cachefs", "mount", "/srv/files", "/data/files", "--cache-size", "100M")
    as_user(machine, "alice", "cachefs", "mount", "/srv/files", "/home/alice/files", "--cache-size", "100M")
    train(machine, "/data/images")

    mounts = {"/data/images": "root", "/data/files": "root", "/home/alice/files": "alice"}
    readers = [Readers(machine, "/srv/images", "/data/images", 2, "images"),
               Readers(machine, "/srv/files", "/data/files", 2, "files")]  # fmt: skip
    old = {place: status(machine, place, user) for place, user in mounts.items()}
    devices = {place: machine.run("mountpoint", "-d", place).stdout for place in list(mounts)[:2]}
    done = machine.apt("install", machine.put(repacked(package, "9.0", tmp_path)))
    assert "cachefs: " not in done.stdout + done.stderr
    assert "9.0" in machine.run("cachefs", "--version").stdout
    for place, user in mounts.items():
        new = status(machine, place, user)
        assert new["pid"] != old[place]["pid"] and new["fastpath"]["pid"] != old[place]["fastpath"]["pid"]
        program = Path(f"/proc/{new['fastpath']['pid']}/exe")
        assert "(deleted)" not in machine.run("readlink", program).stdout
    assert devices == {place: machine.run("mountpoint", "-d", place).stdout for place in devices}

    refused = machine.run("dpkg", "--remove", "cachefs", check=False)
    lines = [line for line in refused.stderr.splitlines() if line.startswith("cachefs: ")]
    assert refused.returncode != 0 and sorted(line.split()[1] for line in lines) == sorted(mounts)
    assert machine.run("dpkg-query", "-W", "-f", "${db:Status-Status}", "cachefs").stdout == "installed"
    for each in readers:
        each.finish()
    for place, user in mounts.items():
        as_user(machine, user, "cachefs", "umount", place)
    machine.apt("remove", "cachefs")
    assert not any("cachefs" in command for command in machine.processes())
    assert (machine.tree / "etc/cachefs/example.toml").exists()
    (machine.tree / "etc/cachefs/mine.toml").touch()
    assert "/var/cache/cachefs stays" in machine.apt("purge", "cachefs").stdout
    remaining = machine.files() - before
    caches = ("var/cache/cachefs", "home/alice/.cache")
    assert {path for path in remaining if not path.startswith(caches)} == set()
    assert len(os.listdir(machine.tree / "var/cache/cachefs")) == 2


def test_an_upgrade_under_systemd(machine: Machine, package: Path, tmp_path: Path) -> None:
    make_files(machine.tree / "srv/files", 200, (1, 60_000), directories=4)
    machine.apt("update")
    machine.apt("install", "systemd", machine.put(package))
    (machine.tree / "data").mkdir()
    (machine.tree / "etc/cachefs/set.toml").write_text(
        'source = "/srv/files"\nmountpoint = "/data"\nread-only = true\ncache-size = "100M"\n'
    )
    machine.boot()
    machine.run("systemctl", "enable", "--now", "cachefs@set")
    readers = Readers(machine, "/srv/files", "/data", 2, "files")

    def seen() -> tuple[str, ...]:
        main = machine.run("systemctl", "show", "--property=MainPID,ActiveState", "cachefs@set").stdout
        return main, status(machine, "/data")["pid"], machine.run("mountpoint", "-d", "/data").stdout

    before = seen()
    machine.apt("install", machine.put(repacked(package, "9.0", tmp_path)))
    after = seen()
    assert before[0] != after[0] and before[1] != after[1] and before[2] == after[2]
    assert f"MainPID={after[1]}\n" in after[0] and "ActiveState=active" in after[0]
    readers.finish()
    machine.run("systemctl", "stop", "cachefs@set")
    machine.apt("purge", "cachefs")
    assert list((machine.tree / "etc/systemd/system/multi-user.target.wants").glob("cachefs*")) == []
    assert not any("cachefs" in command for command in machine.processes())


def test_a_virtual_environment_of_an_administrator_is_kept(machine: Machine, package: Path) -> None:
    place = machine.tree / "opt/cachefs"
    (place / "bin").mkdir(parents=True)
    (place / "bin/activate").touch()
    machine.apt("update")
    machine.apt("satisfy", field(package, "Depends"))
    done = machine.run("dpkg", "-i", machine.put(package), check=False)
    assert done.returncode != 0 and "mv /opt/cachefs /opt/cachefs.old" in done.stderr
    assert os.listdir(place) == ["bin"]
    assert os.listdir(place / "bin") == ["activate"]
