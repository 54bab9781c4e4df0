"""Results: a directory in which this mount has overwritten a file is written to by other nodes as well."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, settle, wait_for

MakeMount = Callable[..., Mount]
MODES = pytest.mark.parametrize("mode", [(), ("--no-fastpath",)], ids=["fast path", "python"])


@pytest.fixture
def checkpoints(source: Path) -> Path:
    (source / "ck").mkdir()
    for rank in range(2):
        (source / f"ck/shard{rank}").write_text("version 0")
    settle()
    return source


def replace(path: Path, text: str) -> None:
    path.with_name("new").write_text(text)
    path.with_name("new").rename(path)


def loaded(m: Mount) -> set[str]:
    return {(m.path / f"ck/shard{rank}").read_text() for rank in range(2)}


def is_loaded(m: Mount, version: int) -> None:
    """The records of results are valid for a second."""
    wait_for(lambda: loaded(m), lambda found: found == {f"version {version}"}, timeout_s=10)


@MODES
@pytest.mark.parametrize("write", [Path.write_text, replace], ids=["in place", "replaced"])
@pytest.mark.promise("EX-20", "EX-21")
def test_nodes_that_overwrite_the_shards_of_a_checkpoint_load_one_version(
    mount: MakeMount, source: Path, mode: tuple[str, ...], write: Callable[[Path, str], object]
) -> None:
    (source / "ck").mkdir()
    nodes = [mount(source, *mode, name=f"node{rank}") for rank in range(2)]
    for version in range(1, 4):
        for rank, m in enumerate(nodes):
            write(m.path / f"ck/shard{rank}", f"version {version}")
        settle()
        for m in nodes:
            is_loaded(m, version)
    nodes[0].remount(*mode)
    is_loaded(nodes[0], 3)
    write(nodes[1].path / "ck/shard1", "version 4")
    write(nodes[1].path / "ck/shard0", "version 4")  # as with other ranks on the nodes
    is_loaded(nodes[0], 4)
    is_loaded(nodes[1], 4)
    assert nodes[0].log().count("this mount has overwritten a file here") == 1


@MODES
@pytest.mark.promise("EX-20")
def test_the_files_stay_cached_and_cost_one_comparison(
    mount: MakeMount, checkpoints: Path, mode: tuple[str, ...]
) -> None:
    m = mount(checkpoints, *mode)
    assert loaded(m) == {"version 0"}
    m.flush()
    os.close(os.open(m.path / "d0/f00000", os.O_RDWR))  # another directory
    before = m.ops()
    (m.path / "ck/labels.cache").write_text("made beside the data")
    assert loaded(m) == {"version 0"}
    assert m.ops()["read"] == before["read"]
    (m.path / "ck/labels.cache").write_text("overwritten")
    before = m.ops()
    for _ in range(3):
        assert loaded(m) == {"version 0"}
    after = m.ops()
    assert after["read"] == before["read"] and after["open"] == before["open"]
    assert after["lstat"] > before["lstat"]


@pytest.mark.promise("EX-20")
def test_a_directory_in_which_files_are_only_made_and_removed_holds_no_results(
    mount: MakeMount, checkpoints: Path
) -> None:
    m = mount(checkpoints)
    assert loaded(m) == {"version 0"}
    (m.path / "ck/cache").write_text("made")
    (m.path / "ck/cache").unlink()
    for _ in range(2):
        (m.path / "ck/x.lock").write_text("a default name")
    (checkpoints / "ck/shard1").write_text("version 1")
    assert loaded(m) == {"version 0"}
    assert "overwritten" not in m.log()


@MODES
@pytest.mark.promise("EX-21")
def test_results_that_were_read_can_be_overwritten(mount: MakeMount, checkpoints: Path, mode: tuple[str, ...]) -> None:
    m = mount(checkpoints, *mode)
    (m.path / "ck/log").write_text("made")
    (m.path / "ck/log").write_text("overwritten")
    assert loaded(m) == {"version 0"}
    with open(m.path / "ck/shard0") as opened:
        (m.path / "ck/shard0").write_text("version 1")
        os.truncate(m.path / "ck/shard1", 0)
        assert opened.read() == "version 1"
    assert (checkpoints / "ck/shard0").read_text() == "version 1" and loaded(m) == {"version 1", ""}
    with pytest.raises(PermissionError):
        (m.path / "d0/f00000").read_bytes()
        (m.path / "d0/f00000").write_bytes(b"")


@MODES
@pytest.mark.promise("EX-27", "TE-4")
@pytest.mark.parametrize("is_result", [True, False], ids=["result", "unpinned"])
@pytest.mark.parametrize("flags", [0, os.O_TRUNC], ids=["in place", "truncated"])
def test_open_readers_see_writes_to_a_released_file(
    mount: MakeMount, checkpoints: Path, mode: tuple[str, ...], is_result: bool, flags: int
) -> None:
    """Before, without the fast path: a reader read the old version from the cache, and the writer read its pages."""
    m = mount(checkpoints, *mode)
    path = m.path / "ck/shard0"
    if is_result:
        (m.path / "ck/log").write_text("made")
        (m.path / "ck/log").write_text("overwritten")
    reader = os.open(path, os.O_RDONLY)
    assert os.read(reader, 100) == b"version 0"
    m.flush()
    if not is_result:
        cachefs("unpin", path)
    writer = os.open(path, os.O_RDWR | flags)
    os.pwrite(writer, b"VERSION", 0)
    m.drop_caches()
    for fd in (reader, writer):
        assert os.pread(fd, 7, 0) == b"VERSION"
    os.pwrite(writer, b"appended", 7)
    assert [os.pread(fd, 100, 0) for fd in (reader, writer)] == [b"VERSIONappended"] * 2
    os.truncate(path, 3)
    assert [os.pread(fd, 100, 0) for fd in (reader, writer)] == [b"VER"] * 2
    os.close(reader)
    os.close(writer)


@MODES
@pytest.mark.promise("EX-27", "TE-4")
@pytest.mark.parametrize("how", ["result", "unpinned"])
@pytest.mark.parametrize("loss", ["removed", "replaced"])
def test_open_readers_see_writes_to_a_released_file_that_has_lost_its_name(
    mount: MakeMount, checkpoints: Path, mode: tuple[str, ...], how: str, loss: str
) -> None:
    """Before, with the fast path: `ESTALE` for good, and SIGBUS for a mapping."""
    m = mount(checkpoints, *mode)
    path = m.path / "ck/shard0"
    if how == "result":
        (m.path / "ck/log").write_text("made")
        (m.path / "ck/log").write_text("overwritten")
    content = b"version 1" * 20_000
    with open(path, "rb", buffering=0) as reader:
        assert os.pread(reader.fileno(), 100, 0) == b"version 0"
        if how == "unpinned":
            cachefs("unpin", path)
        path.write_bytes(content)
        if loss == "removed":
            path.unlink()
        else:
            (m.path / "ck/new").write_bytes(b"another file")
            (m.path / "ck/new").rename(path)
        m.drop_caches()
        assert os.pread(reader.fileno(), len(content), 0) == content


@MODES
@pytest.mark.promise("EX-27", "TE-4")
def test_open_readers_see_the_truncation_of_a_result(
    mount: MakeMount, checkpoints: Path, mode: tuple[str, ...]
) -> None:
    m = mount(checkpoints, *mode)
    (m.path / "ck/log").write_text("made")
    (m.path / "ck/log").write_text("overwritten")
    with open(m.path / "ck/shard0", "rb", buffering=0) as reader:
        assert reader.read() == b"version 0"
        m.flush()
        os.truncate(m.path / "ck/shard0", 3)
        os.truncate(m.path / "ck/shard0", 5)
        m.drop_caches()
        assert os.pread(reader.fileno(), 100, 0) == b"ver\0\0"


@pytest.mark.promise("NP-5")
def test_a_node_that_only_reads_keeps_what_it_has_read(mount: MakeMount, checkpoints: Path) -> None:
    m = mount(checkpoints)
    assert loaded(m) == {"version 0"}
    for rank in range(2):
        (checkpoints / f"ck/shard{rank}").write_text("version 1")
    assert loaded(m) == {"version 0"}
    cachefs("invalidate", m.path / "ck")
    assert loaded(m) == {"version 1"}


@pytest.mark.promise("EX-22")
def test_immutable_patterns_exempt_directories(mount: MakeMount, checkpoints: Path) -> None:
    m = mount(checkpoints, "--immutable", "ck/**")
    (m.path / "ck/log").write_text("made")
    (m.path / "ck/log").write_text("overwritten")
    assert loaded(m) == {"version 0"}
    (checkpoints / "ck/shard1").write_text("version 1")
    assert loaded(m) == {"version 0"}
    cachefs("invalidate", m.path / "ck")
    assert loaded(m) == {"version 0", "version 1"}
