"""A source with a directory that is encrypted by fscrypt: its names depend on whether the kernel has the key."""

import errno
import fcntl
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.system.descriptors import closing
from tests.conftest import Mount, settle

_SET_POLICY, _ADD_KEY, _REMOVE_KEY = 0x800C6613, 0xC0506617, 0xC0406618
_BY_IDENTIFIER = 2
_KEY = b"k" * 64


class Encrypted:
    """An ext4 on which `path`/encrypted is encrypted. The key is there at first."""

    def __init__(self, path: Path) -> None:
        self.path, self.directory = path, path / "encrypted"
        self.directory.mkdir()
        self._identifier = self.add_key()
        policy = struct.pack("<5B3x16s", 2, 1, 4, 3, 0, self._identifier)
        with closing(os.open(self.directory, os.O_RDONLY)) as fd:
            fcntl.ioctl(fd, _SET_POLICY, policy)

    def add_key(self) -> bytes:
        """Returns its identifier."""
        key = bytearray(struct.pack("<I4x32sI36x", _BY_IDENTIFIER, b"", len(_KEY)) + _KEY)
        self._ioctl(_ADD_KEY, key)
        return bytes(key[8:24])

    def remove_key(self) -> None:
        os.sync()
        self._ioctl(_REMOVE_KEY, bytearray(struct.pack("<I4x32s24x", _BY_IDENTIFIER, self._identifier)))

    def _ioctl(self, request: int, argument: bytearray) -> None:
        with closing(os.open(self.path, os.O_RDONLY)) as fd:
            fcntl.ioctl(fd, request, argument)


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[Encrypted]:
    image, path = tmp_path / "image", tmp_path / "ext4"
    with open(image, "wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-O", "encrypt", image], check=True, capture_output=True)
    path.mkdir()
    subprocess.run(["mount", "-o", "loop", image, path], check=True)
    try:
        yield Encrypted(path)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        pytest.skip("this kernel has no fscrypt")
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.promise("CH-44")
@pytest.mark.parametrize("mode", [("--read-only",), (), ("--read-only", "--no-fastpath")], ids=" ".join)
def test_a_new_mount_shows_the_names_that_a_key_makes(
    mount: Callable[..., Mount], encrypted: Encrypted, mode: tuple[str, ...]
) -> None:
    """Before: the directory was empty for ever, because its times had not moved."""
    (encrypted.directory / "file").write_bytes(b"content")
    (encrypted.directory / "link").symlink_to("target")
    encrypted.remove_key()
    settle()
    m = mount(encrypted.path, *mode)
    shown = m.path / "encrypted"
    hidden = os.listdir(encrypted.directory)
    assert sorted(os.listdir(shown)) == sorted(hidden) != ["file", "link"]
    for name in hidden:
        os.lstat(shown / name)
    m.flush()
    m.umount()
    encrypted.add_key()
    m.start()
    assert sorted(os.listdir(shown)) == ["file", "link"]
    assert (shown / "file").read_bytes() == b"content"
    assert os.readlink(shown / "link") == "target"
    m.umount()
    encrypted.remove_key()
    m.start()
    assert sorted(os.listdir(shown)) == sorted(os.listdir(encrypted.directory)) == sorted(hidden)
