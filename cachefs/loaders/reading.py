"""Reads row groups in the background, in a given order, as long as a limited number of bytes is held."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow
import pyarrow.parquet

from cachefs.loaders.row_groups import RowGroup


class BackgroundReader:
    """One thread. `take` row groups by their place in the sequence, and `release` them after use.

    The thread reads on while the tables that wait and those that were taken have less than `limit_bytes`. A row group
    that `take` waits for is read in any case: its caller cannot release another one first.
    """

    def __init__(
        self,
        groups: Sequence[RowGroup],
        columns: Sequence[str],
        *,
        limit_bytes: int,
        announce: Callable[[int], None],
        use_threads: bool,
    ) -> None:
        """`announce` is called in the thread with each place before its row group is read. It must not raise."""
        # dependencies
        self._groups = groups
        self._columns = columns
        self._limit_bytes = limit_bytes
        self._announce = announce
        self._use_threads = use_threads
        # state, guarded by the condition
        self._changed = threading.Condition()
        self._waiting: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._held_bytes = 0
        self._wanted = -1
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="cachefs parquet reader", daemon=True)
        self._thread.start()

    def take(self, place: int) -> Any:
        """The table, when it has been read. Raises what reading raised."""
        with self._changed:
            self._wanted = max(self._wanted, place)
            self._changed.notify_all()
            self._changed.wait_for(lambda: place in self._waiting or self._failure is not None)
            if place not in self._waiting:
                assert self._failure is not None
                raise self._failure
            return self._waiting.pop(place)

    def release(self, place: int) -> None:
        """Its table is not used any more."""
        with self._changed:
            self._held_bytes -= self._sizes.pop(place)
            self._changed.notify_all()

    def close(self) -> None:
        """Returns when no file is read any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            for place, group in enumerate(self._groups):
                if not self._may_read(place, group):
                    return
                self._announce(place)
                table = read_row_group(group, self._columns, self._use_threads)
                with self._changed:
                    self._waiting[place] = table
                    self._sizes[place] = table.get_total_buffer_size()
                    self._held_bytes += self._sizes[place]
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _may_read(self, place: int, group: RowGroup) -> bool:
        """Waits for room. False: closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or place <= self._wanted or self._held_bytes + group.bytes <= self._limit_bytes
            )
            return not self._closed


def read_row_group(group: RowGroup, columns: Sequence[str], use_threads: bool) -> Any:
    """A table of contiguous columns. Raises OSError with the path, also if the file is not the one that was planned."""
    try:
        with pyarrow.parquet.ParquetFile(group.path, pre_buffer=True) as file:
            table = file.read_row_group(group.number, columns=list(columns), use_threads=use_threads)
    except (OSError, pyarrow.ArrowException) as error:
        raise OSError(f"cannot read row group {group.number} of {group.path}: {error}") from error
    if table.num_rows != group.rows or set(table.column_names) != set(columns):
        raise OSError(
            f"{group.path} has changed: row group {group.number} has {table.num_rows} rows of "
            f"{', '.join(table.column_names)}, not {group.rows} of {', '.join(columns)}"
        )
    return table.select(list(columns)).combine_chunks()
