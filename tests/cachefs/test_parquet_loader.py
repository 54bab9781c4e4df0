"""The parquet loader on real files: each sample once, in any division, from any point; equal ranks; bounded memory."""

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from cachefs.loaders import ParquetDataset
from cachefs.loaders.reading import BackgroundReader
from cachefs.loaders.row_groups import find_row_groups
from tests.conftest import REPOSITORY, wait_for

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create . worker processes")  # on two cores
FILES, ROWS, IN_GROUP = 3, 41, 7
SIZE = FILES * ROWS


def write(place: Path, numbers: range | numpy.ndarray[Any, Any], in_group: int = IN_GROUP, **columns: Any) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"number": pyarrow.array(numbers, pyarrow.int64()), **columns})
    pyarrow.parquet.write_table(table, place, row_group_size=in_group, use_dictionary=False)
    return place


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files with groups of 7, the last one of each smaller; in a directory of its own, and hidden ones."""
    place = tmp_path_factory.mktemp("parquet")
    for file in range(FILES):
        numbers = range(file * ROWS, (file + 1) * ROWS)
        words = [f"word {number}" for number in numbers]
        ids = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array([n for n in numbers for _ in range(3)]), 3)
        lists = pyarrow.array([[number] * (number % 4) for number in numbers], pyarrow.list_(pyarrow.int32()))
        write(place / f"part={file}" / "a.parquet", numbers, word=words, ids=ids, lists=lists)
    write(place / "_temporary" / "a.parquet", range(1000, 1010))
    write(place / ".hidden.parquet", range(1000, 1010))
    return place


def make(data: Path, **arguments: Any) -> ParquetDataset:
    return ParquetDataset(data, **{"batch_size": 5, "columns": ["number"], "window": 2, **arguments})


def numbers(batch: Any) -> list[int]:
    found = batch["number"] if isinstance(batch, dict) else batch.column("number")
    return [int(number) for number in (found.tolist() if isinstance(found, torch.Tensor) else found.to_pylist())]


def batches(batch_iterator: Iterator[Any] | DataLoader[Any] | ParquetDataset) -> list[list[int]]:
    return [numbers(batch) for batch in batch_iterator]


def joined(lists: list[list[int]]) -> list[int]:
    return [number for each in lists for number in each]


# --- exactly once ----------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    world=st.integers(1, 5),
    workers=st.integers(1, 4),
    batch_size=st.integers(1, 12),
    window=st.integers(1, 5),
    seed=st.integers(0, 100),
    epoch=st.integers(0, 2),
    stop=st.floats(0, 1),
    remainder=st.sampled_from(["pad", "drop", "exact"]),
)
def test_each_sample_once_over_ranks_workers_and_resume_points(
    data: Path,
    world: int,
    workers: int,
    batch_size: int,
    window: int,
    seed: int,
    epoch: int,
    stop: float,
    remainder: str,
) -> None:
    """The batches of a DataLoader that takes one from each worker in turn, interrupted once."""
    shares = []
    for rank in range(world):

        def dataset(rank: int = rank) -> ParquetDataset:
            made = make(
                data,
                batch_size=batch_size,
                window=window,
                seed=seed,
                rank=rank,
                world_size=world,
                drop_last=remainder == "drop",
                pad=remainder == "pad",
            )
            made.set_epoch(epoch)
            return made

        first, second = dataset(), dataset()
        point = int(len(first) * stop)
        whole = [
            batch for turn in zip_longest(*(batches(first.read(w, workers)) for w in range(workers))) for batch in turn
        ]
        assert None not in whole[: len(first)] and len(first) == sum(batch is not None for batch in whole)
        skipped = [len(range(worker, point, workers)) for worker in range(workers)]
        later = [batches(second.read(worker, workers, skipped[worker])) for worker in range(workers)]
        assert (
            whole[:point]
            + [
                later[number % workers][number // workers - skipped[number % workers]]
                for number in range(point, len(first))
            ]
            == whole[: len(first)]
        )
        shares.append(joined(whole[: len(first)]))
    counted = Counter(joined(shares))
    if remainder == "drop":
        assert {len(share) for share in shares} == {SIZE // world} and set(counted.values()) == {1}
    else:
        assert set(counted) == set(range(SIZE))
        assert counted.total() == (-(-SIZE // world) * world if remainder == "pad" else SIZE)
        assert remainder == "exact" or len({len(share) for share in shares}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("method", "persistent"), [("fork", False), ("fork", True), ("spawn", True)])
def test_real_workers_give_each_sample_once_in_each_epoch(data: Path, method: str, persistent: bool) -> None:
    seen = []
    for rank in range(2):
        dataset = make(data, rank=rank, world_size=2)
        loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=None, num_workers=2, multiprocessing_context=method, persistent_workers=persistent
        )
        for epoch in range(2):
            dataset.set_epoch(epoch)
            seen.append(batches(loader))
            assert len(seen[-1]) == len(loader) == len(dataset)
    (first, second), (others, others_second) = seen[:2], seen[2:]
    for epoch in ((first, others), (second, others_second)):
        assert set(joined(epoch[0]) + joined(epoch[1])) == set(range(SIZE))
        assert len(joined(epoch[0])) == len(joined(epoch[1])) == -(-SIZE // 2)
    assert first != second


def test_samples_mix_across_groups_and_epochs_differ(data: Path) -> None:
    dataset = make(data, window=3, batch_size=SIZE)
    (first,) = batches(dataset)
    assert len({number // IN_GROUP for number in first[:10]}) >= 2
    dataset.set_epoch(1)
    assert batches(dataset) != [first] and sorted(joined(batches(dataset))) == list(range(SIZE))
    assert batches(make(data, window=3, batch_size=SIZE)) == [first]
    assert batches(make(data, window=3, batch_size=SIZE, seed=1)) != [first]


# --- resuming --------------------------------------------------------------------------------------------------------


def test_without_workers_the_state_is_exact(data: Path) -> None:
    dataset, other = make(data), make(data)
    dataset.set_epoch(1)
    whole = batches(dataset)
    before = batches(islice(iter(dataset), 4))
    other.load_state_dict(dataset.state_dict())
    assert other.epoch == 1 and other.state_dict()["drawn"] == 4
    other.set_epoch(1)  # as a training loop does before each epoch, this one included
    assert before + batches(other) == whole
    assert batches(other) == whole  # an epoch that is iterated again begins at its beginning
    other.load_state_dict(dataset.state_dict())
    other.set_epoch(2)
    assert len(batches(other)) == len(whole)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_with_workers_the_number_of_batches_is_the_state(data: Path, persistent: bool) -> None:
    def loader_of(dataset: ParquetDataset, workers: int = 3) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=persistent)

    dataset = make(data, rank=1, world_size=2)
    whole = batches(loader_of(dataset))
    with pytest.raises(ValueError, match=r"give state_dict\(drawn=N\) the number of batches"):
        dataset.state_dict()
    for point in (0, 4, len(whole)):
        other = make(data, rank=1, world_size=2)
        other.load_state_dict(dataset.state_dict(drawn=point))
        again = loader_of(other)
        assert whole[:point] + batches(again) == whole
        assert batches(again) == whole  # the same epoch again begins at its beginning, also in workers
    with pytest.raises(ValueError, match=f"drawn={len(whole) + 1} is not between 0 and {len(whole)}"):
        dataset.state_dict(drawn=len(whole) + 1)
    other.load_state_dict(dataset.state_dict(drawn=4))
    assert other.state_dict(drawn=4)["workers"] == 3
    with pytest.raises(ValueError, match="saved with 3 workers, and the DataLoader has 2"):
        batches(loader_of(other, workers=2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_a_stateful_data_loader_resumes_by_itself(data: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    for workers in (0, 2):
        whole = batches(stateful(make(data), batch_size=None, num_workers=workers))
        assert sorted(joined(whole)) == list(range(SIZE))
        loader = stateful(make(data), batch_size=None, num_workers=workers)
        drawn = iter(loader)
        before = [numbers(next(drawn)) for _ in range(7)]
        state = loader.state_dict()
        other = stateful(make(data), batch_size=None, num_workers=workers)
        other.load_state_dict(state)
        assert before + batches(other) == whole


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"world_size": 2}, "world_size is 1 there and 2 here"),
        ({"batch_size": 6}, "batch_size is 5 there and 6 here"),
        ({"window": 3}, "window is 2 there and 3 here"),
        ({"drop_last": True}, "drop_last is False there and True here"),
        ({"paths": "part=0"}, "size is 123 there and 41 here"),
    ],
)
def test_a_state_of_a_different_dataset_is_refused(data: Path, changed: dict[str, Any], words: str) -> None:
    place = data / changed.pop("paths", ".")
    with pytest.raises(ValueError, match=words):
        make(place, **changed).load_state_dict(make(data).state_dict())
    with pytest.raises(ValueError, match="files is"):
        renamed = make(data)
        renamed.load_state_dict({**renamed.state_dict(), "files": "other names"})


def test_groups_that_are_used_up_are_not_read_again(tmp_path: Path) -> None:
    """After the state was saved their files were deleted."""
    for file in range(6):
        write(tmp_path / f"{file}.parquet", range(file * 10, file * 10 + 10), in_group=10)
    dataset, other = make(tmp_path, window=1, batch_size=10), make(tmp_path, window=1, batch_size=10)
    whole = batches(dataset)
    other.load_state_dict(dataset.state_dict(drawn=4))
    for batch in whole[:4]:
        (tmp_path / f"{batch[0] // 10}.parquet").unlink()
    assert batches(other) == whole[4:]


# --- memory ----------------------------------------------------------------------------------------------------------


def test_what_is_read_ahead_is_bounded_in_bytes(tmp_path: Path) -> None:
    groups, rows = 24, 16_384  # 128 KiB of numbers each
    draw = numpy.random.default_rng(0)
    for file in range(4):
        write(tmp_path / f"{file}.parquet", draw.integers(1 << 62, size=rows * groups // 4), in_group=rows)
    dataset = ParquetDataset(tmp_path, batch_size=rows // 4, window=2, memory_bytes=9 * rows * 4, convert=lambda t: t)
    before = pyarrow.total_allocated_bytes()

    def held() -> float:
        return (pyarrow.total_allocated_bytes() - before) / (rows * 8)

    for number, _ in enumerate(dataset):
        if number < groups * 3:
            wait_for(held, lambda size: size > 3.5)  # it reads ahead as far as it may
        assert held() < 8  # of 24 groups: with the batch, and the encoded bytes of the group that is being read
    assert number + 1 == groups * 4


def reader_waits() -> bool:
    """Its thread is in Condition.wait, or has ended."""
    readers = [thread for thread in threading.enumerate() if thread.name == "cachefs parquet reader"]
    frames = [sys._current_frames().get(thread.ident or 0) for thread in readers]
    return all(frame is None or frame.f_code.co_filename == threading.__file__ for frame in frames)


def test_a_window_beyond_the_limit_does_not_hang(data: Path) -> None:
    dataset = make(data, window=6, memory_bytes=1)
    assert sorted(joined(batches(dataset))) == list(range(SIZE))


def test_no_thread_remains_when_an_iteration_is_abandoned(data: Path) -> None:
    drawn = iter(make(data, memory_bytes=1))
    next(drawn)
    assert any(thread.name == "cachefs parquet reader" for thread in threading.enumerate())
    del drawn
    assert not any(thread.name == "cachefs parquet reader" for thread in threading.enumerate())


def test_the_reader_goes_on_when_a_table_is_released(data: Path) -> None:
    found = find_row_groups(data, ["number"])
    announced: list[int] = []
    reader = BackgroundReader(found.groups, found.columns, limit_bytes=1, announce=announced.append, use_threads=False)
    try:
        assert reader.take(1).num_rows == IN_GROUP  # and 0, which comes before it
        wait_for(reader_waits, bool)
        assert announced == [0, 1]
        for place in range(len(found.groups)):
            if place != 1:
                reader.take(place)
            reader.release(place)
        assert announced == list(range(len(found.groups)))
    finally:
        reader.close()


def test_a_reader_that_is_closed_reads_nothing_more(data: Path) -> None:
    found = find_row_groups(data, ["number"])
    announced: list[int] = []
    reader = BackgroundReader(found.groups, found.columns, limit_bytes=1, announce=announced.append, use_threads=False)
    reader.take(0)
    reader.close()
    assert announced == [0]


# --- columns ---------------------------------------------------------------------------------------------------------


def test_selected_columns_as_tensors(data: Path) -> None:
    dataset = make(data, columns=["lists", "ids", "word", "number"])
    for batch in dataset:
        assert list(batch) == ["lists", "ids", "word", "number"]
        number = batch["number"]
        assert number.dtype == torch.int64 and batch["word"] == [f"word {each}" for each in number.tolist()]
        assert batch["ids"].tolist() == [[each] * 3 for each in number.tolist()]
        assert [each.tolist() for each in batch["lists"]] == [[each] * (each % 4) for each in number.tolist()]
        number += 1  # a tensor of its own
    assert list(next(iter(make(data, columns=None)))) == ["number", "word", "ids", "lists"]


def test_a_function_of_ones_own_makes_the_batches(data: Path) -> None:
    dataset = make(data, convert=lambda table: table.num_rows, drop_last=True, rank=0, world_size=2)
    assert list(dataset) == [5] * 12 + [1] and len(dataset) == 13


def test_missing_values_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", range(3), label=pyarrow.array([1, None, 3]))
    with pytest.raises(ValueError, match="column 'label' has missing values"):
        list(make(tmp_path, columns=["label"]))
    (table,) = make(tmp_path, columns=["label"], convert=lambda table: table)
    assert table.column("label").null_count == 1


def test_what_makes_no_sense_is_refused(data: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ({"columns": ["nonsense"]}, "has no column 'nonsense'; it has number, word, ids, lists"),
        ({"columns": []}, "no column is selected"),
        ({"batch_size": 0}, "batch size"),
        ({"memory_bytes": 0}, "memory_bytes=0"),
        ({"rank": 2, "world_size": 2}, "rank 2"),
    ):
        with pytest.raises(ValueError, match=words):
            make(data, **arguments)
    with pytest.raises(ValueError, match="there is no parquet file"):
        make(tmp_path)
    with pytest.raises(FileNotFoundError, match="missing"):
        make(tmp_path / "missing.parquet")
    write(tmp_path / "a.parquet", range(3))
    pyarrow.parquet.write_table(pyarrow.table({"number": ["text"]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"column 'number' is string in .*b\.parquet and int64 in .*a\.parquet"):
        make(tmp_path)
    (tmp_path / "b.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"b\.parquet is no parquet file"):
        make(tmp_path)


def test_a_file_that_changes_or_disappears_is_an_error_with_its_path(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", range(30), in_group=10)
    dataset = make(tmp_path)
    write(path, range(30), in_group=11)
    with pytest.raises(OSError, match=r"a\.parquet has changed: row group \d has \d+ rows"):
        list(dataset)
    path.unlink()
    with pytest.raises(OSError, match=r"cannot read row group \d of .*a\.parquet"):
        list(dataset)


def test_without_torch_or_pyarrow_one_line_says_what_to_install(tmp_path: Path) -> None:
    for missing in ("torch", "pyarrow"):
        code = f"import sys; sys.modules[{missing!r}] = None\nimport cachefs.loaders"
        done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert f"ModuleNotFoundError: cachefs.loaders needs {missing}: run pip install torch pyarrow" in done.stderr
    code = "import cachefs.client, sys; assert 'torch' not in sys.modules and 'pyarrow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, env={**os.environ})
