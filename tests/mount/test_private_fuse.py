"""A FUSE filesystem that was mounted without allow_other: only its user may enter it, whatever the modes say."""

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.bindfs import Bindfs
from tests.conftest import Mount, cachefs, raises_errno, settle
from tests.users import as_user

pytestmark = pytest.mark.promise("PE-28")
BOB = 1234
MODES = [("--read-only",), (), ("--read-only", "--no-fastpath")]


def private(tmp_path: Path, at: Path, beneath: ExitStack) -> None:
    """A tree that everyone may read by its modes."""
    root = tmp_path / "root"
    (root / "directory").mkdir(parents=True)
    (root / "directory/file").write_bytes(b"secret")
    (root / "link").symlink_to("secret")
    settle()
    at.mkdir(parents=True)
    beneath.callback(Bindfs(root, at, "rw --no-allow-other").close)


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
    m.umount()
    done = cachefs("mount", m.source, m.path, "--cache-dir", m.cache, *m.given(), *mode)
    assert done.stderr.count("other users may not enter this mount either") == 1


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_it_is_not_shown_beneath_a_mount_for_all_users(
    mount: Callable[..., Mount], tmp_path: Path, beneath: ExitStack, mode: tuple[str, ...]
) -> None:
    """Before: once root had looked at it, everyone could read it."""
    private(tmp_path, tmp_path / "source/beneath", beneath)
    m = mount(tmp_path / "source", *mode)
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
