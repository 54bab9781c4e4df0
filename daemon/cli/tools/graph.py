"""`cachefs graph`: graphs for `cachefs mount --prefetch-graph`."""

from pathlib import Path

import click

from daemon.output import say


@click.group()
def graph() -> None:
    """Build the graph of a partitioned dataset. `cachefs mount --prefetch-graph` reads it.

    \b
    Example:
      cachefs graph build edges.npy parts.npy > graph.jsonl
    """


@graph.command()
@click.argument("edges", type=click.Path(path_type=Path))
@click.argument("node_map", metavar="MAP", type=click.Path(path_type=Path))
@click.option("--prefix", default="", show_default=False, metavar="PATH", help="Prepend PATH to each partition's name.")
def build(edges: Path, node_map: Path, prefix: str) -> None:
    """Count the edges between partitions, and print the dependencies as lines of JSON.

    EDGES is a .npy array of shape (E, 2), or text with two node numbers per line. MAP has the partition of each node:
    a .npy array of numbers, or text with one name per line.

    \b
    Example:
      cachefs graph build edges.npy parts.npy --prefix features/part- > graph.jsonl
      cachefs mount /ceph/papers /data/papers --read-only --prefetch-graph graph.jsonl
    """
    from cachefs.tools.partition_graph import build_graph  # numpy is slow to load

    for line in build_graph(edges, node_map, prefix):
        say(line)
