"""What the kernel keeps of a CephFS: its pages may be older than the times that it shows (hazard 62)."""

import mmap
import os
import random
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ceph.cluster import CephFs
from tests.ceph.conftest import drop_caches
from tests.conftest import Mount, settle

MakeMount = Callable[..., Mount]
MODES = {"read-only": ["--read-only"], "read-write": [], "Python alone": ["--read-only", "--no-fastpath"]}


def cached_pages(path: Path) -> int:
    command = ["fincore", "--noheadings", "--output", "PAGES", path]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.promise("CH-27")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [20_000, 3 << 20])
def test_a_fetch_bypasses_the_pages_of_the_source(
    cephfs: CephFs, tmp_path: Path, mount: MakeMount, mode: str, size: int
) -> None:
    """Before: old pages with new times were cached, while several processes read a file that another node rewrote."""
    root = cephfs.path / tmp_path.name
    root.mkdir()
    (root / "file").write_bytes(b"content " * (size // 8))
    settle()
    drop_caches()
    m = mount(root, *MODES[mode])
    assert (m.path / "file").read_bytes() == b"content " * (size // 8)
    assert cached_pages(root / "file") == 0
    (root / "file").read_bytes()
    assert cached_pages(root / "file") > 0, "pages cannot be counted here"


@pytest.mark.promise("EX-8")
@pytest.mark.parametrize("arguments", [[], ["--no-fastpath"]], ids=["fastpath", "no-fastpath"])
def test_a_read_of_a_mutable_file_bypasses_the_pages_of_the_source(
    cephfs: CephFs, tmp_path: Path, mount: MakeMount, arguments: list[str]
) -> None:
    """Before: processes that opened it later got old pages, while others read it and another node had rewritten it."""
    root = cephfs.path / tmp_path.name
    root.mkdir()
    (root / "file").write_bytes(b"content " * 2500)
    settle()
    drop_caches()
    m = mount(root, "--profile", "changing", *arguments)
    assert (m.path / "file").read_bytes() == b"content " * 2500
    assert cached_pages(root / "file") == 0
    with open(m.path / "file", "r+b") as file:  # the same descriptor reads and writes
        file.write(b"changed ")
        assert file.read(8) == b"content "
        file.seek(3)
        file.write(b"NGED")
    assert (root / "file").read_bytes() == (m.path / "file").read_bytes() == b"chaNGED " + b"content " * 2499


@pytest.mark.promise("EX-8")
@pytest.mark.parametrize("arguments", [[], ["--no-fastpath"]], ids=["fastpath", "no-fastpath"])
def test_a_log_that_another_node_writes_is_read_as_it_is(
    cephfs: CephFs, tmp_path: Path, mount: MakeMount, arguments: list[str]
) -> None:
    """Before: some blocks began with the bytes of the former end of the log, and some reads ended with the time-out."""
    root = cephfs.path / tmp_path.name
    root.mkdir()
    (root / "log").touch()
    expected = b"".join(struct.pack("<QQ", number, ~number & (1 << 64) - 1) for number in range(1 << 19))
    is_over = threading.Event()
    draw = random.Random(1)

    def write(path: Path) -> None:
        end = 0
        while not is_over.wait(0.06) and end < len(expected) - (1 << 18):
            with open(path, "r+b", buffering=0) as file:
                for _ in range(draw.choice([1, 1, 2, 4])):
                    part = expected[end : end + draw.choice([16, 4000, 70_000, 131_072])]
                    end += os.pwrite(file.fileno(), part, end)

    def mapped(path: Path) -> bytes:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)[:] if size else b""

    m = mount(root, "--mutable", "**", "--source-timeout", "20", *arguments)
    with cephfs.another_client(tmp_path / "node"):
        writer = threading.Thread(target=write, args=(tmp_path / "node" / tmp_path.name / "log",))
        writer.start()
        try:
            started = time.monotonic()
            while time.monotonic() < started + 40:
                before = time.monotonic()
                for data in (mapped(m.path / "log"), (m.path / "log").read_bytes()):
                    assert expected.startswith(data), "other bytes"
                assert time.monotonic() < before + 15, "it waited"
        finally:
            is_over.set()
            writer.join()
