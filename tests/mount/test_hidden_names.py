"""Names that a directory has and does not list, such as .snap on CephFS: a look-up finds them."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, raises_errno, settle

MakeMount = Callable[..., Mount]
Faulty = tuple[Path, Path]
MODES = {
    "read-only": ["--read-only"],
    "read-only, no-fastpath": ["--read-only", "--no-fastpath"],
    "read-only, mutable": ["--read-only", "--mutable", "*.log"],
    "read-write": [],
    "read-write, no-fastpath": ["--no-fastpath"],
    "cache none": ["--cache", "none"],
}


@pytest.fixture(params=["", "d0"], ids=["root", "directory"])
def place(request: pytest.FixtureRequest, source: Path, faulty: Faulty) -> str:
    """A directory with a name that it does not list."""
    where = str(request.param)
    (source / where / ".snap").mkdir()
    (source / where / ".snap/file").write_bytes(b"snapshot")
    (faulty[1] / "hidden").write_text(".snap")
    settle()
    return where


@pytest.mark.promise("CH-31")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_name_that_is_not_listed_is_found_after_a_listing(
    mount: MakeMount, faulty: Faulty, place: str, mode: list[str]
) -> None:
    m = mount(faulty[0], *mode)
    listed = sorted(os.listdir(m.path / place))
    assert ".snap" not in listed
    assert (m.path / place / ".snap/file").read_bytes() == b"snapshot"
    assert sorted(os.listdir(m.path / place)) == listed
    m.drop_caches()
    assert (m.path / place / ".snap/file").read_bytes() == b"snapshot"
    assert sorted(os.listdir(m.path / place)) == listed
    m.remount(*mode)
    assert sorted(os.listdir(m.path / place)) == listed
    assert (m.path / place / ".snap/file").read_bytes() == b"snapshot"


@pytest.mark.promise("CH-31")
@pytest.mark.parametrize("where", ["", "d0"], ids=["root", "directory"])
@pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
def test_a_listing_proves_no_absence_and_one_look_up_does(
    mount: MakeMount, source: Path, where: str, mode: list[str]
) -> None:
    mode = ["--read-only", "--revalidate", "never", *mode]
    m = mount(source, *mode)
    assert "late" not in os.listdir(m.path / where)
    before = m.ops()["lstat"]
    assert not (m.path / where / "late").exists()
    asked = m.ops()
    assert asked["lstat"] == before + 1
    m.drop_caches()
    assert not (m.path / where / "late").exists()
    assert m.ops() == asked
    m.flush()
    m.remount(*mode)
    mounted = m.ops()
    assert not (m.path / where / "late").exists()
    assert m.ops() == mounted
    (source / where / "late").touch()
    assert not (m.path / where / "late").exists()
    cachefs("invalidate", m.path / where / "late")
    assert (m.path / where / "late").exists() and "late" in os.listdir(m.path / where)


@pytest.mark.promise("CH-31")
def test_hidden_names_are_hidden_on_a_node_that_starts_with_a_snapshot(
    mount: MakeMount, source: Path, faulty: Faulty, place: str, tmp_path: Path
) -> None:
    m = mount(faulty[0], "--read-only", name="first")
    listed = sorted(os.listdir(m.path / place))
    (m.path / place / ".snap/file").stat()
    cachefs("warmup", m.path, "--metadata-only")
    cachefs("snapshot", "export", m.path, tmp_path / "snap")
    shutil.rmtree(source / place / ".snap")
    second = mount(faulty[0], "--read-only", "--metadata-snapshot", tmp_path / "snap", "--revalidate", "never")
    assert sorted(os.listdir(second.path / place)) == listed
    assert (second.path / place / ".snap/file").stat().st_size == len(b"snapshot")
    raises_errno(errno.ENOENT, lambda: (second.path / place / "never").stat())
