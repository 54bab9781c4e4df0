"""The runtime root is used only where nobody but its user can have put anything there."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.client import locations
from cachefs.errors import CacheFsError
from daemon.kernel import instance
from tests.users import as_user, open_to_all

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
USER = 61_233 + 2 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""One for each process of a run in parallel: the directory in /tmp is named after the user."""
OTHER = USER + 1


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where USER's runtime root would be without XDG_RUNTIME_DIR."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    path = Path(f"/tmp/cachefs-{USER}")
    assert not os.path.lexists(path)
    yield path
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def own(path: Path, uid: int, mode: int = 0o700) -> Path:
    """A directory of that user."""
    path.mkdir()
    path.chmod(mode)
    os.chown(path, uid, uid)
    return path


def found(function: Callable[[], object] = locations.runtime_root) -> object:
    """What USER gets, or how that is refused; an errno where it fails otherwise."""

    def run() -> object:
        try:
            return function()
        except CacheFsError as error:
            return str(error)

    return as_user(USER, USER, [], run)


def refused(reason: str) -> None:
    for function in (locations.runtime_root, locations.make_runtime_root, lambda: locations.mount_directory("/mnt")):
        said = found(function)
        assert isinstance(said, str) and reason in said and "\n" not in said, said
    said = found(lambda: instance.claim_mountpoint("/mnt"))
    assert isinstance(said, str) and reason in said, said


def test_one_that_belongs_to_the_user_is_used(root: Path) -> None:
    assert found(locations.make_runtime_root) == root == found()
    assert root.stat().st_uid == USER and root.stat().st_mode & 0o777 == 0o700
    assert found(locations.make_runtime_root) == root


def test_what_is_missing_is_not_looked_into(root: Path) -> None:
    """Another user could make it at any moment."""
    for function in (locations.runtime_root, lambda: locations.mount_directory("/mnt")):
        assert found(function) == errno.ENOENT
    assert found(lambda: instance.remove_remains("/mnt")) is None
    assert found(lambda: instance.detach_dead("/mnt", instance.MountInstance.is_abandoned)) is False
    assert not root.exists()


@pytest.mark.promise("PE-16")
@pytest.mark.parametrize("mode", [0o700, 0o777], ids=oct)
def test_one_that_another_user_made_is_refused(root: Path, mode: int) -> None:
    own(root, OTHER, mode)
    refused(f"{root} belongs to user {OTHER}")
    assert os.listdir(root) == []


@pytest.mark.promise("PE-16")
@pytest.mark.parametrize("owner", [USER, OTHER], ids=["own", "other"])
def test_a_symlink_is_refused(root: Path, tmp_path: Path, owner: int) -> None:
    target = own(tmp_path / "target", USER)
    open_to_all(target / "x")
    root.symlink_to(target)
    os.lchown(root, owner, owner)
    refused(f"{root} is a symbolic link")
    assert os.listdir(target) == []


@pytest.mark.promise("PE-16")
@pytest.mark.parametrize("mode", [0o701, 0o710, 0o755, 0o777], ids=oct)
def test_one_that_is_open_to_others_is_refused(root: Path, mode: int) -> None:
    own(root, USER, mode)
    refused(f"{root} must be closed to others")
    assert os.listdir(root) == []


def test_one_that_was_open_to_others_before_is_refused_with_what_they_left(root: Path) -> None:
    own(root, USER)
    own(root / "mount-x", OTHER)
    refused(f"{root}/mount-x belongs to user {OTHER}")
    (root / "mount-x").rmdir()
    (root / "mount-x").symlink_to("/tmp")
    refused(f"{root}/mount-x is a symbolic link")


def test_a_file_is_refused(root: Path) -> None:
    root.write_bytes(b"")
    os.chown(root, USER, USER)
    refused(f"{root}")


@pytest.mark.promise("PE-16")
def test_one_in_a_directory_of_another_user_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could put another in its place."""
    theirs = own(tmp_path / "theirs", OTHER, 0o755)
    own(theirs / "cachefs", USER)
    open_to_all(theirs / "x")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(theirs))
    refused(f"{theirs} belongs to user {OTHER}")
    os.chown(theirs, 0, 0)
    theirs.chmod(0o777)
    refused(f"{theirs} may be written to by everybody")
    assert os.listdir(theirs / "cachefs") == []
    theirs.chmod(0o755)
    assert found() == theirs / "cachefs"
