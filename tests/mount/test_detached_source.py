"""A source that was detached, or covered by another mount, while cachefs uses it."""

import json
import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, wait_for

MakeMount = Callable[..., Mount]


@pytest.mark.promise("FA-28")
@pytest.mark.parametrize("how", ["detached", "covered"])
@pytest.mark.parametrize(
    "mode", [[], ["--read-only"], ["--no-fastpath"]], ids=["read-write", "read-only", "no-fastpath"]
)
def test_a_source_that_was_detached_or_covered_is_used_on_and_reported(
    mount: MakeMount, tmp_path: Path, beneath: ExitStack, how: str, mode: list[str]
) -> None:
    place = tmp_path / "place"
    place.mkdir()

    def mount_another(content: bytes) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
        beneath.callback(subprocess.run, ["umount", "-l", place], check=how == "covered")
        for name in ("seen", "unseen"):
            (place / name).write_bytes(content)

    mount_another(b"old")
    m = mount(place, *mode)
    assert (m.path / "seen").read_bytes() == b"old"
    assert m.status()["source_problem"] is None
    if how == "detached":
        subprocess.run(["umount", "-l", place], check=True)
    else:
        mount_another(b"new")

    says = f"{place} was unmounted or covered, and leads to another directory now"
    for _ in range(2):
        assert (m.path / "unseen").read_bytes() == b"old"
        status = m.status()
        assert not status["source_lost"] and says in status["source_problem"]
        assert "source moved" in cachefs("status", m.path).stdout
        told = json.loads(cachefs("doctor", m.path, "--json", check=False).stdout)
        assert [each["advice"] for each in told if each["name"] == "source of the mount"]
        if "--no-fastpath" in mode:
            break
        cachefs("restart", m.path)
        m.pid = int(m.status()["pid"])
        wait_for(m.log, lambda log: says in log)

    if how == "detached":
        mount_another(b"new")
    m.remount(*mode)
    assert m.status()["source_problem"] is None and says not in m.log().rpartition("all data are on disk")[2]
    assert (m.path / "seen").read_bytes() == (m.path / "unseen").read_bytes() == b"new"
    assert os.listdir(m.path) == os.listdir(place)


@pytest.mark.promise("FA-28")
@pytest.mark.parametrize("how", ["parent covered", "bind over bind", "bind ended", "moved over", "another cachefs"])
def test_another_directory_at_the_path_of_the_source_is_reported(
    mount: MakeMount, tmp_path: Path, beneath: ExitStack, how: str
) -> None:
    """Also one of the same filesystem, and whatever the order of the mounts."""
    parent, place, other, aside = (tmp_path / name for name in ("parent", "parent/place", "other", "parent/aside"))

    def mount_on(path: Path, *arguments: str | Path) -> None:
        subprocess.run(["mount", *(arguments or ("-t", "tmpfs", "tmpfs")), path], check=True)
        beneath.callback(subprocess.run, ["umount", "-l", path], stderr=subprocess.DEVNULL)

    parent.mkdir()
    mount_on(parent)
    subprocess.run(["mount", "--make-private", parent], check=True)  # else nothing beneath it can be moved
    for path in (place, other, aside):
        path.mkdir()
    if how == "moved over":
        mount_on(aside)  # before the source: the table keeps this order
    if how != "another cachefs":  # which does not mount over a mount
        mount_on(place, *(("--bind", aside) if how.startswith("bind") else ()))
    (place / "file").write_bytes(b"old")
    m = mount(place)
    assert (m.path / "file").read_bytes() == b"old" and m.status()["source_problem"] is None
    undo: list[str | Path] = ["umount", place]
    if how == "parent covered":
        mount_on(parent)
        place.mkdir()
        undo = ["umount", parent]
    elif how == "bind over bind":
        (parent / "empty").mkdir()
        mount_on(place, "--bind", parent / "empty")
    elif how == "bind ended":
        subprocess.run(["umount", place, "-l"], check=True)
        undo = ["mount", "--bind", aside, place]
    elif how == "moved over":
        subprocess.run(["mount", "--move", aside, place], check=True)
        beneath.callback(subprocess.run, ["umount", "-l", place], stderr=subprocess.DEVNULL)
    else:
        mount(other, name="parent/place")
    assert os.listdir(place) == [] and (m.path / "file").read_bytes() == b"old"
    assert f"{place} was unmounted or covered" in m.status()["source_problem"]
    if how == "parent covered":
        late = mount(place, name="late")
        assert os.listdir(late.path) == [] and late.status()["source_problem"] is None  # of what is there now
        late.umount()
    subprocess.run(undo, check=True)
    assert m.status()["source_problem"] is None
