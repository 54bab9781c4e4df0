"""From epoch 2 on the source gets no requests."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.fs.listing_comparison import PARALLEL_BATCHES
from tests.conftest import Mount, make_files, settle

MakeMount = Callable[..., Mount]
FILES = 8_000
DIRECTORIES = 50


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """8,000 files in 50 directories; no test changes it."""
    root = tmp_path_factory.mktemp("dataset") / "source"
    paths = make_files(root, FILES, (500, 4000), DIRECTORIES)
    settle()
    return root, paths


def epoch(root: Path, paths: list[Path], seed: int) -> None:
    """Open, fstat, read, close every file once, in a random order."""
    order = list(paths)
    random.Random(seed).shuffle(order)
    for path in order:
        fd = os.open(root / path, os.O_RDONLY)
        size = os.fstat(fd).st_size
        assert len(os.read(fd, size + 1)) == size
        os.close(fd)


def walk_and_stat(root: Path) -> int:
    count = 0
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            os.lstat(os.path.join(directory, name))
            count += 1
    return count


def check_epochs(m: Mount, paths: list[Path], *, walk: bool) -> None:
    """Epochs 2 and 3, with kernel caches dropped before each, send the source no request."""
    before = m.flush()["source_ops"]
    for seed in (2, 3):
        m.drop_caches()
        if walk:
            assert walk_and_stat(m.path) == FILES + DIRECTORIES
        epoch(m.path, paths, seed)
        assert m.ops() == before
    status = m.status()
    assert (status["errors"], status["cached_files"]) == (0, FILES)


@pytest.mark.promise("TE-3", "CH-17", "CL-1")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["read-write", "read-only"])
def test_epochs_and_restarts(mount: MakeMount, dataset: tuple[Path, list[Path]], mode: str) -> None:
    source, paths = dataset
    arguments = ["--read-only"] if mode == "read-only" else []
    walk = mode == "read-only"
    m = mount(source, *arguments)
    if walk:
        walk_and_stat(m.path)
    epoch(m.path, paths, 1)
    check_epochs(m, paths, walk=walk)

    m.remount(*arguments, "--revalidate", "never")
    at_start = m.ops()
    assert sum(at_start.values()) == 0
    check_epochs(m, paths, walk=walk)
    assert m.ops() == at_start

    m.remount(*arguments, "--revalidate", "lazy")
    if walk:
        walk_and_stat(m.path)
    epoch(m.path, paths, 4)
    objects = FILES + DIRECTORIES + 1
    asked = m.ops()
    # Each directory is compared when it is opened, by the threads that list it at the same time.
    assert DIRECTORIES <= asked["fstat"] <= PARALLEL_BATCHES * DIRECTORIES
    assert asked == {"lstat": objects, "fstat": asked["fstat"]}
    check_epochs(m, paths, walk=walk)
    assert m.ops() == asked


@pytest.mark.promise("FA-1")
def test_everything_cached_is_served_when_the_source_has_gone(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    m = mount(source, "--read-only")
    content = {p.relative_to(m.path): p.read_bytes() for p in sorted(m.path.rglob("*")) if p.is_file()}
    attributes = {p.relative_to(m.path): os.lstat(p) for p in sorted(m.path.rglob("*"))}
    os.readlink(m.path / "link")
    m.flush()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for entry in list(source.iterdir()):
        for inner in list(entry.iterdir()) if entry.is_dir() and not entry.is_symlink() else ():
            inner.rename(elsewhere / f"{entry.name}-{inner.name}")
        entry.rename(elsewhere / entry.name)
    assert not list(source.iterdir())
    before = m.ops()
    m.drop_caches()
    for path, expected in attributes.items():
        found = os.lstat(m.path / path)
        assert (found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns) == (
            expected.st_ino,
            expected.st_mode,
            expected.st_size,
            expected.st_mtime_ns,
        )
    assert {p.relative_to(m.path) for p in m.path.rglob("*")} == set(attributes)
    assert {path: (m.path / path).read_bytes() for path in content} == content
    assert os.readlink(m.path / "link") == "d0/f00000"
    assert m.ops() == before


@pytest.mark.promise("CL-4")
@pytest.mark.slow
@pytest.mark.parametrize("mode", [["--read-only"], []], ids=["read-only", "read-write"])
def test_a_cache_of_half_the_dataset_hits_half(mount: MakeMount, tmp_path: Path, mode: list[str]) -> None:
    source = tmp_path / "half"
    paths = make_files(source, 2000, (20_000, 60_000), 10)
    total = sum((source / p).stat().st_size for p in paths)
    settle()
    m = mount(source, *mode, "--cache-size", str(total // 2))
    epoch(m.path, paths, 1)
    first = m.flush()
    for seed in (2, 3):
        before = m.status()
        m.drop_caches()
        epoch(m.path, paths, seed)
        after = m.status()
        hits, misses = (after[k] - before[k] for k in ("hit_bytes", "miss_bytes"))
        assert hits + misses == total
        assert 0.48 <= hits / total <= 0.52
    last = m.flush()
    assert last["blob_bytes"] <= total // 2
    assert last["cached_bytes"] >= first["cached_bytes"]  # nothing is evicted
    assert last["errors"] == 0 and last["skipped_admissions"] > 0
