"""The five walks of docs/ARCHITECTURE.md: each function that is listed there is entered, in that order."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from cachefs.client import Client
from tests.conftest import REPOSITORY, Mount, settle, unmount_and_wait, wait_for

pytestmark = [pytest.mark.mount, pytest.mark.fastpath]
STEP = re.compile(r"^[0-9]+\. `([\w/.]+)` `([\w.<>]+)`", re.MULTILINE)
FLAGS = ["-std=gnu11", "-O0", "-g", "-no-pie", "-D_GNU_SOURCE", "-pthread", "-finstrument-functions"]
SOURCES = REPOSITORY / "cachefs" / "fastpath"
OWN_SOURCE = Path(__file__).with_name("trace.c")


def walk(title: str) -> list[tuple[str, str]]:
    """The steps of a walk: (file, function)."""
    text = (REPOSITORY / "docs" / "ARCHITECTURE.md").read_text()
    section = text.split(f"\n### {title}\n", 1)[1].split("\n#", 1)[0]
    return STEP.findall(section)


class Traced:
    """A mount by `traced.py`, and what it has entered."""

    def __init__(self, directory: Path, source: Path, program: Path) -> None:
        self.path = directory / "mount"
        self.path.mkdir()
        self._log, self._program = directory / "trace", program
        self.run("mount", source, self.path, "--read-only", "--cache-dir", directory / "cache", *Mount.given())

    def run(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "tests.walks.traced", self._log, self._program, *map(str, arguments)]
        environment = {**os.environ, "FASTPATH_TRACE": str(self._log)}
        subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, timeout=120)

    def begin(self) -> None:
        os.truncate(self._log, 0)

    def entered(self) -> list[tuple[str, str]]:
        """(file, function) of each function, in the order in which they were entered first."""
        lines = list(dict.fromkeys(self._log.read_text().splitlines()))
        addresses = [line[1:] for line in lines if line.startswith("@")]
        named = iter(_functions(self._program, addresses))
        return [next(named) if line.startswith("@") else tuple(line.split(" ", 1)) for line in lines]  # type: ignore[misc]


def _functions(program: Path, addresses: list[str]) -> list[tuple[str, str]]:
    command = ["addr2line", "-f", "-e", str(program)]
    done = subprocess.run(command, input="\n".join(addresses), capture_output=True, text=True, check=True)
    names, places = done.stdout.splitlines()[::2], done.stdout.splitlines()[1::2]
    files = [place.rpartition(":")[0].removeprefix(f"{REPOSITORY}/") for place in places]
    return list(zip(files, names, strict=True))


@cache
def build(directory: Path) -> Path:
    program = directory / "cachefs-fastpath"
    sources = sorted(map(str, SOURCES.rglob("*.c")))
    includes = [f"-I{each}" for each in [SOURCES / "c", *(path for path in SOURCES.rglob("*") if path.is_dir())]]
    command = ["cc", *FLAGS, *includes, *sources, str(OWN_SOURCE), "-o", str(program), "-llmdb"]
    subprocess.run(command, check=True)
    return program


@pytest.fixture
def traced(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    for name in ("a", "b", "c"):
        (source / "d" / name).write_bytes(name.encode() * 5000)
    settle()
    mounted = Traced(tmp_path, source, build(tmp_path_factory.getbasetemp()))
    yield mounted
    unmount_and_wait(str(mounted.path))


def read(path: Path) -> bytes:
    """Without the kernel's page cache."""
    buffer = bytearray(4096)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        return bytes(buffer[: os.preadv(fd, [buffer], 0)])
    finally:
        os.close(fd)


def is_idle(traced: Traced) -> bool:
    status = Client(traced.path).status()
    return status["write_behind_bytes"] == 0 and status["uncommitted"] == 0


def check(traced: Traced, title: str) -> None:
    steps, entered = walk(title), traced.entered()
    missing = [step for step in steps if step not in entered]
    assert steps and not missing, f"not entered: {missing}; entered: {entered}"
    order = [entered.index(step) for step in steps]
    wrong = [after for after, (x, y) in zip(steps[1:], itertools.pairwise(order), strict=False) if x > y]
    assert order == sorted(order), f"entered earlier than the step before: {wrong}"


def test_read_miss(traced: Traced) -> None:
    (traced.path / "d/a").stat()
    wait_for(lambda: is_idle(traced), bool)  # a commit of what was looked up would be traced
    traced.begin()
    assert read(traced.path / "d/a") == b"a" * 4096
    wait_for(lambda: is_idle(traced), bool)
    check(traced, "READ miss")


def test_read_hit(traced: Traced) -> None:
    read(traced.path / "d/a")
    wait_for(lambda: is_idle(traced), bool)
    traced.begin()
    assert read(traced.path / "d/a") == b"a" * 4096
    check(traced, "READ hit")


def test_lookup_miss(traced: Traced) -> None:
    traced.path.stat()
    traced.begin()
    (traced.path / "d").stat()
    check(traced, "LOOKUP miss")


def test_prefetch_request(traced: Traced) -> None:
    (traced.path / "d/b").stat()
    traced.begin()
    Client(traced.path).will_read([traced.path / "d/b"])
    wait_for(lambda: Client(traced.path).status()["cached_bytes"] >= 5000, bool)
    check(traced, "Prefetch request")


def test_restart(traced: Traced) -> None:
    read(traced.path / "d/a")
    traced.begin()
    traced.run("restart", traced.path)
    check(traced, "Restart")
