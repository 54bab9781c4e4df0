"""A FUSE filesystem that was mounted without allow_other: only its user may enter it, whatever the modes say."""

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.bindfs import Bindfs
from tests.conftest import Mount, cachefs, raises_errno, settle, wait_for
from tests.users import as_user, open_to_all

pytestmark = pytest.mark.promise("PE-28")
BOB = 1234
MODES = [("--read-only",), (), ("--read-only", "--no-fastpath")]


def a_tree(tmp_path: Path) -> Path:
    """Everyone may read it by its modes."""
    open_to_all(tmp_path / "root")
    root = tmp_path / "root"
    (root / "directory").mkdir(parents=True)
    (root / "directory/file").write_bytes(b"secret")
    (root / "link").symlink_to("secret")
    settle()
    return root


def private(tmp_path: Path, at: Path, beneath: ExitStack) -> None:
    at.mkdir(parents=True)
    beneath.callback(Bindfs(a_tree(tmp_path), at, "rw --no-allow-other").close)


def bob(function: Callable[[], object]) -> object:
    return as_user(BOB, BOB, [], function)


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_other_users_may_not_enter_a_mount_of_it(
    mount: Callable[..., Mount], tmp_path: Path, beneath: ExitStack, mode: tuple[str, ...]
) -> None:
    """Before: its files were shown to all users."""
    private(tmp_path, tmp_path / "source", beneath)
    m = mount(tmp_path / "source", *mode)
    assert (m.path / "directory/file").read_bytes() == b"secret"
    for question in (lambda: os.listdir(m.path), (m.path / "directory/file").read_bytes, (m.path / "link").readlink):
        assert bob(question) == errno.EACCES
    assert bob(lambda: "mnt" in os.listdir(tmp_path))
    m.umount()
    done = cachefs("mount", m.source, m.path, "--cache-dir", m.cache, *m.given(), *mode)
    assert done.stderr.count("other users may not enter this mount either") == 1


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_it_is_not_shown_beneath_a_mount_for_all_users(
    mount: Callable[..., Mount], tmp_path: Path, beneath: ExitStack, mode: tuple[str, ...]
) -> None:
    """Before: once root had looked at it, everyone could read it."""
    private(tmp_path, tmp_path / "source/beneath", beneath)
    (tmp_path / "source/file").write_bytes(b"for all")
    m = mount(tmp_path / "source", *mode)
    assert bob((m.path / "file").read_bytes) == b"for all"
    raises_errno(errno.EACCES, (m.path / "beneath/directory/file").read_bytes)
    assert bob((m.path / "beneath/directory/file").read_bytes) == errno.EACCES
    assert "beneath" in os.listdir(m.path)
    assert m.log().count("was mounted without allow_other") == 1


def test_it_is_shown_beneath_a_mount_for_one_user(
    mount: Callable[..., Mount], tmp_path: Path, beneath: ExitStack
) -> None:
    private(tmp_path, tmp_path / "source/beneath", beneath)
    m = mount(tmp_path / "source", "--no-allow-other")
    assert (m.path / "beneath/directory/file").read_bytes() == b"secret"


@pytest.mark.promise("FA-10")
@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_a_source_that_is_mounted_again_for_one_user_is_not_shown(
    mount: Callable[..., Mount], tmp_path: Path, beneath: ExitStack, mode: tuple[str, ...]
) -> None:
    """Before: all users of the mount could read it."""
    bindfs = Bindfs(a_tree(tmp_path), tmp_path / "source")
    beneath.callback(bindfs.close)
    m = mount(tmp_path / "source", *mode, "--source-timeout", "2")
    assert bob((m.path / "directory/file").read_bytes) == b"secret"
    bindfs.kill()
    bindfs.options = "rw --no-allow-other"
    bindfs.again()
    (bindfs.root / "directory/new").write_bytes(b"secret")
    assert isinstance(bob((m.path / "directory/new").read_bytes), int)
    wait_for(lambda: str(m.status()["source_problem"]), lambda problem: "without allow_other" in problem)
    bindfs.options = "rw"
    bindfs.again()
    assert bob((m.path / "directory/new").read_bytes) == b"secret"
