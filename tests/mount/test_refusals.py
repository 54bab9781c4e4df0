"""A refused request explains itself: counted, and logged once for each path, with the reason and the remedy."""

import errno
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, raises_errno, settle

MakeMount = Callable[..., Mount]
CHANGES = {
    "open": lambda path: os.open(path, os.O_WRONLY),
    "open and truncate": lambda path: os.open(path, os.O_WRONLY | os.O_TRUNC),
    "truncate": lambda path: os.truncate(path, 0),
    "chmod": lambda path: os.chmod(path, 0o600),
    "chown": lambda path: os.chown(path, 1, 1),
    "utime": lambda path: os.utime(path, (1, 1)),
    "setxattr": lambda path: os.setxattr(path, "user.a", b"b"),
}


@pytest.mark.promise("IM-6")
@pytest.mark.parametrize("name", CHANGES)
def test_a_refused_change_is_counted_and_logged_once_for_each_path(mount: MakeMount, source: Path, name: str) -> None:
    m = mount(source)
    paths = [m.path / "d0/f00000", m.path / "d1/f00001"]
    for path in paths * 3:
        path.read_bytes()
        raises_errno(errno.EPERM, lambda path=path: CHANGES[name](path))
    assert m.status()["refused_changes"] == 6
    assert "6 changes of immutable files" in cachefs("status", m.path).stdout
    lines = [line for line in m.log().splitlines() if "EPERM" in line]
    assert len(lines) == 2, lines
    for line, path in zip(lines, paths, strict=True):
        assert f"{path.relative_to(m.path)}: a change was refused" in line
        assert "--mutable" in line and "cachefs unpin" in line


@pytest.mark.promise("IM-6")
def test_what_the_log_advises_works(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    path = m.path / "d0/f00000"
    path.read_bytes()
    raises_errno(errno.EPERM, lambda: path.write_bytes(b"new"))
    cachefs("unpin", path)
    path.write_bytes(b"new")
    assert (source / "d0/f00000").read_bytes() == b"new"
    m.remount("--mutable", "d1/**")
    other = m.path / "d1/f00001"
    other.read_bytes()
    other.write_bytes(b"new")
    assert m.status()["refused_changes"] == 0


def test_doctor_names_refused_changes(mount: MakeMount, source: Path) -> None:
    m = mount(source)
    (m.path / "d0/f00000").read_bytes()
    raises_errno(errno.EPERM, lambda: (m.path / "d0/f00000").write_bytes(b"new"))
    done = cachefs("doctor", m.path, check=False)
    assert "! refused changes: 1" in done.stdout and "--mutable" in done.stdout


@pytest.mark.promise("CH-10")
@pytest.mark.parametrize("mode", [["--read-only"], []], ids=["read-only", "read-write"])
def test_a_stale_read_is_logged_once_for_each_path(mount: MakeMount, source: Path, mode: list[str]) -> None:
    (source / "big").write_bytes(b"a" * (9 << 20))
    settle()
    m = mount(source, *mode, "--prefetch", "none")
    with open(m.path / "big", "rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert os.pread(opened.fileno(), 10, 0) == b"a" * 10
        (source / "big").write_bytes(b"b" * (9 << 20))
        for offset in (8 << 20, 6 << 20):
            raises_errno(errno.ESTALE, lambda offset=offset: os.pread(opened.fileno(), 10, offset))
    (line,) = [line for line in m.log().splitlines() if "ESTALE" in line]
    assert "big: a read failed with ESTALE" in line and "has changed at the source" in line


MODES = pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["fast path", "python"])


def refuse_writing(path: Path, how: str = "open") -> None:
    path.read_bytes()
    raises_errno(errno.EPERM, lambda: CHANGES[how](path))


@MODES
@pytest.mark.parametrize("how", ["open", "open and truncate", "truncate"])
@pytest.mark.promise("IM-7")
def test_a_process_that_was_refused_to_write_to_a_file_cannot_unlink_it(
    mount: MakeMount, source: Path, mode: list[str], how: str
) -> None:
    m = mount(source, *mode)
    path, linked = m.path / "d0/f00000", m.path / "linked"
    before = path.read_bytes()
    os.link(path, linked)
    refuse_writing(path, how)
    for name in (path, linked, path):
        raises_errno(errno.EPERM, name.unlink)
        assert name.read_bytes() == before
    raised: list[OSError] = []

    def unlink() -> None:
        try:
            path.unlink()
        except OSError as error:
            raised.append(error)

    thread = threading.Thread(target=unlink)
    thread.start()
    thread.join()
    assert [error.errno for error in raised] == [errno.EPERM]
    assert (source / "d0/f00000").read_bytes() == before
    (line,) = [line for line in m.log().splitlines() if "an unlink was refused" in line]
    assert "d0/f00000: " in line or "linked: " in line
    assert "--mutable GLOB" in line and "another process" in line
    assert m.status()["refused_changes"] == 5


@MODES
@pytest.mark.promise("IM-8")
def test_a_refused_write_prevents_nothing_but_its_own_unlink(mount: MakeMount, source: Path, mode: list[str]) -> None:
    m = mount(source, *mode)
    replaced, moved, removed, unpinned, other, gone = (m.path / f"d{n % 4}/f{n:05}" for n in range(6))
    for path in (replaced, moved, removed, unpinned):
        refuse_writing(path)
    other.read_bytes()
    other.unlink()
    assert not (source / other.relative_to(m.path)).exists()
    new = m.path / "new"
    new.write_bytes(b"new")
    new.rename(replaced)  # as atomic writers do
    assert replaced.read_bytes() == b"new"
    moved.rename(m.path / "moved")
    subprocess.run(["rm", removed], check=True)
    assert not (source / removed.relative_to(m.path)).exists()
    cachefs("unpin", unpinned)
    unpinned.unlink()
    gone.read_bytes()
    raises_errno(errno.EPERM, lambda: gone.chmod(0o600))
    gone.unlink()  # chmod is no attempt to write


@MODES
@pytest.mark.promise("IM-9")
def test_cp_f_fails_and_programs_that_unlink_first_replace(mount: MakeMount, source: Path, mode: list[str]) -> None:
    m = mount(source, *mode)
    path = m.path / "d0/f00000"
    before = path.read_bytes()
    new = m.path.parent / "new"
    new.write_bytes(b"new")
    done = subprocess.run(["cp", "-f", new, path], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Operation not permitted" in done.stderr
    assert (source / "d0/f00000").read_bytes() == before
    for command in (["cp", "--remove-destination"], ["install"]):
        path.read_bytes()
        subprocess.run([*command, new, path], check=True)
        assert (source / "d0/f00000").read_bytes() == b"new"


@MODES
@pytest.mark.promise("IM-7")
def test_a_writer_of_parquet_files_leaves_the_shard_that_it_may_not_overwrite(
    mount: MakeMount, source: Path, mode: list[str]
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    feather = pytest.importorskip("pyarrow.feather")
    table = pytest.importorskip("pyarrow").table({"x": [1]})
    m = mount(source, *mode)
    for number, write in enumerate([parquet.write_table, feather.write_feather]):
        path = m.path / f"d{number}/f{number:05}"
        before = path.read_bytes()
        with pytest.raises(PermissionError):
            write(table, str(path))
        assert (source / path.relative_to(m.path)).read_bytes() == before
