"""Graph training, partition by partition: from the source, from a cache that has everything, and with a graph.

The graph has a million edges with a power-law distribution, and its nodes are in partitions. A reader reads all files
of a partition, spends a fixed time on it, and continues with the most connected partition that it has not visited. Each
call to the source takes a millisecond.

No model is trained: the reader sleeps instead, in exactly the order that the prefetch policy predicts. So the results
are an upper bound of the gain of a real training job.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
import numpy

from benchmarks.harness import CACHEFS, Comparison, drop_caches, make_tree, mounted, read_files, read_source, report

NODES, EDGES, PARTITIONS = 100_000, 1_000_000, 24
FILES, SIZES = 100, (40_000, 60_000)
LATENCY_MS = 1.0
WITHIN, SHORTER = 0.9, 2.0

Read = Callable[[Sequence[str]], None]


def write_graph(base: Path) -> Path:
    """A graph whose degrees follow a power law, as `cachefs graph build` counts its partitions."""
    draw = numpy.random.default_rng(1)
    # Nodes by weight rank^-0.8 on either side; neighbours in number are more likely to be connected.
    weights = numpy.arange(1, NODES + 1) ** -0.8
    ends = draw.permutation(NODES)[draw.choice(NODES, EDGES, p=weights / weights.sum())]
    near = (ends + draw.zipf(1.5, EDGES) * (NODES // PARTITIONS // 2)) % NODES
    numpy.save(base / "edges.npy", numpy.stack([ends, near], axis=1))
    parts = numpy.arange(NODES) * PARTITIONS // NODES
    (base / "parts").write_text("".join(f"d{part:03}\n" for part in parts))
    path = base / "graph.jsonl"
    with open(path, "w") as file:
        subprocess.run([*CACHEFS, "graph", "build", base / "edges.npy", base / "parts"], check=True, stdout=file)
    return path


def training_order(graph: Path) -> list[str]:
    """The partitions in order: next is the remaining one to which most edges lead."""
    edges: dict[str, dict[str, int]] = {}
    for line in graph.read_text().splitlines():
        each = json.loads(line)
        edges.setdefault(each["partition"], {})
        for other, count in each["depends"].items():
            edges.setdefault(other, {})[each["partition"]] = count
    order = ["d000"]
    left = set(edges) - {"d000"}
    while left:
        order.append(max(sorted(left), key=lambda name: edges[order[-1]].get(name, 0)))
        left.remove(order[-1])
    return order


def train(order: Sequence[str], files: dict[str, list[str]], read: Read, work_s: float) -> float:
    """Seconds."""
    started = time.perf_counter()
    for part in order:
        read(files[part])
        time.sleep(work_s)
    return time.perf_counter() - started


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--work", "work_s", default=0.15, show_default=True, help="Seconds of work per partition.")
def main(rounds: int, work_s: float) -> None:
    """Run times of an epoch over all partitions."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as work:
        base = Path(work)
        source = base / "source"
        paths = make_tree(source, PARTITIONS, FILES, SIZES)
        files: dict[str, list[str]] = {}
        for path in paths:
            files.setdefault(path.split("/")[0], []).append(path)
        graph = write_graph(base)
        order = training_order(graph)
        read_files(str(source), paths)
        half = sum((source / path).stat().st_size for path in paths) // 2
        arguments = ("--read-only", "--simulate-latency", str(LATENCY_MS))
        within = Comparison("graph: all cached in advance", WITHIN)
        half_within = Comparison("graph, half the dataset fits: all fits", WITHIN)
        shorter = Comparison("graph: from the source", SHORTER)
        for number in range(rounds):
            read = partial(read_files, str(base / "mnt"))
            direct = train(order, files, partial(read_source, str(source), latency_s=LATENCY_MS / 1000), work_s)
            with mounted(source, base / "mnt", base / f"warm{number}", *arguments):
                read(paths)
                drop_caches()
                cached = train(order, files, read, work_s)
            with mounted(source, base / "mnt", base / f"graph{number}", *arguments, "--prefetch-graph", str(graph)):
                prefetched = train(order, files, read, work_s)
            size = ("--cache-size", str(half))
            with mounted(
                source, base / "mnt", base / f"half{number}", *arguments, "--prefetch-graph", str(graph), *size
            ) as status:
                halved = train(order, files, read, work_s)
                said = status()
            print(f"half: {said['evictions']} evictions, {said['prefetched']} fetched ahead, {said['misses']} misses")
            rates = [60 * PARTITIONS / seconds for seconds in (direct, cached, prefetched, halved)]
            shorter.add(rates[2], rates[0])
            within.add(rates[2], rates[1])
            half_within.add(rates[3], rates[2])
        holds = report("Graph training, one epoch", [within, half_within, shorter], "partitions a minute")
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()
