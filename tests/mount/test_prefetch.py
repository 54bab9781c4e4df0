"""Prefetching on real mounts: what is prefetched, when it stops, and what it must not do."""

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Mount, cachefs, contents, make_files, raises_errno, settle, wait_for

MakeMount = Callable[..., Mount]
FILES = 3000


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 files in 10 directories, one of 9 MiB, a directory within a directory; no test changes it."""
    root = tmp_path_factory.mktemp("dataset") / "source"
    make_files(root, FILES, (1000, 20_000), 10)
    (root / "d3" / "inner").mkdir()
    (root / "d3" / "inner" / "large").write_bytes(os.urandom(9 << 20))
    settle()
    return root


def all_files(root: Path) -> int:
    return sum(path.is_file() for path in root.rglob("*"))


def fetched(m: Mount, count: int) -> dict[str, int]:
    return wait_for(m.status, lambda s: s["cached_files"] >= count and s["write_behind_bytes"] == 0, 60.0)


@pytest.mark.promise("CL-10")
def test_everything_is_fetched_before_anybody_asks(mount: MakeMount, dataset: Path) -> None:
    m = mount(dataset, "--read-only", "--prefetch", "all")
    status = fetched(m, all_files(dataset))
    assert status["prefetched"] == FILES + 3  # the large file in chunks
    assert (status["hits"], status["misses"]) == (0, 0)
    wait_for(m.status, lambda s: s["prefetch"] == "idle")
    before = m.ops()
    assert before["open"] <= FILES + 3 + 1
    m.drop_caches()
    assert contents(m.path) == contents(dataset)
    assert m.ops() == before
    assert m.status()["misses"] == 0
    m.remount("--read-only", "--prefetch", "all")
    wait_for(m.status, lambda s: s["prefetch"] == "idle")
    assert "open" not in m.ops() and m.status()["prefetched"] == 0


def test_readers_and_prefetching_fetch_nothing_twice(mount: MakeMount, dataset: Path) -> None:
    m = mount(dataset, "--read-only", "--prefetch", "all")
    assert contents(m.path) == contents(dataset)
    status = fetched(m, all_files(dataset))
    assert status["source_ops"]["open"] <= FILES + 3 + 1
    assert status["cached_bytes"] == sum(path.stat().st_size for path in dataset.rglob("*") if path.is_file())


@pytest.mark.promise("CL-11")
def test_it_stops_at_the_size_of_the_cache(mount: MakeMount, dataset: Path) -> None:
    size = 4 << 20
    m = mount(dataset, "--read-only", "--prefetch", "all", "--cache-size", size)
    wait_for(m.status, lambda s: s["prefetch"] == "full")
    status = m.flush()
    assert size * 0.8 < status["blob_bytes"] <= size
    assert status["evictions"] == 0 and status["errors"] == 0
    assert contents(m.path) == contents(dataset)
    assert m.status()["blob_bytes"] <= size


@pytest.mark.promise("CL-10")
def test_the_rest_of_a_directory_follows_its_first_file(mount: MakeMount, dataset: Path) -> None:
    m = mount(dataset, "--read-only", "--prefetch", "directory")
    name = sorted(os.listdir(dataset / "d1"))[17]
    assert (m.path / "d1" / name).read_bytes() == (dataset / "d1" / name).read_bytes()
    expected = len(os.listdir(dataset / "d1"))
    assert fetched(m, expected)["cached_files"] == expected
    before = m.ops()
    assert contents(m.path / "d1") == contents(dataset / "d1")
    assert m.ops() == before


@pytest.mark.promise("CL-10")
def test_a_directory_that_cannot_be_listed_ends_nothing(mount: MakeMount, faulty: tuple[Path, Path]) -> None:
    """Regression: such as lost+found, on the mount of a user. All directories behind it were left out."""
    mountpoint, faults = faulty
    (faults / "fails").write_text("readdir EACCES d0\nreaddir EIO d2\n")
    m = mount(mountpoint, "--read-only", "--prefetch", "all")
    fetched(m, 20)
    wait_for(m.status, lambda s: s["prefetch"] == "idle")


def test_a_file_that_changes_meanwhile_is_nobodys_problem(mount: MakeMount, source: Path) -> None:
    files = sorted(path for path in source.rglob("f*") if path.is_file())
    before = {path: path.read_bytes() for path in files[-5:]}
    m = mount(source, "--read-only", "--prefetch", "all", "--simulate-latency", 100)
    for path in before:
        path.write_bytes(b"another version, of another length")
    wait_for(m.status, lambda s: s["prefetch"] == "idle")
    status = m.flush()
    assert status["errors"] == 0
    for path in files[:-5]:
        assert (m.path / path.relative_to(source)).read_bytes() == path.read_bytes()
    for path, old in before.items():
        try:
            content = (m.path / path.relative_to(source)).read_bytes()
        except OSError as error:
            assert error.errno == errno.ESTALE
        else:
            assert content in (old, path.read_bytes())  # old: the prefetch was quicker


@pytest.mark.fastpath
def test_a_fast_path_that_dies_takes_no_wish_along(mount: MakeMount, dataset: Path) -> None:
    m = mount(dataset, "--read-only", "--prefetch", "all", "--simulate-latency", 5, "--fetch-threads", 8)
    wait_for(m.status, lambda s: s["prefetched"] > 100)
    m.killed_fastpaths += 1
    os.kill(m.status()["fastpath"]["pid"], signal.SIGKILL)
    fetched(m, all_files(dataset))


@pytest.mark.fastpath
def test_a_daemon_that_dies_is_followed_by_one_that_goes_on(mount: MakeMount, dataset: Path) -> None:
    m = mount(dataset, "--read-only", "--prefetch", "all", "--simulate-latency", 5, "--fetch-threads", 8)
    wait_for(m.status, lambda s: s["prefetched"] > 100)
    m.kill()
    m.start()
    fetched(m, all_files(dataset))


def test_without_prefetching_nothing_is_fetched_that_nobody_reads(mount: MakeMount, dataset: Path) -> None:
    m = mount(dataset, "--read-only", "--prefetch", "none")
    with open(m.path / "d3/inner/large", "rb") as file:
        for chunk in range(2):
            os.pread(file.fileno(), 4096, (chunk * 4 + 1) << 20)
    status = m.flush()
    assert status["prefetched"] == 0
    assert status["cached_bytes"] == status["source_bytes"] == status["miss_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefetch", "everything"], "'everything' is not one of 'sequential', 'none', 'directory', 'all'"),
        (["--prefetch", "all"], "--prefetch all needs --read-only"),
        (["--prefetch", "directory", "--read-only", "--cache", "metadata"], "--prefetch directory needs --read-only"),
    ],
)
def test_what_makes_no_sense_is_one_clear_line(
    source: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = cachefs("mount", source, tmp_path / "mnt", *arguments, check=False)
    assert done.returncode == 2 and message in " ".join(done.stderr.split())


def test_prefetching_does_not_follow_symlinks_or_open_other_things(mount: MakeMount, source: Path) -> None:
    os.mkfifo(source / "pipe")
    (source / "outside").symlink_to("/etc/passwd")
    m = mount(source, "--read-only", "--prefetch", "all")
    wait_for(m.status, lambda s: s["prefetch"] == "idle")
    fetched(m, 40)
    assert m.ops()["open"] == 40
    raises_errno(errno.EROFS, lambda: os.open(m.path / "new", os.O_WRONLY | os.O_CREAT))


PARTS = 8


@pytest.fixture(scope="module")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a dataset of 8 partitions of 40 files of 50 KB, its graph: each depends on the one before it)."""
    root = tmp_path_factory.mktemp("partitions")
    for part in range(PARTS):
        (root / "source" / f"p{part}").mkdir(parents=True)
        for number in range(40):
            (root / "source" / f"p{part}" / f"{number:03}").write_bytes(os.urandom(50_000))
    settle()
    lines = [json.dumps({"partition": f"p{n}", "depends": {f"p{n - 1}": 10} if n else {}}) for n in range(PARTS)]
    (root / "graph.jsonl").write_text("\n".join(lines))
    return root / "source", root / "graph.jsonl"


