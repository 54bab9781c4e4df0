"""Names that contain ESC or a line end, on a real mount: they can neither control a terminal nor forge output (B8)."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, raises_errno, settle

pytestmark = pytest.mark.promise("PE-17")

MakeMount = Callable[..., Mount]

FORGED = "cachefs: all 9 files are cached"
NAMES = (f"a\n{FORGED}", "b\x1b]0;title\x07\x1b[31m", "c[bold]d", "e\u202ef")


@pytest.fixture
def named(tmp_path: Path) -> Iterator[Path]:
    """Files with such names, which become unreadable when the test removes them at the source."""
    root = tmp_path / "named"
    root.mkdir()
    for name in NAMES:
        (root / name).write_bytes(b"content")
    (root / os.fsdecode(b"\xff")).write_bytes(b"content")
    settle()
    yield root


def check(said: str) -> None:
    assert "\x1b" not in said and "\x07" not in said and "\u202e" not in said
    assert FORGED not in said.splitlines()


@pytest.mark.parametrize("arguments", [[], ["--read-only"]], ids=["read-write", "read-only"])
def test_b8_what_is_printed_of_such_names(mount: MakeMount, named: Path, arguments: list[str]) -> None:
    m = mount(named, *arguments)
    for path in m.path.iterdir():
        path.read_bytes()
        said = cachefs("info", path).stdout
        check(said)
        assert "immutable" in said
    assert r"a\x0acachefs" in cachefs("info", m.path / NAMES[0]).stdout
    assert "c[bold]d" in cachefs("info", m.path / NAMES[2]).stdout
    for path in m.path.iterdir():
        for command in ("invalidate", "evict"):
            done = cachefs(command, path, check=False)
            check(done.stdout + done.stderr)
    check(cachefs("invalidate", m.path / NAMES[1]).stdout)
    done = cachefs("info", m.path / f"missing\n{FORGED}", check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    check(done.stderr)


def test_b8_a_warm_up_reports_problems_on_one_line_each(mount: MakeMount, named: Path) -> None:
    m = mount(named, "--read-only")
    os.listdir(m.path)
    for path in m.path.iterdir():
        path.stat()  # pinned
    for name in NAMES:
        (named / name).unlink()
        (named / name).mkdir()  # another object by then
    done = cachefs("warmup", m.path, check=False)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    # Each by its name, unless the replacement was noticed when it was fetched: then there is no file of that name.
    named_lines = sum(r"a\x0acachefs" in line for line in lines)
    assert named_lines + done.stderr.count("removed or replaced while they were fetched") == 1
    assert all(line.startswith("cachefs: ") for line in lines)
    check(done.stderr + done.stdout)
    cachefs("warmup", m.path / NAMES[0], "--background", check=False)
    check(m.log())


@pytest.mark.parametrize("arguments", [[], ["--read-only"]], ids=["read-write", "read-only"])
def test_a_name_that_is_too_long_does_not_exist_and_fills_no_log(
    mount: MakeMount, source: Path, arguments: list[str]
) -> None:
    """Regression: EIO and a traceback for each such name in the root of a read-only mount that was listed."""
    m = mount(source, *arguments)
    for directory in (m.path, m.path / "d0"):
        os.listdir(directory)
        for length in (504, 600, 1024):
            raises_errno(errno.ENAMETOOLONG, (directory / ("a" * length)).stat)
            raises_errno(errno.ENAMETOOLONG, (directory / ("a" * length) / "b").stat)
    for command in ("info", "warmup"):
        done = cachefs(command, m.path / ("a" * 600), check=False)
        assert done.returncode == 1 and "too long" in done.stderr
    assert "bug in" not in m.log()
