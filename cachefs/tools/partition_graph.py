"""Builds the graph of partitions from a graph of nodes: the number of edges between each two partitions.

Edges are read a block at a time. Memory holds the node map, one block, and the counts (8 bytes for each pair of
partitions). Files are `.npy` arrays (edges: shape (E, 2), or (2, E) as in PyTorch Geometric; map: shape (N,), the
number of each node's partition), `.npz` archives of one such array, which are read as a whole, or text: two node
numbers per line, and the name of a partition per line, the first for node 0. An array of shape (2, 2) is (E, 2).
"""

import glob
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from cachefs.errors import CacheFsError
from policies.prefetch.dependency_graph import DependencyGraph, InvalidGraph, Partition

BLOCK_EDGES = 1 << 22
BLOCK_BYTES = 8 << 20
MAX_PARTITIONS = 1 << 13
TORCH = (".pt", ".pth")
Array = numpy.ndarray[Any, Any]


def build_graph(
    edges: Path, node_map: Path, prefix: str = "", suffix: str = "", root: Path | None = None
) -> Iterator[str]:
    """The lines of JSON that `cachefs mount --prefetch-graph` reads. Raises CacheFsError.

    `prefix`, `suffix`: of the path of each partition. `root`: of the dataset, beneath which each path must exist.
    """
    try:
        names, part_of = _node_map(node_map)
        paths = [prefix + name + suffix for name in names]
        if root is not None:
            _check_paths(paths, root)
        counts = numpy.zeros(len(names) ** 2, dtype=numpy.int64)
        for block in _blocks(edges):
            for extreme in (block.min(), block.max()) if block.size else ():
                if not 0 <= extreme < len(part_of):
                    raise CacheFsError(
                        f"{edges}: node {extreme} is not in the map {node_map}, which has {len(part_of):,} nodes"
                    )
            pairs = part_of[block[:, 1]].astype(numpy.int64) * len(names) + part_of[block[:, 0]]
            if len(counts) <= BLOCK_EDGES:
                counts += numpy.bincount(pairs, minlength=len(counts))
            else:  # a second array of that size would cost more than sorting
                found, times = numpy.unique(pairs, return_counts=True)
                counts[found] += times
    except OSError as error:
        raise CacheFsError(f"cannot read {error.filename or edges}: {error.strerror or error}") from error
    for number, row in enumerate(counts.reshape(len(paths), len(paths))):
        order = sorted(numpy.flatnonzero(row), key=lambda other: -row[other])
        depends = {paths[other]: int(row[other]) for other in order if other != number}
        yield json.dumps({"partition": paths[number], "depends": depends})


def _check_paths(paths: Sequence[str], root: Path) -> None:
    """Each path must lead to a file or directory beneath `root`, and each glob must match a file."""
    try:
        graph = DependencyGraph(Partition(path, {}) for path in paths)
    except InvalidGraph as error:
        raise CacheFsError(str(error)) from None
    globs = {name for name, target in graph.partitions.items() if target.globs is not None}
    missing = {name for name in paths if name not in globs and not os.path.lexists(root / name.strip("/"))} | globs
    for directory, _, files in os.walk(os.fsencode(root)) if globs else ():
        for file in files:
            missing -= set(graph.globs_of(os.path.relpath(os.path.join(directory, file), os.fsencode(root))))
    if missing:
        first = next(name for name in paths if name in missing)
        raise CacheFsError(
            f"{root}: {len(missing):,} of {len(paths):,} partitions match no file, the first is {first!r}. "
            f"{_advice(first, root)}"
        )


def _advice(name: str, root: Path) -> str:
    place = root / name.strip("/")
    longer = sorted(glob.glob(glob.escape(str(place)) + "?*"))
    if longer and "/" not in (suffix := longer[0].removeprefix(str(place))) and suffix.startswith("."):
        return f"Use --suffix {suffix}"
    return "A path is --prefix, the partition of the map, and --suffix"


def _node_map(path: Path) -> tuple[list[str], Array]:
    """The names of the partitions, and the number of each node's partition."""
    if _is_array(path):
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
    if _is_array(path):
        edges = _edges(path)
        for start in range(0, len(edges), BLOCK_EDGES):
            yield numpy.array(edges[start : start + BLOCK_EDGES])
            if path.suffix == ".npy":
                edges = _edges(path)  # a new mapping: pages of the old one no longer count as memory of this process
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


def _edges(path: Path) -> Array:
    edges = _load(path)
    if edges.ndim != 2 or 2 not in edges.shape or edges.dtype.kind not in "iu":
        raise CacheFsError(
            f"{path}: expected integers, two for each edge, and not {edges.dtype} of shape {edges.shape}"
        )
    return edges if edges.shape[1] == 2 else edges.T


def _is_array(path: Path) -> bool:
    """Is a file an array, and not text?"""
    if path.suffix in TORCH:
        raise CacheFsError(
            f"{path} is a file of torch, which is not read here. Save the tensor as an array: "
            f"numpy.save({path.with_suffix('.npy').name!r}, tensor.numpy())"
        )
    return path.suffix in (".npy", ".npz")


def _load(path: Path) -> Array:
    try:
        loaded = numpy.load(path, mmap_mode="r")
        if isinstance(loaded, numpy.ndarray):
            return loaded
        with loaded:
            if len(loaded.files) != 1:
                found = ", ".join(loaded.files) or "none"
                raise CacheFsError(f"{path}: expected one array, and not: {found}. Save the array with numpy.save")
            array: Array = loaded[loaded.files[0]]
            return array
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise CacheFsError(f"{path} is not a NumPy array: {error}") from error
