"""Builds the graph of partitions from a graph of nodes: the number of edges between each two partitions.

Edges are read a block at a time. Memory holds the node map, one block, and the counts (8 bytes for each pair of
partitions). Files are `.npy` arrays (edges: shape (E, 2); map: shape (N,), the number of each node's partition) or
text: two node numbers per line, and the name of a partition per line, the first for node 0.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from cachefs.errors import CacheFsError

BLOCK_EDGES = 1 << 22
BLOCK_BYTES = 8 << 20
MAX_PARTITIONS = 1 << 13
Array = numpy.ndarray[Any, Any]


def build_graph(edges: Path, node_map: Path, prefix: str = "") -> Iterator[str]:
    """The lines of JSON that `cachefs mount --prefetch-graph` reads. Raises CacheFsError.

    `prefix`: prepended to each partition's name.
    """
    try:
        names, part_of = _node_map(node_map)
        counts = numpy.zeros(len(names) ** 2, dtype=numpy.int64)
        for block in _blocks(edges):
            for extreme in (block.min(), block.max()) if block.size else ():
                if not 0 <= extreme < len(part_of):
                    raise CacheFsError(f"{edges}: node {extreme} is not in the map")
            pairs = part_of[block[:, 1]].astype(numpy.int64) * len(names) + part_of[block[:, 0]]
            if len(counts) <= BLOCK_EDGES:
                counts += numpy.bincount(pairs, minlength=len(counts))
            else:  # a second array of that size would cost more than sorting
                found, times = numpy.unique(pairs, return_counts=True)
                counts[found] += times
    except OSError as error:
        raise CacheFsError(f"cannot read {error.filename or edges}: {error.strerror or error}") from error
    names = [prefix + name for name in names]
    for number, row in enumerate(counts.reshape(len(names), len(names))):
        order = sorted(numpy.flatnonzero(row), key=lambda other: -row[other])
        depends = {names[other]: int(row[other]) for other in order if other != number}
        yield json.dumps({"partition": names[number], "depends": depends})


def _node_map(path: Path) -> tuple[list[str], Array]:
    """The names of the partitions, and the number of each node's partition."""
    if path.suffix == ".npy":
        part_of = _load(path)
        if part_of.ndim != 1 or part_of.dtype.kind not in "iu" or not len(part_of) or int(part_of.min()) < 0:
            raise CacheFsError(f"{path}: expected non-negative integers, one for each node")
        _check_partitions(path, int(part_of.max()) + 1)
        names = [str(number) for number in range(int(part_of.max()) + 1)]
    else:
        known: dict[str, int] = {}
        try:
            with open(path, encoding="utf-8") as file:
                part_of = numpy.fromiter(
                    (known.setdefault(line.strip(), len(known)) for line in file), dtype=numpy.int32
                )
        except UnicodeDecodeError:
            raise CacheFsError(f"{path}: the names of partitions must be UTF-8") from None
        if not known:
            raise CacheFsError(f"{path}: expected the name of a partition for each node")
        names = list(known)
        _check_partitions(path, len(names))
    return names, part_of


def _check_partitions(path: Path, count: int) -> None:
    if count > MAX_PARTITIONS:
        raise CacheFsError(f"{path}: {count:,} partitions, more than {MAX_PARTITIONS:,}")


def _blocks(path: Path) -> Iterator[Array]:
    """Edges as arrays of shape (n, 2)."""
    if path.suffix == ".npy":
        edges = _load(path)
        if edges.ndim != 2 or edges.shape[1] != 2 or edges.dtype.kind not in "iu":
            raise CacheFsError(f"{path}: expected integers, two for each edge")
        for start in range(0, len(edges), BLOCK_EDGES):
            yield numpy.array(edges[start : start + BLOCK_EDGES])
            edges = _load(path)  # a new mapping: pages of the old one no longer count as memory of this process
        return
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            block += file.readline()
            try:
                numbers = numpy.array(block.split(), dtype=numpy.int64)
            except (ValueError, OverflowError):
                raise CacheFsError(f"{path}: expected two numbers per line, of at most 64 bits") from None
            if len(numbers) % 2:
                raise CacheFsError(f"{path}: expected two numbers per line")
            yield numbers.reshape(-1, 2)


def _load(path: Path) -> Array:
    try:
        array: Array = numpy.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise CacheFsError(f"{path} is not a NumPy array: {error}") from error
    return array
