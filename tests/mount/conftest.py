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
from tests.sources.images import make_image, mount_image


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


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of its own."""
    image, place, empty = tmp_path / "image", tmp_path / "disk", tmp_path / "empty"
    place.mkdir()
    empty.mkdir()
    make_image("ext4", empty, image)
    mount_image("ext4", image, place)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def old_ext4(tmp_path: Path) -> Iterator[Path]:
    """An ext4 without birth times, with times in whole seconds."""
    image, path = tmp_path / "image", tmp_path / "old-ext4"
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-I", "128", image], check=True, capture_output=True)
    path.mkdir()
    subprocess.run(["mount", "-o", "loop", image, path], check=True)
    yield path
    subprocess.run(["umount", "-l", path], check=True)
