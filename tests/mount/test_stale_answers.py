"""A source whose attributes and pages the kernel keeps for a while: bindfs, as sshfs and NFS do."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bindfs import Bindfs
from tests.conftest import Mount, settle, wait_for

MIB = 1 << 20
SIZE = 16 * MIB
LONG_AGO = 1577836800


@pytest.fixture(params=["ro", "rw"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bindfs]:
    root = tmp_path / "root"
    root.mkdir()
    (root / "small").write_bytes(b"a" * 100_000)
    (root / "large").write_bytes(b"a" * SIZE)
    for name in ("small", "large"):
        os.utime(root / name, (LONG_AGO, LONG_AGO))
    settle()
    made = Bindfs(root, tmp_path / "source", request.param)
    yield made
    made.close()


def read(path: Path) -> list[bytes]:
    """The first byte of each of its MiB; an error is an empty one."""
    found = []
    with open(path, "rb", buffering=0) as file:
        for offset in range(0, path.stat().st_size, MIB):
            try:
                found.append(os.pread(file.fileno(), 1, offset))
            except OSError:
                found.append(b"")
    return found


@pytest.mark.promise("CH-27")
@pytest.mark.parametrize("more", [(), ("--no-fastpath",)], ids=["", "no-fastpath"])
@pytest.mark.parametrize("mode", [("--read-only",), ()], ids=["read-only", "read-write"])
def test_a_file_that_is_rewritten_while_it_is_read_is_of_one_version(
    mount: Callable[..., Mount], source: Bindfs, mode: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """Before: the comparison after a fetch was answered from the attributes that the kernel kept for a second."""
    m = mount(source.path, *mode, *more)
    path = m.path / "large"
    with open(path, "rb", buffering=0) as opened:
        assert os.pread(opened.fileno(), 1, 0) == b"a"
        (source.root / "large").write_bytes(b"b" * SIZE)
        later = []
        for offset in range(MIB, SIZE, MIB):
            try:
                later.append(os.pread(opened.fileno(), 1, offset))
            except OSError:
                later.append(b"")
    assert b"b" not in later, "an open file is of the version that was opened"
    settle()

    def is_new() -> bool:
        try:
            return set(read(path)) == {b"b"}
        except OSError:  # ESTALE: it is opened again
            return False

    wait_for(is_new, bool)
    m.flush()
    m.remount(*mode, *more)
    assert set(read(path)) == {b"b"}
