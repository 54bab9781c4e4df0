"""Files with very many names: any user can create them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, raises_errno, settle, wait_for

MakeMount = Callable[..., Mount]
NAMES = 1500


def make_names(directory: Path, count: int) -> None:
    directory.mkdir(parents=True)
    (directory / "n0000").write_bytes(b"many names")
    for number in range(1, count):
        os.link(directory / "n0000", directory / f"n{number:04}")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def list_and_ask(directory: Path) -> None:
    """As `ls -l` does."""
    for name in os.listdir(directory):
        path = directory / name
        path.lstat()
        raises_errno(61, lambda path=path: os.getxattr(path, "user.none"))  # type: ignore[misc]


@pytest.mark.promise("FA-4")
@pytest.mark.parametrize("mode", [[], ["--mutable", "*.log"], ["--no-fastpath"]], ids=lambda mode: "".join(mode))
def test_as_many_names_of_one_file_cost_what_as_many_files_cost(
    mount: MakeMount, tmp_path: Path, mode: list[str]
) -> None:
    """Regression: quadratic in their number, minutes for a few thousand, in the thread that serves all users."""
    source = tmp_path / "source"
    make_names(source / "names", NAMES)
    (source / "files").mkdir()
    for number in range(NAMES):
        (source / "files" / f"n{number:04}").write_bytes(b"one name")
    settle()
    m = mount(source, *mode)
    taken = []
    for directory in ("files", "names"):
        began = cpu_s(m.pid)
        list_and_ask(m.path / directory)
        taken.append(cpu_s(m.pid) - began)
    assert taken[1] <= 3 * taken[0] + 0.2, taken


@pytest.mark.promise("PI-9")
@pytest.mark.parametrize("mode", ["--read-only", "--attr-timeout=0.2"])
def test_a_name_behind_very_many_that_are_gone_is_found(mount: MakeMount, tmp_path: Path, mode: str) -> None:
    source = tmp_path / "source"
    make_names(source / "names", 200)
    settle()
    m = mount(source, mode)
    for path in sorted((m.path / "names").iterdir()):
        path.stat()
    for number in range(199):
        (source / "names" / f"n{number:04}").unlink()
    last = m.path / "names" / "n0199"
    wait_for(lambda: _read(last), lambda found: found == b"many names")
    assert _read(last) == b"many names"
    raises_errno(61, lambda: os.getxattr(last, "user.none"))


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


@pytest.mark.promise("EX-12")
def test_the_last_of_64_names_counts(mount: MakeMount, tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_names(source / "names", 63)
    os.link(source / "names" / "n0000", source / "names" / "z.log")
    settle()
    m = mount(source, "--mutable", "*.log")
    for path in sorted((m.path / "names").iterdir()):
        path.stat()
    (m.path / "names" / "z.log").read_bytes()
    with open(m.path / "names" / "z.log", "ab") as file:
        file.write(b"more")
    assert (source / "names" / "n0000").read_bytes() == b"many namesmore"
