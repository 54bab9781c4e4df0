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
@click.option("--suffix", default="", show_default=False, metavar="TEXT", help="Append TEXT to each partition's name.")
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Fail if the path of a partition matches no file beneath DIR, the root of the dataset.",
)
def build(edges: Path, node_map: Path, prefix: str, suffix: str, root: Path | None) -> None:
    """Count the edges between partitions, and print the dependencies as lines of JSON.

    EDGES is a .npy array of shape (E, 2) or (2, E), an .npz archive of one such array, or text with two node numbers
    per line. MAP has the partition of each node: an array of numbers, or text with one name per line. The path of a
    partition, relative to the root of the dataset, is --prefix, its number or name, and --suffix.

    \b
    Example:
      cachefs graph build edges.npy parts.npy --prefix parts/part- --suffix .pt --root /ceph/papers > graph.jsonl
      cachefs mount /ceph/papers /data/papers --read-only --prefetch-graph graph.jsonl
    """
    from cachefs.tools.partition_graph import build_graph  # numpy is slow to load

    for line in build_graph(edges, node_map, prefix, suffix, root):
        say(line)
