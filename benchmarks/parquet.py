"""The parquet loader against pyarrow's own dataset reader: the same columns and rows of the same mount, as tensors.

    python -m benchmarks.parquet [--rounds N]

pyarrow reads in the order of the files. The loader shuffles, which costs a copy of each row. Both sides begin with
the footers, in as many processes, and each round takes both in alternating order. `short rows` are the worst case: four
numbers, for which drawing a sample takes longer than reading it.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
import numpy
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import torch

from benchmarks.harness import Comparison, drop_caches, mounted, report, timed_readers
from cachefs.loaders import ParquetDataset, to_tensors

FILES, GROUPS, BATCH = 4, 8, 256
KINDS = {"sequences of 512 tokens": (512, 1500), "short rows, 4 numbers": (4, 20_000)}
"""Numbers in a row, rows in a row group."""
BOUNDS = {"sequences of 512 tokens": 0.5, "short rows, 4 numbers": 0.0}

Read = Callable[[Sequence[int]], None]


def make_dataset(place: Path, length: int, rows: int) -> int:
    """Number of rows."""
    place.mkdir(parents=True)
    draw = numpy.random.default_rng(0)
    for file in range(FILES):
        count = rows * GROUPS
        ids = pyarrow.array(draw.integers(50_000, size=count * length, dtype="int32"))
        columns = {
            "ids": pyarrow.FixedSizeListArray.from_arrays(ids, length),
            "label": pyarrow.array(numpy.ones(count, dtype="int64")),
            "text": pyarrow.array([f"{number:>64}" for number in range(count)]),  # not selected
        }
        table = pyarrow.table(columns)
        pyarrow.parquet.write_table(
            table, place / f"{file}.parquet", row_group_size=rows, use_dictionary=False, compression="zstd"
        )
    return FILES * GROUPS * rows


def read_with_loader(place: Path, processes: int, rows: int, ranks: Sequence[int]) -> None:
    torch.set_num_threads(1)
    (rank,) = ranks
    dataset = ParquetDataset(
        place, batch_size=BATCH, columns=["ids", "label"], rank=rank, world_size=processes, drop_last=True
    )
    _check(sum(int(batch["label"].sum()) for batch in dataset), rows // processes)


def read_with_pyarrow(place: Path, processes: int, rows: int, ranks: Sequence[int]) -> None:
    torch.set_num_threads(1)
    (rank,) = ranks
    files = [str(path) for path in sorted(place.iterdir())[rank::processes]]
    found = 0
    for batch in pyarrow.dataset.dataset(files).to_batches(columns=["ids", "label"], batch_size=BATCH):
        found += int(to_tensors(pyarrow.table(batch))["label"].sum())
    _check(found, rows // processes)


def _check(found: int, expected: int) -> None:
    if found != expected:
        raise SystemExit(f"{found} rows, not {expected}")


@click.command()
@click.option("--rounds", default=5, show_default=True)
def main(rounds: int) -> None:
    """Rows per second of both, page cache warm and dropped."""
    holds = True
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as work:
        base = Path(work)
        for name, (length, group) in KINDS.items():
            source = base / f"source{length}"
            rows = make_dataset(source, length, group)
            comparisons = []
            with mounted(source, base / "mnt", base / f"cache{length}", "--read-only"):
                for processes in (1, 2):
                    readers: dict[str, Read] = {
                        "loader": partial(read_with_loader, base / "mnt", processes, rows),
                        "pyarrow": partial(read_with_pyarrow, base / "mnt", processes, rows),
                    }
                    timed_readers(processes, range(processes), readers["pyarrow"])  # all of it is cached
                    for dropped in (False, True):
                        state = "page cache dropped" if dropped else "warm"
                        comparison = Comparison(f"{processes} process{'es' * (processes > 1)}, {state}", BOUNDS[name])
                        for number in range(rounds):
                            rate = {}
                            for side in sorted(readers, reverse=bool(number % 2)):
                                if dropped:
                                    drop_caches()
                                rate[side] = rows / timed_readers(processes, range(processes), readers[side])
                            comparison.add(rate["loader"], rate["pyarrow"])
                        comparisons.append(comparison)
            holds &= report(f"Parquet on a mount, {name}", comparisons, "rows/s", ("loader", "pyarrow"))
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()
