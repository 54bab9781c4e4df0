"""Batches of a parquet dataset for torch: shuffled, each sample exactly once over ranks and workers, resumable.

    from cachefs.loaders import ParquetDataset
    from torch.utils.data import DataLoader

    dataset = ParquetDataset("/data/tokens", batch_size=256, columns=["ids", "label"], rank=rank, world_size=world)
    loader = DataLoader(dataset, batch_size=None, num_workers=4)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        for batch in loader:
            ...

*Order*: `WindowShuffle` (policies/order). Row groups are shuffled and dealt to ranks, and each rank's share to the
workers of its DataLoader, in whole batches; samples are drawn from `window` row groups at a time. The order depends on
the seed, the epoch, the world and the number of workers.

*Equal ranks*: all ranks get the same number of batches of the same sizes. The first samples of the epoch are repeated
for that, `world_size` - 1 at most; `drop_last` omits as many instead; `pad=False` does neither, and ranks may differ
by one sample. The last batch of a rank may be smaller than the others.

*Memory*: a thread reads row groups ahead while what it holds takes less than `memory_bytes`, in each worker. The row
groups of the window are held in any case, as well as the batches that the DataLoader itself fetches ahead.

*Resuming*: `state_dict` and `load_state_dict`. torchdata's StatefulDataLoader calls them in the workers. With torch's
DataLoader: without workers `state_dict()` is exact; with workers, which draw ahead of training, give
`state_dict(drawn=N)` the number of batches that training has taken in this epoch. Both need as many workers as before.
Row groups that are used up are not read again.

*Hints*: files on a cachefs mount are announced to it shortly before they are read, if the rank will read at least half
of their bytes: of the others the mount fetches what is read.

After: the windowed shuffle of Naver's parquet loader, and Petastorm, whose workers draw with replacement.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import numpy
import pyarrow
import torch
from torch import distributed
from torch.utils.data import IterableDataset, get_worker_info

from cachefs.loaders.hints import Hints
from cachefs.loaders.reading import BackgroundReader
from cachefs.loaders.row_groups import Path, find_row_groups
from cachefs.loaders.tensors import to_tensors
from policies.order import WindowShuffle
from policies.order.epoch import check_same

MAX_WORKERS = 1024
ANNOUNCED_GROUPS = 16
"""Row groups whose files are announced ahead of the one that is read next; half of them at a time."""


class ParquetDataset(IterableDataset[Any]):
    def __init__(
        self,
        paths: Path | Iterable[Path],
        *,
        batch_size: int,
        columns: Sequence[str] | None = None,
        window: int = 4,
        memory_bytes: int = 256 << 20,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        pad: bool = True,
        convert: Callable[[Any], Any] = to_tensors,
    ) -> None:
        """Reads the footers of all files. `paths`: a directory, a file, or several of them, the same for all ranks.

        `rank` and `world_size` are those of torch.distributed, if it is initialized, unless given. `convert`: makes a
        batch of a pyarrow.Table, in the worker.

        Raises OSError for what cannot be read, and ValueError for arguments and files that do not fit.
        """
        if memory_bytes < 1:
            raise ValueError(f"memory_bytes={memory_bytes} must be at least 1")
        together = distributed.is_available() and distributed.is_initialized()
        if world_size is None:
            world_size = distributed.get_world_size() if together else 1
        if rank is None:
            rank = distributed.get_rank() if together else 0
        found = find_row_groups(paths, columns)
        self.columns = found.columns
        self.batch_size = batch_size
        self._groups = found.groups
        self._file_bytes = found.file_bytes
        self._memory_bytes = memory_bytes
        self._convert = convert
        self._arguments: dict[str, Any] = {
            "window": window,
            "seed": seed,
            "rank": rank,
            "world_size": world_size,
            "drop_last": drop_last,
            "pad": pad,
            "batch_size": batch_size,
        }
        # What two datasets must have in common to give the same order to as many workers.
        self._same = {"dataset": type(self).__name__, "size": sum(group.rows for group in found.groups)}
        self._same |= {name: value for name, value in self._arguments.items() if name != "rank"}
        self._same |= {"files": found.digest()}
        # Workers are copies of this process: they see a new epoch and new positions only in shared memory.
        self._epoch, self._used_workers, self._resumed_workers = _shared(1), _shared(1), _shared(1)
        self._positions, self._shifts = _shared(MAX_WORKERS), _shared(MAX_WORKERS)
        """Where each worker begins its next pass, in batches, and how many numbers farther the worker is whose part it
        takes: a DataLoader begins with worker 0, and the next batch may be of another one's part."""
        self._drawn = self._shift = 0
        self._samples = len(self._order())

    def __len__(self) -> int:
        """The number of batches of this rank in an epoch."""
        return math.ceil(self._samples / self.batch_size)

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, with another order. The epoch of a state that was loaded continues where it was."""
        if epoch != self.epoch or not self._positions.any():
            self._begin(epoch)

    def state_dict(self, drawn: int | None = None) -> dict[str, Any]:
        """The position in the epoch. `drawn`: the batches that training has taken; None: those of the last iterator.

        Raises ValueError where only the caller knows them, because workers have drawn ahead.
        """
        info = get_worker_info()
        if info is None and drawn is None and self._used_workers:
            raise ValueError(
                "workers draw ahead of training: give state_dict(drawn=N) the number of batches that training has "
                "taken in this epoch, or use torchdata's StatefulDataLoader"
            )
        if drawn is not None and not 0 <= drawn <= len(self):
            raise ValueError(f"drawn={drawn} is not between 0 and {len(self)}, the number of batches in an epoch")
        return {
            **self._same,
            "epoch": self.epoch,
            "drawn": self._drawn if drawn is None else drawn,
            "worker": None if info is None else info.id,
            "shift": self._shift,
            "workers": max(1, int(self._resumed_workers if self._positions.any() else self._used_workers)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass continues at that position. Raises ValueError for a state of a different order."""
        info = get_worker_info()
        check_same({**self._same, "worker": None if info is None else info.id}, state)
        workers, drawn = state["workers"], state["drawn"]
        if info is None:
            self._begin(state["epoch"])
            for worker in range(workers):
                part = (worker + drawn) % workers
                self._positions[worker] = len(range(part, drawn, workers))
            self._shifts.fill_(drawn % workers)
        else:  # each worker loads its own
            self._epoch[0], self._positions[info.id], self._shifts[info.id] = state["epoch"], drawn, state["shift"]
        self._resumed_workers[0], self._drawn = workers, drawn

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if workers > MAX_WORKERS:
            raise ValueError(f"{workers} workers are more than {MAX_WORKERS}")
        skipped, self._shift = int(self._positions[worker]), int(self._shifts[worker])
        if (skipped or self._shift) and workers != self._resumed_workers:
            raise ValueError(
                f"the state was saved with {int(self._resumed_workers)} workers, and the DataLoader has {workers}: "
                "use as many as before"
            )
        self._positions[worker] = self._shifts[worker] = 0
        self._used_workers[0] = 0 if info is None else workers
        self._drawn = skipped
        for table in self.read((worker + self._shift) % workers, workers, skipped):
            self._drawn += 1
            yield self._convert(table)

    def read(self, worker: int = 0, workers: int = 1, skipped: int = 0) -> Iterator[Any]:
        """The batches of one worker in this epoch, as tables, without the first ones."""
        order = self._order(worker, workers)
        pieces, draws = order.pieces(), order.draws()
        left = Counter({number: piece.stop - piece.start for number, piece in enumerate(pieces)})
        left.subtract(number for number, _ in islice(draws, skipped * self.batch_size))
        numbers = [number for number in range(len(pieces)) if left[number]]
        place = {number: at for at, number in enumerate(numbers)}
        groups = [self._groups[pieces[number].group] for number in numbers]
        reader = BackgroundReader(
            groups,
            self.columns,
            limit_bytes=self._memory_bytes,
            announce=self._announcer([group.path for group in groups]),
            use_threads=get_worker_info() is None,
        )
        with closing(reader):
            window: dict[int, Any] = {}
            while batch := list(islice(draws, self.batch_size)):
                samples: dict[int, list[int]] = defaultdict(list)
                for number, sample in batch:
                    samples[number].append(sample)
                for number in samples:
                    if number not in window:
                        window[number] = reader.take(place[number])
                table = _gather([number for number, _ in batch], samples, window)
                for number in samples:
                    left[number] -= len(samples[number])
                    if not left[number]:
                        del window[number]
                        reader.release(place[number])
                yield table

    def _begin(self, epoch: int) -> None:
        self._epoch[0], self._drawn, self._shift = epoch, 0, 0
        self._positions.zero_()
        self._shifts.zero_()

    def _order(self, worker: int = 0, workers: int = 1) -> WindowShuffle:
        rows = [group.rows for group in self._groups]
        order = WindowShuffle(rows, worker=worker, workers=workers, **self._arguments)
        order.set_epoch(self.epoch)
        return order

    def _announcer(self, paths: Sequence[str]) -> Callable[[int], None]:
        """Announces the files of the next row groups, as the reader gets to them."""
        worth = self._worth_announcing()
        hints = Hints()

        def announce(place: int) -> None:
            if place % (ANNOUNCED_GROUPS // 2) == 0:
                hints.announce(path for path in paths[place : place + ANNOUNCED_GROUPS] if path in worth)

        return announce

    def _worth_announcing(self) -> set[str]:
        """Files of which this rank reads at least half: the mount fetches whole files that are announced."""
        read: Counter[str] = Counter()
        for piece in self._order().pieces():
            group = self._groups[piece.group]
            read[group.path] += group.stored_bytes * (piece.stop - piece.start) // group.rows
        return {path for path, size in read.items() if size * 2 >= self._file_bytes[path]}


def _shared(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def _gather(numbers: list[int], samples: dict[int, list[int]], tables: dict[int, Any]) -> Any:
    """The rows `samples` of `tables`, in the order in which they were drawn: `numbers` has the table of each row."""
    parts = [tables[number].take(pyarrow.array(rows)) for number, rows in samples.items()]
    if len(parts) == 1:
        return parts[0]
    at = {number: place for place, number in enumerate(samples)}
    by_table = numpy.argsort(numpy.array([at[number] for number in numbers]), kind="stable")
    places = numpy.empty_like(by_table)
    places[by_table] = numpy.arange(len(by_table))
    return pyarrow.concat_tables(parts).combine_chunks().take(pyarrow.array(places))
