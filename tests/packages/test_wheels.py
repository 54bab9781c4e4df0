"""The wheels of `make dist`, each in an empty virtual environment."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, contents, wait_for

pytestmark = [pytest.mark.packages, pytest.mark.slow, pytest.mark.mount]

MakeMount = Callable[..., Mount]
CLIENT = """
import json, os, sys
from cachefs.client import Client
client = Client(sys.argv[1])
paths = [os.path.join(sys.argv[1], "d0", name) for name in sorted(os.listdir(os.path.join(sys.argv[1], "d0")))]
report = client.warm_up([paths[0]])
print(json.dumps({"announced": client.will_read(paths), "complete": report.is_complete, "pid": client.status()["pid"]}))
"""


def environment(directory: Path, *arguments: object, python: str = sys.executable) -> Path:
    """The programs of a virtual environment in which this has been installed."""
    subprocess.run([python, "-m", "venv", directory], check=True)
    command = [directory / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run([*map(str, command)], check=True, cwd=directory)
    return directory / "bin"


def run(*command: object, cwd: Path) -> str:
    """Outside the repository, whose modules would be found first."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_a_fast_path_that_contains_lmdb(
    wheel: Path, client_wheel: Path, source: Path, tmp_path: Path
) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith((".c", ".h"))] == []
    assert re.search(r"-py3-none-manylinux_2_\d+_\w+\.whl$", wheel.name)
    programs = environment(tmp_path / "venv", wheel, client_wheel)  # of one version: the same files
    (program,) = (tmp_path / "venv").glob("lib/python3*/site-packages/cachefs/fastpath/cachefs-fastpath")
    assert "libc.so" in run("ldd", program, cwd=tmp_path) and "lmdb" not in run("ldd", program, cwd=tmp_path)
    place = tmp_path / "mnt"
    place.mkdir()
    run(programs / "cachefs", "mount", source, place, "--read-only", "--cache-dir", tmp_path / "cache", cwd=tmp_path)
    try:
        assert contents(place) == contents(source)
        status = json.loads(run(programs / "cachefs", "status", place, "--json", cwd=tmp_path))
        assert os.readlink(f"/proc/{status['fastpath']['pid']}/exe") == str(program)
    finally:
        run(programs / "cachefs", "umount", place, cwd=tmp_path)


def test_the_tag_of_the_wheel_is_that_of_its_fast_path(wheel: Path, tmp_path: Path) -> None:
    program = Path(zipfile.ZipFile(wheel).extract("cachefs/fastpath/cachefs-fastpath", tmp_path))
    needed = {int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", run("readelf", "-V", program, cwd=tmp_path))}
    assert f"-manylinux_2_{max(needed)}_" in wheel.name


def test_the_sdist_has_the_sources_of_the_fast_path(sdist: Path) -> None:
    names = [name.partition("/")[2] for name in tarfile.open(sdist).getnames()]
    assert "cachefs/fastpath/c/serve/main.c" in names and "cachefs/fastpath/c/common/lock.h" in names
    assert [name for name in names if name.startswith(("tests", "build", "dist"))] == []


def test_the_client_needs_nothing_else(client_wheel: Path, mount: MakeMount, source: Path, tmp_path: Path) -> None:
    modules = [name for name in zipfile.ZipFile(client_wheel).namelist() if not name.startswith("cachefs_ml_client-")]
    rooms = ("__init__", "client/", "errors", "system/", "py", "loaders/")
    rooms = (*(f"cachefs/{room}" for room in rooms), "policies/__init__", "policies/order/")
    assert all(name.startswith(rooms) for name in modules) and len(modules) < 30
    programs = environment(tmp_path / "venv", "--no-index", client_wheel)
    m = mount(source, "--read-only")
    said = json.loads(run(programs / "python", "-I", "-c", CLIENT, m.path, cwd=tmp_path))
    number = len(os.listdir(source / "d0"))
    assert said == {"announced": number, "complete": True, "pid": m.pid}
    wait_for(m.status, lambda status: status["cached_files"] == number)
    samplers = "from policies.order import WindowShuffle; print(len(list(WindowShuffle([3, 4]))))"
    assert run(programs / "python", "-I", "-c", samplers, cwd=tmp_path) == "7\n"
    # With the torch and pyarrow of these tests, but (-S) without the repository, which is installed beside them.
    (place,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    loader = "import sys; sys.path += sys.argv[1:]; import cachefs.loaders as it; print(it.ParquetDataset, it.__file__)"
    others = sysconfig.get_path("purelib")
    said = run(sys.executable, "-I", "-S", "-c", loader, place, others, cwd=tmp_path)
    assert said.endswith(f" {place}/cachefs/loaders/__init__.py\n")
