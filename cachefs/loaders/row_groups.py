"""The row groups of a parquet dataset, from the footers of its files."""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pyarrow
import pyarrow.parquet

Path = str | os.PathLike[str]
JOBS = 16
"""Footers that are read at once: each waits for the filesystem a few times."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    path: str
    number: int
    """Within its file."""
    rows: int
    stored_bytes: int
    """Of the selected columns, in the file."""
    bytes: int
    """Of the selected columns, uncompressed: about what they take in memory."""


@dataclass(frozen=True, slots=True)
class RowGroups:
    """All row groups, by file name and number. The same on all ranks."""

    columns: list[str]
    groups: list[RowGroup]
    file_bytes: dict[str, int]
    """The sizes of the files, by path."""

    def digest(self) -> str:
        """Names and row groups of the files, without their directory: a dataset may be mounted elsewhere next time."""
        lines = [f"{os.path.basename(group.path)} {group.number} {group.rows}" for group in self.groups]
        return sha256(os.fsencode("\n".join(lines))).hexdigest()[:16]


def find_row_groups(paths: Path | Iterable[Path], columns: Sequence[str] | None) -> RowGroups:
    """Read all footers. `columns`: None for all.

    Raises OSError for what cannot be read, and ValueError for what is no parquet file or lacks a column, or has it with
    another type than the first file.
    """
    files = list(_files(paths))
    if not files:
        raise ValueError(f"there is no parquet file in {paths}")
    with ThreadPoolExecutor(JOBS) as pool:
        footers = list(pool.map(_footer, files))
    _, first, _ = footers[0]
    columns = list(dict.fromkeys(first.names if columns is None else columns))
    if not columns:
        raise ValueError("no column is selected")
    groups = []
    for path, (metadata, schema, _) in zip(files, footers, strict=True):
        for name in columns:
            if name not in schema.names:
                raise ValueError(f"{path} has no column {name!r}; it has {', '.join(schema.names)}")
            if not schema.field(name).type.equals(first.field(name).type):
                raise ValueError(
                    f"column {name!r} is {schema.field(name).type} in {path} and {first.field(name).type} in {files[0]}"
                )
        groups += [
            _row_group(path, number, metadata.row_group(number), columns) for number in range(metadata.num_row_groups)
        ]
    return RowGroups(columns, groups, {path: size for path, (_, _, size) in zip(files, footers, strict=True)})


def _files(paths: Path | Iterable[Path]) -> Iterator[str]:
    """Files as given; of directories all *.parquet beneath, sorted, without names that begin with "." or "_"."""
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        if not os.path.isdir(path):
            yield os.path.abspath(path)
            continue
        for directory, below, names in os.walk(os.path.abspath(path), onerror=_raise):
            below[:] = sorted(name for name in below if not name.startswith((".", "_")))
            for name in sorted(names):
                if name.endswith(".parquet") and not name.startswith((".", "_")):
                    yield os.path.join(directory, name)


def _raise(error: OSError) -> None:
    raise error


def _footer(path: str) -> tuple[Any, Any, int]:
    """(metadata, Arrow schema, size of the file)"""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            return file.metadata, file.schema_arrow, os.path.getsize(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is no parquet file: {error}") from None


def _row_group(path: str, number: int, metadata: Any, columns: Sequence[str]) -> RowGroup:
    chunks = [metadata.column(place) for place in range(metadata.num_columns)]
    selected = [
        chunk
        for chunk in chunks
        if chunk.path_in_schema.startswith(tuple(f"{name}." for name in columns)) or chunk.path_in_schema in columns
    ]
    return RowGroup(
        path,
        number,
        metadata.num_rows,
        sum(chunk.total_compressed_size for chunk in selected),
        sum(chunk.total_uncompressed_size for chunk in selected),
    )
