"""Mounts in user namespaces: `unshare --user`, and rootless containers."""

import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CLI, REPOSITORY, Mount, mounted_on
from tests.users import open_to_all

MakeMount = Callable[..., Mount]

IN_NAMESPACE_OF_USER = """
import ctypes, os, sys
import daemon.cli.main, daemon.session, daemon.cli.display, click, trio, encodings.idna
uid, gid = map(int, sys.argv[1:3])
os.setgroups([]); os.setgid(gid); os.setuid(uid)
libc = ctypes.CDLL(None, use_errno=True)
PR_SET_DUMPABLE, CLONE_NEWNS, CLONE_NEWUSER = 4, 0x20000, 0x10000000
libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
assert libc.unshare(CLONE_NEWNS | CLONE_NEWUSER) == 0
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
daemon.cli.main.main(sys.argv[3:])
"""


def unshared(how: str, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["unshare", *how.split(), "sh", "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )


def command(*arguments: object) -> str:
    return " ".join([*CLI, *map(str, arguments)])


def check_refused(done: subprocess.CompletedProcess[str], place: Path) -> None:
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "this user namespace" in done.stderr and "outside of it" in done.stderr
    assert not mounted_on(place)


@pytest.mark.promise("LC-30")
@pytest.mark.parametrize("how", ["--user --map-root-user", "--user --mount", "--user"])
def test_a_mount_in_a_user_namespace_without_rights_is_refused_in_one_line(
    source: Path, tmp_path: Path, how: str
) -> None:
    place, cache = tmp_path / "mnt", tmp_path / "cache"
    check_refused(unshared(how, command("mount", source, place, "--cache-dir", cache, *Mount.given())), place)


@pytest.mark.promise("LC-30")
def test_a_mount_in_a_user_namespace_of_an_ordinary_user_is_refused_in_one_line(
    source: Path, tmp_path: Path, user: pwd.struct_passwd
) -> None:
    open_to_all(source)
    place = tmp_path / "mnt"
    python_path = os.pathsep.join([str(REPOSITORY), *sys.path])
    ids = [str(user.pw_uid), str(user.pw_gid)]
    done = subprocess.run(
        [sys.executable, "-c", IN_NAMESPACE_OF_USER, *ids, "mount", source, place],
        env={"PATH": os.defpath, "PYTHONPATH": python_path, "HOME": str(tmp_path)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    check_refused(done, place)


@pytest.mark.promise("LC-30")
def test_root_mounts_in_a_user_namespace_with_its_own_mounts(source: Path, tmp_path: Path) -> None:
    place, cache = tmp_path / "mnt", tmp_path / "cache"
    steps = [
        command("mount", source, place, "--cache-dir", cache, *Mount.given()),
        f"cat {place}/d0/f00000 | cmp - {source}/d0/f00000",
        f"echo new > {place}/new",
        command("umount", place),
    ]
    done = unshared("--user --map-root-user --mount", " && ".join(steps))
    assert done.returncode == 0, done.stderr
    assert (source / "new").read_text() == "new\n"


@pytest.mark.promise("LC-30")
def test_processes_in_a_user_namespace_read_a_mount_that_was_made_before(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    done = unshared("--user --map-root-user --mount", f"cmp {m.path}/d0/f00000 {source}/d0/f00000")
    assert done.returncode == 0, done.stderr
