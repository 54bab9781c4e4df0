"""Files with very many names: any user can create them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.source.directories import MAX_KEPT
from tests.bindfs import take_over
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


@pytest.mark.promise("CH-5")
@pytest.mark.parametrize("arguments", [(), ("--no-fastpath",)], ids="".join)
@pytest.mark.parametrize("number", [0, 63, 64, 127, 129])
def test_a_write_goes_where_one_of_very_many_names_leads(
    mount: MakeMount, tmp_path: Path, number: int, arguments: tuple[str, ...]
) -> None:
    """Before: beyond 64 names it went to the file that had had the name."""
    source = tmp_path / "source"
    make_names(source / "names", 130)
    settle()
    m = mount(source, "--attr-timeout", "60", *arguments)
    for path in sorted((m.path / "names").iterdir()):
        path.stat()
    name = f"n{number:04}"
    (source / "names" / name).rename(source / "away")
    (source / "names" / name).write_bytes(b"another file")
    with open(m.path / "names" / name, "r+b") as file:
        file.write(b"written")
    os.truncate(m.path / "names" / name, 9)
    assert (source / "away").read_bytes() == b"many names"
    assert (source / "names" / name).read_bytes() == b"written f"


@pytest.mark.promise("CH-1")
@pytest.mark.parametrize("fastpath", [[], ["--no-fastpath"]], ids=["fastpath", "python"])
@pytest.mark.parametrize("mode", [["--read-only"], ["--read-only", "--cache", "metadata"], ["--cache", "metadata"], []])
def test_a_file_is_read_whichever_directories_of_its_other_names_are_gone(
    mount: MakeMount, tmp_path: Path, mode: list[str], fastpath: list[str]
) -> None:
    """Regression: a read of an open file failed with ESTALE; an open, too, if there were several such directories."""
    source = make_names_in_directories(tmp_path / "source")
    m = mount(source, *mode, *fastpath)
    look_up_all(m.path)
    opened = os.open(m.path / "d3/file", os.O_RDONLY)
    if fastpath:
        for number in range(MAX_KEPT + 1):  # so that the daemon has no descriptors of the directories
            assert not (m.path / f"other/{number}/file").exists()
    else:
        take_over(m, "restart")
    replace_directories(source)
    assert os.read(opened, 100) == b"several names"
    os.close(opened)
    assert (m.path / "d3/file").read_bytes() == b"several names"
    assert os.listxattr(m.path / "d3/file") == []


@pytest.mark.promise("CH-1")
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR], ids=["reader", "writer"])
def test_an_open_mutable_file_is_reopened_whichever_directories_of_its_other_names_are_gone(
    mount: MakeMount, tmp_path: Path, flags: int
) -> None:
    source = make_names_in_directories(tmp_path / "source")
    m = mount(source, "--mutable", "*", "--attr-timeout", "100")
    look_up_all(m.path)
    opened = os.open(m.path / "d3/file", flags)
    m.kill()
    replace_directories(source)
    m.start()  # this daemon opens the file again
    if flags == os.O_RDWR:
        assert os.pwrite(opened, b"Several", 0) == 7
    assert os.pread(opened, 100, 0) == (b"Several names" if flags == os.O_RDWR else b"several names")
    os.close(opened)
    assert (source / "former0/file").read_bytes()[1:] == b"everal names"


def make_names_in_directories(source: Path) -> Path:
    for number in range(8):
        (source / f"d{number}").mkdir(parents=True)
        if number:
            os.link(source / "d0/file", source / f"d{number}/file")
        else:
            (source / "d0/file").write_bytes(b"several names")
    for number in range(MAX_KEPT + 1):
        (source / f"other/{number}").mkdir(parents=True)
    settle()
    return source


def look_up_all(root: Path) -> None:
    for number in (3, *range(8)):
        assert (root / f"d{number}/file").stat().st_nlink == 8


def replace_directories(source: Path) -> None:
    """All but one of those that have a name of the file."""
    for number in set(range(8)) - {3}:
        (source / f"d{number}").rename(source / f"former{number}")
        (source / f"d{number}").mkdir()
        (source / f"d{number}/file").write_bytes(b"another file")
