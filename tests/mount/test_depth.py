"""Very deep directories: any user can create them."""

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Mount, settle

pytestmark = pytest.mark.promise("CL-8")

fork = multiprocessing.get_context("fork")
NAME = "d" * 250
LEVELS = 2000


def descend(top: Path, name: str, levels: int, content: bytes, make: bool) -> None:
    os.chdir(top)
    for _ in range(levels):
        if make:
            os.mkdir(name)
        os.chdir(name)
    if make:
        Path("file").write_bytes(content)
    else:
        assert Path("file").read_bytes() == content


def in_child(top: Path, *, make: bool, name: str = NAME, levels: int = LEVELS, content: bytes = b"deep") -> None:
    child = fork.Process(target=descend, args=(top, name, levels, content, make))
    child.start()
    child.join(120)
    assert child.exitcode == 0


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_grows_with_the_depth_of_a_directory_and_not_with_its_square(
    mount: Callable[..., Mount], tmp_path: Path
) -> None:
    """Regression: each known directory kept its whole path, 1 GB here."""
    source = tmp_path / "source"
    source.mkdir()
    try:
        in_child(source, make=True)
        m = mount(source, "--read-only")
        before = resident_bytes(m.pid)
        in_child(m.path, make=False)
        assert resident_bytes(m.pid) - before < 100 << 20
        status = m.flush()
        assert status["cached_files"] + status["skipped_admissions"] == 1  # too deep for the fast path, and counted
    finally:
        subprocess.run(["rm", "-rf", source / NAME], check=True)  # too deep for shutil


@pytest.mark.parametrize("mode", ["--read-only", ""])
@pytest.mark.parametrize("length", [5000, 3 << 20], ids=["small", "large"])
def test_a_file_below_a_path_of_more_than_4096_bytes_is_cached(
    mount: Callable[..., Mount], tmp_path: Path, mode: str, length: int
) -> None:
    """One system call does not accept such a path. Regression: the file was read from the source in every epoch."""
    deep: dict[str, Any] = {"name": "d" * 50, "levels": 100, "content": os.urandom(length)}
    source = tmp_path / "source"
    source.mkdir()
    try:
        in_child(source, make=True, **deep)
        settle()
        m = mount(source, *filter(None, [mode]))
        in_child(m.path, make=False, **deep)
        assert m.flush()["cached_files"] == 1
        m.drop_caches()
        before = m.ops()
        in_child(m.path, make=False, **deep)
        assert m.ops() == before
    finally:
        subprocess.run(["rm", "-rf", source / deep["name"]], check=True)
