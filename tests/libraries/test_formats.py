"""Other libraries read the same through a mount as from the source, and a second epoch asks the source for nothing."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Mount, settle
from tests.libraries.epochs import check_two_epochs
from tests.libraries.formats import FORMATS

MakeMount = Callable[..., Mount]
READ_WRITE = "pyarrow", "webdataset", "h5py", "lmdb", "sqlite"
"""Formats that are read on a read-write mount as well: a stream, random access, small reads, mappings, locks."""
CASES = [pytest.param(["--read-only"], name, id=name) for name in FORMATS] + [
    pytest.param([], name, id=f"{name}, read-write") for name in READ_WRITE
]


def run(action: str, name: str, root: Path) -> str:
    """In a process of its own, which has no page, no descriptor and no state of an earlier one."""
    environment = {**os.environ, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": f"{root.parent}/home"}
    command = [sys.executable, "-m", "tests.libraries.formats", action, name, str(root)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.promise("TE-3")
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "name"), CASES)
def test_the_same_bytes_and_a_second_epoch_without_the_source(
    mount: MakeMount, tmp_path: Path, mode: list[str], name: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    run("make", name, source)
    expected = run("read", name, source)
    assert int(expected.split()[0]) > 0
    settle()
    m = mount(source, *mode)
    check_two_epochs(m, lambda root: run("read", name, root), expected, read_only=bool(mode))
