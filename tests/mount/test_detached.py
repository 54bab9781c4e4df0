"""Mounts that something holds after an unmount: a copy in another mount namespace, an overlayfs, an open file."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, contents, mounted_on, wait_for
from tests.processes import left_behind, wait_for_end

MakeMount = Callable[..., Mount]
AT_ONCE_S = 5.0
"""cachefs says it after a second; the rest is for a loaded machine."""


@contextmanager
def namespace() -> Iterator[int]:
    """A process in a mount namespace of its own, with a private copy of each mount."""
    script = "echo ready; exec sleep 600"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process.pid
        process.kill()


def rows() -> list[dict[str, object]]:
    return list(json.loads(cachefs("status", "--json").stdout))


def row_of(m: Mount) -> dict[str, object] | None:
    return next((row for row in rows() if row["mountpoint"] == str(m.path)), None)


def one_line_of(command: str, m: Mount) -> str:
    done = cachefs(command, m.path, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.promise("LC-29")
def test_an_unmount_names_the_process_that_has_a_copy_of_the_mount(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    pid = m.pid
    with namespace() as holder:
        began_s = time.monotonic()
        done = cachefs("umount", m.path)
        assert time.monotonic() - began_s < AT_ONCE_S
        m.pid = 0
        assert done.stderr.count("\n") == 1 and f"process {holder} (sleep)" in done.stderr, done.stderr
        assert not mounted_on(m.path)
        found = row_of(m)
        assert found is not None and found["state"] == "detached" and str(holder) in str(found["held_by"])
        assert "detached, still held by process" in " ".join(cachefs("status").stdout.split())
        assert f"process {holder}" in cachefs("status", m.path).stderr
        for command in ("umount", "restart"):
            assert f"process {holder}" in one_line_of(command, m)
        # The copy goes on being served.
        inside = Path(f"/proc/{holder}/root{m.path}/d0/f00000")
        assert inside.read_bytes() == (source / "d0/f00000").read_bytes()
    wait_for_end(pid)
    assert row_of(m) is None and not left_behind(m.path)
    m.start()
    assert contents(m.path) == contents(source)


@pytest.mark.promise("LC-29")
def test_an_unmount_names_the_overlayfs_that_lies_on_the_mount(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    m = mount(source)
    pid = m.pid
    above = tmp_path / "a b"
    for name in ("a b", "upper", "work"):
        (tmp_path / name).mkdir()
    layers = f"lowerdir={m.path},upperdir={tmp_path / 'upper'},workdir={tmp_path / 'work'}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, above], check=True)
    try:
        done = cachefs("umount", m.path)
        m.pid = 0
        assert f"an overlayfs on {above}" in done.stderr and done.stderr.count("\n") == 1, done.stderr
        found = row_of(m)
        assert found is not None and found["held_by"] == f"an overlayfs on {above}"
        assert (above / "d0/f00000").read_bytes() == (source / "d0/f00000").read_bytes()
    finally:
        subprocess.run(["umount", above], check=True)
    wait_for_end(pid)
    assert not left_behind(m.path)


@pytest.mark.promise("LC-29")
def test_a_mount_that_an_open_file_holds_is_listed_until_it_is_closed(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    pid = m.pid
    with open(m.path / "d0/f00000", "rb"):
        cachefs("umount", "--lazy", m.path)
        m.pid = 0
        found = wait_for(lambda: row_of(m), bool)
        # The namespaces that other tests make at this moment have a copy of each mount, too.
        assert found["state"] == "detached" and re.search("open files|mount namespace", found["held_by"])
    wait_for_end(pid)
    wait_for(lambda: row_of(m), lambda found: found is None)


@pytest.mark.promise("LC-29")
def test_a_forced_unmount_ends_a_mount_that_something_holds(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    pid = m.pid
    with namespace() as holder:
        cachefs("umount", m.path)
        m.pid = 0
        cachefs("umount", "--force", m.path)
        wait_for_end(pid)
        assert row_of(m) is None and not left_behind(m.path)
        m.start()
        assert contents(m.path) == contents(source)
        assert Path(f"/proc/{holder}").exists()


@pytest.mark.promise("LC-29")
def test_a_mount_above_a_detached_one_is_another_mount(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    m = mount(source)
    pid = m.pid
    with namespace():
        cachefs("umount", m.path)
        m.cache = tmp_path / "other cache"
        m.start()
        states = sorted(str(row["state"]) for row in rows() if row["mountpoint"] == str(m.path))
        assert states == ["alive", "detached"] and m.pid != pid
        m.umount()
    wait_for_end(pid)
    assert not left_behind(m.path)
