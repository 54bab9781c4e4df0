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


@pytest.mark.promise("CH-31")
@pytest.mark.parametrize("listed_first", [True, False], ids=["listed first", "listed last"])
@pytest.mark.parametrize("mode", MODES)
def test_another_spelling_of_a_name_leads_to_the_same_object(
    mount: MakeMount, source: Path, faulty: Faulty, mode: str, listed_first: bool
) -> None:
    (faulty[1] / "folds").touch()
    m = mount(faulty[0], *MODES[mode])
    if listed_first:
        assert sorted(os.listdir(m.path / "d1")) == sorted(os.listdir(source / "d1"))
    places = [m.path / directory / name for directory in ("d1", "D1") for name in ("f00001", "F00001")]
    content = (source / "d1/f00001").read_bytes()
    for place in [*reversed(places), *places]:
        assert place.read_bytes() == content
    assert len({place.stat().st_ino for place in places}) == 1
    assert sorted(os.listdir(m.path)) == sorted(os.listdir(source))
    for directory in ("d1", "D1"):
        assert sorted(os.listdir(m.path / directory)) == sorted(os.listdir(source / "d1"))
    m.flush()
    m.drop_caches()
    before = m.ops()
    for place in [*places, *reversed(places)]:
        assert place.read_bytes() == content
    assert sorted(os.listdir(m.path / "D1")) == sorted(os.listdir(source / "d1"))
    if mode.startswith("read-only"):
        assert m.ops() == before or mode == "read-only, mutable"
    if mode != "cache none":
        assert m.ops().get("read") == before.get("read")


@pytest.mark.promise("CH-31")
def test_spellings_are_compared_after_a_remount_and_removed_by_an_invalidation(
    mount: MakeMount, source: Path, faulty: Faulty
) -> None:
    (faulty[1] / "folds").touch()
    (source / "d1/f00001").chmod(0o600)  # CH-28
    settle()
    m = mount(faulty[0], "--read-only")
    names = ["f00001", "F00001"]
    before = [(m.path / "d1" / name).read_bytes() for name in names]
    m.flush()
    m.remount("--read-only")
    assert [(m.path / "d1" / name).read_bytes() for name in names] == before and not m.ops().get("read")
    m.drop_caches()
    asked = m.ops()
    assert [(m.path / "d1" / name).read_bytes() for name in names] == before and m.ops() == asked
    (source / "d1/f00001").rename(source / "d1/gone")
    cachefs("invalidate", m.path / "d1/F00001")
    assert [(m.path / "d1" / name).exists() for name in names] == [False, False]


@pytest.mark.promise("CH-31")
@pytest.mark.parametrize("mode", [["--read-only"], []], ids=["read-only", "read-write"])
def test_a_directory_that_another_node_renamed_has_no_second_spelling(
    mount: MakeMount, source: Path, mode: list[str]
) -> None:
    m = mount(source, *mode)
    content = (m.path / "d1/f00001").read_bytes()
    (source / "d1").rename(source / "D1")
    assert (m.path / "D1/f00001").read_bytes() == content
    m.drop_caches()
    assert not (m.path / "d1").exists() and (m.path / "D1/f00001").read_bytes() == content
