"""The parquet loader on a mount: the example with workers and ranks, and what is announced to the daemon."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from torch.utils.data import DataLoader

from cachefs.client import Client
from cachefs.client.locations import mount_directory
from cachefs.loaders import ParquetDataset
from tests.conftest import REPOSITORY, Mount, free_port, make_files, settle, wait_for

MakeMount = Callable[..., Mount]
SAMPLES, BATCH = 630, 16
EXAMPLES = REPOSITORY / "examples"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    place = tmp_path / "source"
    command = [sys.executable, EXAMPLES / "make_parquet.py", place, "--samples", str(SAMPLES), "--row-group", "50"]
    subprocess.run(command, check=True, timeout=120)
    settle()
    return place


def start(place: Path, *arguments: object, rank: int | None = None, port: int = 0) -> subprocess.Popen[str]:
    """As torchrun starts it, if it has a rank."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "HOME": str(place.parent)}
    if rank is not None:
        environment |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment |= {"GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, EXAMPLES / "train_parquet.py", place, "--batch-size", str(BATCH), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(*jobs: subprocess.Popen[str]) -> list[str]:
    """What they printed, when all have ended."""
    try:
        said = [job.communicate(timeout=200) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0] * len(jobs), said
    return [output for output, _ in said]


def seen(file: Path, ranks: int = 2) -> dict[int, Counter[int]]:
    """The numbers of the samples in each epoch, of all ranks."""
    found: dict[int, Counter[int]] = {}
    for rank in range(ranks):
        for line in Path(f"{file}.{rank}").read_text().splitlines():
            epoch, *numbers = map(int, line.split())
            found.setdefault(epoch, Counter()).update(numbers)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_two_ranks_train_together_and_the_second_epoch_asks_the_source_for_nothing(
    mount: MakeMount, source: Path, tmp_path: Path, method: str
) -> None:
    m = mount(source, "--read-only")
    port = free_port()
    arguments = "--epochs", 1, "--workers", 2, "--start-method", method, "--numbers", tmp_path / "numbers"
    said = end(*(start(m.path, *arguments, rank=rank, port=port) for rank in range(2)))
    for rank in range(2):
        assert f"epoch 1: rank {rank} saw {SAMPLES // 2} samples" in said[rank]
    assert seen(tmp_path / "numbers") == {0: Counter(range(SAMPLES))}
    before = m.flush()
    again = end(start(m.path, "--epochs", 1, "--workers", 0))
    assert f"saw {SAMPLES} samples" in again[0]
    after = m.status()
    assert (after["source_bytes"], after["source_ops"]) == (before["source_bytes"], before["source_ops"])


@pytest.mark.slow
def test_a_job_that_was_stopped_goes_on_within_the_epoch(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    m = mount(source, "--read-only")
    checkpoint, numbers = tmp_path / "last.pt", tmp_path / "numbers"
    arguments = "--epochs", 2, "--workers", 2, "--checkpoint", checkpoint, "--numbers", numbers
    steps = -(-(SAMPLES // 2) // BATCH)
    for stop_after, words in ((7, "stopped in epoch 1 after step 7"), (steps, "continuing in epoch 1 after step 7")):
        port = free_port()
        said = end(*(start(m.path, *arguments, "--stop-after", stop_after, rank=r, port=port) for r in range(2)))
        assert all(words in each for each in said), said
    port = free_port()
    said = end(*(start(m.path, *arguments, rank=rank, port=port) for rank in range(2)))
    assert all("continuing in epoch 2 after step 7" in each for each in said)
    assert seen(numbers) == {epoch: Counter(range(SAMPLES)) for epoch in range(2)}


# --- hints -----------------------------------------------------------------------------------------------------------


def write(place: Path, rows: int, groups: int = 1) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    columns = {"number": pyarrow.array(range(rows)), "text": pyarrow.array([f"{n} {n * n}" * 20 for n in range(rows)])}
    table = pyarrow.table(columns)
    pyarrow.parquet.write_table(table, place, row_group_size=rows // groups, compression="none", use_dictionary=False)


@pytest.mark.parametrize("workers", [0, 2])
def test_files_are_announced_before_they_are_read(mount: MakeMount, tmp_path: Path, workers: int) -> None:
    """The reader holds the first row group and waits; the files of the next ones arrive all the same."""
    source, files = tmp_path / "source", 12
    for file in range(files):
        write(source / f"{file:02}.parquet", 2000)
    (tmp_path / "link").symlink_to(tmp_path / "mnt")
    settle()
    m = mount(source, "--read-only", "--prefetch", "none")
    dataset = ParquetDataset(tmp_path / "link", batch_size=2000, window=1, memory_bytes=1)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=workers)
    drawn = iter(loader)
    next(drawn)

    def cached() -> int:
        return sum(1 for path in m.path.iterdir() if Client(m.path).info(path)["cached_bytes"] == path.stat().st_size)

    wait_for(cached, lambda number: number == files)
    del drawn


def test_files_of_which_little_is_read_are_not_announced(mount: MakeMount, tmp_path: Path) -> None:
    """The mount would fetch them whole."""
    source = tmp_path / "source"
    for file in range(4):
        write(source / f"{file}.parquet", 20_000, groups=4)
    settle()
    m = mount(source, "--read-only", "--prefetch", "none")
    size = sum(path.stat().st_size for path in source.iterdir())
    narrow = ParquetDataset(m.path, batch_size=1000, columns=["number"])
    assert sum(len(batch["number"]) for batch in narrow) == 80_000
    m.flush()
    assert m.status()["prefetched"] == 0 and m.status()["source_bytes"] < size / 2
    eighth = ParquetDataset(m.path, batch_size=1000, rank=0, world_size=8)
    assert sum(len(batch["number"]) for batch in eighth) == 10_000
    m.flush()
    assert m.status()["prefetched"] == 0


def test_hints_of_several_processes_do_not_replace_each_other(mount: MakeMount, tmp_path: Path) -> None:
    paths = make_files(tmp_path / "source", 600)
    settle()
    m = mount(tmp_path / "source", "--read-only", "--prefetch", "none", "--simulate-latency", "1")
    client = Client(m.path)
    client.will_read(m.path / path for path in paths[1:])
    assert client.will_read([m.path / paths[0]], replace=False) == 1
    wait_for(lambda: client.status()["cached_files"], lambda number: number == len(paths))


def test_reading_works_without_a_daemon_that_takes_hints(source: Path, mount: MakeMount) -> None:
    assert sum(len(batch["number"]) for batch in ParquetDataset(source, batch_size=50)) == SAMPLES  # on no mount
    m = mount(source, "--read-only")
    control = mount_directory(str(m.path)) / "control"
    control.rename(control.with_name("elsewhere"))
    try:
        assert sum(len(batch["number"]) for batch in ParquetDataset(m.path, batch_size=50)) == SAMPLES
    finally:
        control.with_name("elsewhere").rename(control)