@pytest.mark.promise("CL-10")
def test_what_depends_on_a_partition_is_there_before_it_is_opened(
    mount: MakeMount, partitions: tuple[Path, Path]
) -> None:
    source, graph = partitions
    m = mount(source, "--read-only", "--prefetch-graph", graph)
    for part in range(PARTS):
        before = m.status()["misses"]
        assert contents(m.path / f"p{part}") == contents(source / f"p{part}")
        if part:
            assert m.status()["misses"] == before
        expected = 40 * min(PARTS, part + 2)
        assert fetched(m, expected)["cached_files"] == expected


def cached_by(status: dict[str, Any]) -> int:
    """How many opens at the source led to a cached file: a miss in a full cache does not wait for room."""
    return int(status["source_ops"].get("open", 0) - status["skipped_admissions"])


def test_a_cache_of_half_the_partitions_retires_those_that_are_done(
    mount: MakeMount, partitions: tuple[Path, Path]
) -> None:
    source, graph = partitions
    size = PARTS // 2 * 40 * 52_000
    m = mount(source, "--read-only", "--prefetch-graph", graph, "--cache-size", size, "--simulate-latency", 1)
    files = 0
    for part in [*range(PARTS), *range(PARTS)]:
        before = m.status()
        m.drop_caches()
        assert contents(m.path / f"p{part}") == contents(source / f"p{part}")
        assert part == 0 or m.status()["misses"] == before["misses"]
        # The first one is never prefetched, and none is needed after the last one.
        files += 40 * (part == 0) + 40 * (part + 1 < PARTS)
        # An open is counted at once, a miss that found no room after its reader has the data.
        status = wait_for(m.flush, lambda s, files=files: s["prefetch"] == "idle" and cached_by(s) == files)
        assert part == 0 or status["skipped_admissions"] == before["skipped_admissions"]
        assert status["blob_bytes"] <= size
    assert m.status()["evictions"] > 0 and m.status()["errors"] == 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "the graph has no partitions"),
        ('{"partition": "a", "depends": ["b"]}', "'a' depends on 'b', which is not in the graph"),
        ("nonsense", "line 1: expected"),
    ],
)
def test_a_graph_that_makes_no_sense_is_refused(source: Path, tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "graph").write_text(lines)
    arguments = ["--read-only", "--prefetch-graph", tmp_path / "graph"]
    done = cachefs("mount", source, tmp_path / "mnt", *arguments, check=False)
    assert done.returncode == 2 and f"graph: {message}" in " ".join(done.stderr.split())


def test_a_mount_whose_graph_matches_no_file_says_so(mount: MakeMount, partitions: tuple[Path, Path]) -> None:
    source, graph = partitions
    wrong = graph.with_name("wrong.jsonl")
    extra = ["absent/part-7", "absent/part-8/*.pt"]
    wrong.write_text(graph.read_text() + "".join(f'\n{{"partition": "{name}"}}' for name in extra))
    m = mount(source, "--read-only", "--prefetch-graph", wrong)
    status = wait_for(m.status, lambda status: status["prefetch_problem"] is not None)
    assert status["prefetch_problem"].startswith(
        "2 of 10 partitions of the graph match no file, the first is absent/part"
    )
    assert status["prefetch_problem"] in m.log() and "--suffix" in m.log()
    assert "2 of 10 partitions" in " ".join(cachefs("status", m.path).stdout.split())
    assert "prefetch graph" in cachefs("doctor", m.path, check=False).stdout
