"""The calls of df, stat -f, find, cp -a, rsync -a, tar and git have the same results on a mount and on its source."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, contents, settle, small_disk
from tests.same_calls import changes, differences, make_tree, programs, reads

MakeMount = Callable[..., Mount]
MODES = pytest.mark.parametrize(
    "mode",
    [["--read-only"], [], ["--no-fastpath"], ["--mutable", "**"]],
    ids=["read-only", "read-write", "no-fastpath", "mutable"],
)
NOT_KNOWN = (1 << 64) - 1


@pytest.mark.promise("FA-38")
@MODES
def test_calls_have_the_same_results_as_on_the_source(mount: MakeMount, tmp_path: Path, mode: list[str]) -> None:
    with small_disk(tmp_path / "disk", "64M") as disk:
        source = disk / "source"
        source.mkdir()
        make_tree(source)
        settle()
        m = mount(source, *mode)
        for _ in range(2):  # the second time from the cache
            assert differences(reads(m.path), reads(source)) == {}
        assert differences(programs(m.path, tmp_path / "mounted"), programs(source, tmp_path / "source")) == {}
        if mode != ["--read-only"]:
            (source / "beside").mkdir()
            assert differences(changes(m.path), changes(source / "beside")) == {}
        m.umount()


@pytest.mark.promise("FA-38")
@pytest.mark.parametrize(
    "mode", [["--read-only"], [], ["--no-fastpath"]], ids=["read-only", "read-write", "no-fastpath"]
)
def test_every_value_of_statfs_is_passed_on(mount: MakeMount, faulty: tuple[Path, Path], mode: list[str]) -> None:
    """The highest number is how CephFS says that it does not know how many inodes are free."""
    source, faults = faulty
    given = {"f_blocks": NOT_KNOWN, "f_bfree": 1 << 63, "f_bavail": 0, "f_files": (1 << 63) - 1, "f_ffree": NOT_KNOWN}
    (faults / "statfs").write_text("".join(f"{name} {value}\n" for name, value in given.items()))
    m = mount(source, *mode)
    assert {name: getattr(os.statvfs(m.path), name) & NOT_KNOWN for name in given} == given


@pytest.mark.promise("FA-39")
@pytest.mark.parametrize(
    "mode", [["--read-only"], [], ["--no-fastpath"]], ids=["read-only", "read-write", "no-fastpath"]
)
def test_a_file_with_data_has_blocks(
    mount: MakeMount, faulty: tuple[Path, Path], tmp_path: Path, mode: list[str]
) -> None:
    """This source reports 0 blocks for each file, as ZFS and Lustre do until they have allocated them."""
    source, _ = faulty
    files = {path: data for path, data in contents(source).items() if data}
    assert {(source / path).stat().st_blocks for path in files} == {0}
    m = mount(source, *mode)
    for _ in range(2):  # at first by a look-up, then by a listing, or from the cache
        assert all((m.path / path).stat().st_blocks > 0 for path in files)
        assert (m.path / "empty").stat().st_blocks == 0
        assert contents(m.path)
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-S", "-C", m.path, "-cf", tmp_path / "a.tar", "."], check=True)
    subprocess.run(["tar", "-C", tmp_path / "out", "-xf", tmp_path / "a.tar"], check=True)
    assert contents(tmp_path / "out") == contents(m.path) == contents(source)
