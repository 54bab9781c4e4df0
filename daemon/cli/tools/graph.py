"""`cachefs graph`: what `cachefs mount --prefetch-graph` is told."""

from pathlib import Path

import click

from cachefs.tools.partition_graph import build_graph
from daemon.config.parameters import one_line_errors
from daemon.output import say


@click.group()
def graph() -> None:
    """Partitions of a dataset, and what they depend on.

    \b
    Example:
      cachefs graph build edges.npy parts.npy > graph.jsonl
    """


@graph.command()
@click.argument("edges", type=click.Path(path_type=Path))
@click.argument("node_map", metavar="MAP", type=click.Path(path_type=Path))
@click.option("--prefix", default="", metavar="PATH", help="Put before each partition's name: where they lie.")
@one_line_errors
def build(edges: Path, node_map: Path, prefix: str) -> None:
    """Count the edges between partitions, and print them as lines of JSON.

    EDGES: a .npy array of shape (E, 2), or text with two node numbers a line. MAP: a .npy array with the number of each
    node's partition, or text with its name, a line for each node.

    \b
    Example:
      cachefs graph build edges.npy parts.npy --prefix features/part- > graph.jsonl
      cachefs mount /ceph/papers /data/papers --read-only --prefetch-graph graph.jsonl
    """
    for line in build_graph(edges, node_map, prefix):
        say(line)
