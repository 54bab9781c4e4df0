"""Fixtures of several modules."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bindfs import Bindfs
from tests.conftest import Mount
from tests.crowds import Waiting
from tests.processes import connections, device_of


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Waiting]:
    """How many requests of a mount, or of the source beneath it, have no answer yet."""

    def count(m: Mount | Path) -> int:
        device = device_of(m.path if isinstance(m, Mount) else m)
        return int((control / device.partition(":")[2] / "waiting").read_text())

    with connections(tmp_path / "connections") as control:
        yield count


@pytest.fixture
def user() -> Iterator[pwd.struct_passwd]:
    """An unprivileged user, on a machine whose /dev/fuse is open to all users, as in distributions."""
    if shutil.which("fusermount3") is None:
        pytest.fail("fusermount3 is missing: make test installs it")
    device = Path("/dev/fuse")
    before = device.stat().st_mode
    device.chmod(0o666)
    yield pwd.getpwnam("nobody")
    device.chmod(before)


@pytest.fixture(scope="session")
def fusectl() -> None:
    """Mount fusectl, as systemd does on every machine."""
    if not os.path.ismount("/sys/fs/fuse/connections"):  # or another test does so now
        subprocess.run(["mount", "-t", "fusectl", "none", "/sys/fs/fuse/connections"], check=False)
    assert os.path.ismount("/sys/fs/fuse/connections")


@pytest.fixture
def bindfs(source: Path, tmp_path: Path) -> Iterator[Bindfs]:
    made = Bindfs(source, tmp_path / "bindfs")
    yield made
    made.close()
