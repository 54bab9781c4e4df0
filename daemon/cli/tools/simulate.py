"""`cachefs simulate`: replay a trace, or random epochs, through the policies, with caches of several sizes."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from cachefs.errors import CacheFsError
from cachefs.tools.trace import read_trace
from daemon.config.config import parse_size
from daemon.config.parameters import Parsed
from daemon.output import say
from policies import retention
from policies.order import BundleRandom
from policies.simulator import Outcome, Trace
from policies.simulator import simulate as replay

ORDERS: dict[str, Callable[[int, float], BundleRandom | range]] = {
    "random": lambda files, ratio: BundleRandom(files, bundle_ratio=1.0, alternate=False),
    "bundle-random": lambda files, ratio: BundleRandom(files, bundle_ratio=ratio),
    "sequential": lambda files, ratio: range(files),
}
FILES_PER_DIRECTORY = 1000
MAX_ACCESSES = 1 << 28


def _names(value: Any, known: tuple[str, ...]) -> tuple[str, ...]:
    """Names separated by commas."""
    names = tuple(name.strip() for name in str(value).split(","))
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is unknown; choose from {', '.join(known)}")
    return names


def _random_epochs(value: Any) -> tuple[int, int, int]:
    try:
        files, size, epochs = str(value).split(",")
        numbers = int(files), parse_size(size), int(epochs)
    except ValueError:
        raise ValueError(f"{value!r} is not FILES,SIZE,EPOCHS, such as 100000,50K,5") from None
    if min(numbers) < 1:
        raise ValueError("files, sizes and epochs must be at least 1")
    if numbers[0] * numbers[2] > MAX_ACCESSES:
        raise ValueError(f"more than {MAX_ACCESSES:,} accesses")
    return numbers


def _capacities(value: Any) -> tuple[float | int, ...]:
    """Fractions of the dataset (floats up to 1) or sizes (integers, bytes)."""
    found: list[float | int] = []
    for text in str(value).split(","):
        first, dots, last = text.strip().partition("..")
        try:
            if dots:
                steps = range(round(float(first) * 10), round(float(last) * 10) + 1)
                found += [step / 10 for step in steps]
            elif "." in first or first in ("0", "1"):
                found.append(float(first))
            else:
                found.append(parse_size(first))
        except ValueError:
            raise ValueError(f"{text!r} is not a fraction, a range like 0.1..1.0, or a size like 500G") from None
    if not found or any(size < 0 or (isinstance(size, float) and size > 1) for size in found):
        raise ValueError("fractions of the dataset must be between 0 and 1")
    return tuple(found)


@click.command()
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option(
    "--random",
    "random_epochs",
    type=Parsed("FILES,SIZE,EPOCHS", _random_epochs),
    help="Simulate random epochs over FILES files of SIZE, instead of a trace.",
)
@click.option(
    "--retention",
    "policies",
    type=Parsed("NAMES", partial(_names, known=retention.NAMES)),
    default="no-replacement,lru,opt",
    help=f"Compare these policies: {', '.join(retention.NAMES)}.",
)
@click.option(
    "--order",
    "orders",
    type=Parsed("NAMES", partial(_names, known=tuple(ORDERS))),
    default="random",
    help=f"Compare these orders, with --random: {', '.join(ORDERS)}.",
)
@click.option("--count-first-epoch", is_flag=True, help="Count the first epoch as well, with --random. It only misses.")
@click.option(
    "--bundle-ratio",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.1,
    help="Set the size of the bundles of bundle-random, as a fraction of the dataset.",
)
@click.option(
    "--cache",
    "capacities",
    type=Parsed("SIZES", _capacities),
    default="0.1..1.0",
    help="Simulate caches of these sizes: fractions of the dataset, or sizes like 500G.",
)
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Plot the hit ratios as PNG or SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def simulate(
    trace: Path | None,
    random_epochs: tuple[int, int, int] | None,
    policies: tuple[str, ...],
    orders: tuple[str, ...],
    count_first_epoch: bool,
    bundle_ratio: float,
    capacities: tuple[float | int, ...],
    plot: Path | None,
    as_json: bool,
) -> None:
    """Compute the hit ratios of caches. Replays TRACE, or random epochs, through the policies of a mount.

    With --random the first epoch only warms the cache, unless --count-first-epoch is given. All accesses of a trace
    count.

    \b
    Examples:
      cachefs simulate --random 100000,50K,5 --retention no-replacement,lru,opt --plot hits.svg
      cachefs simulate job.trace --cache 100G,200G,500G
    """
    if (trace is None) == (random_epochs is None):
        raise click.UsageError("give either TRACE or --random")
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise click.UsageError("--plot writes .png and .svg files: FILE must end in one of these")
    traces: dict[str, tuple[Trace, int]] = {}
    if trace is not None:
        read, whole = read_trace(trace)
        if not whole:
            say(f"cachefs: {trace} is truncated: using its first {len(read.accesses):,} accesses", err=True)
        traces[trace.name] = read, 0
    else:
        assert random_epochs is not None
        for order in orders:
            warming = 0 if count_first_epoch or random_epochs[2] == 1 else random_epochs[0]
            traces[order] = _epochs(order, *random_epochs, bundle_ratio), warming
    rows = []
    for name, (accesses, counted_from) in traces.items():
        for capacity in capacities:
            size = int(capacity * accesses.total_bytes) if isinstance(capacity, float) else capacity
            for policy in policies:
                outcome = replay(accesses, policy, size, counted_from=counted_from)
                rows.append((name, policy, size, accesses.total_bytes, outcome))
    if as_json:
        for row in rows:
            click.echo(json.dumps(_as_dict(*row)))
    else:
        from daemon.cli.display import print_simulation

        print_simulation(rows)
    if plot is not None:
        _draw(rows, plot)


def _epochs(order: str, files: int, size: int, epochs: int, ratio: float) -> Trace:
    drawn = ORDERS[order](files, ratio)
    accesses: list[int] = []
    for epoch in range(epochs):
        if isinstance(drawn, BundleRandom):
            drawn.set_epoch(epoch)
        accesses += drawn
    return Trace(accesses, [size] * files, [number // FILES_PER_DIRECTORY for number in range(files)])


def _as_dict(order: str, policy: str, size: int, total: int, outcome: Outcome) -> dict[str, Any]:
    return {
        "order": order,
        "retention": policy,
        "cache_bytes": size,
        "dataset_bytes": total,
        "hit_ratio": round(outcome.hit_ratio, 6),
        "byte_hit_ratio": round(outcome.byte_hit_ratio, 6),
        "hits": outcome.hits,
        "accesses": outcome.accesses,
    }


def _draw(rows: list[tuple[str, str, int, int, Outcome]], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CacheFsError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    hits, misses = figure.subplots(1, 2)
    first: dict[float, float] = {}
    for name, policy in dict.fromkeys((row[0], row[1]) for row in rows):
        points = [(size / total, o.hit_ratio) for n, p, size, total, o in rows if (n, p) == (name, policy)]
        first = first or {x: 1 - y for x, y in points}
        relative = [(x, (1 - y) / first[x]) for x, y in points if first[x]]
        for axes, drawn in ((hits, points), (misses, relative)):
            axes.plot(*zip(*drawn, strict=True), marker="o", markersize=3, label=f"{policy}, {name}")
    hits.set(xlabel="cache size / dataset size", ylabel="hit ratio", xlim=(0, None), ylim=(0, 1))
    misses.set(
        xlabel="cache size / dataset size", ylabel="misses / misses of the first policy", xlim=(0, None), ylim=(0, None)
    )
    for axes in (hits, misses):
        axes.grid(alpha=0.3)
    hits.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise CacheFsError(f"cannot write {path}: {error.strerror}") from error
