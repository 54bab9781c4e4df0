"""Very deep directories: any user can make them."""

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.conftest import Mount

fork = multiprocessing.get_context("fork")
NAME = "d" * 250
LEVELS = 2000


def descend(top: Path, *, make: bool) -> None:
    os.chdir(top)
    for _ in range(LEVELS):
        if make:
            os.mkdir(NAME)
        os.chdir(NAME)
    if make:
        Path("file").write_bytes(b"deep")
    else:
        assert Path("file").read_bytes() == b"deep"


def in_child(top: Path, *, make: bool) -> None:
    child = fork.Process(target=descend, args=(top,), kwargs={"make": make})
    child.start()
    child.join(120)
    assert child.exitcode == 0


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_grows_with_the_depth_of_a_directory_and_not_with_its_square(
    mount: Callable[..., Mount], tmp_path: Path
) -> None:
    """Before: each directory that was known kept its whole path, 1 GB here."""
    source = tmp_path / "source"
    source.mkdir()
    try:
        in_child(source, make=True)
        m = mount(source, "--read-only")
        before = resident_bytes(m.pid)
        in_child(m.path, make=False)
        assert resident_bytes(m.pid) - before < 100 << 20
    finally:
        subprocess.run(["rm", "-rf", source / NAME], check=True)  # too deep for shutil
