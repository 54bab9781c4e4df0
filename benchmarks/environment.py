"""Starting Python from a virtual environment on a parallel filesystem: profiles of mounts, interleaved.

Each call to the source takes the latency. Between starts the kernel drops what it has cached of the mount, as on a node
that does other work meanwhile. "remounted" is the first start after an unmount and a mount with the same cache.
"""

import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import click

from benchmarks.harness import mounted
from cachefs.system import syscalls

MODES = {
    "--read-only": ["--read-only"],
    "--profile inference": ["--profile", "inference"],
    "--prefetch directory": ["--read-only", "--prefetch", "directory"],
}
RDONLY, NOSUID, NODEV, REMOUNT = 1, 2, 4, 32
STARTS = ("first", "again", "remounted")


def start(place: Path, statement: str) -> float:
    """Seconds that an interpreter of the environment takes, once the kernel has forgotten the mount."""
    syscalls.mount("", str(place), "", REMOUNT | RDONLY | NOSUID | NODEV)  # drops names, and pages with them
    began = time.perf_counter()
    subprocess.run([place / "bin/python", "-c", statement], check=True, env={}, cwd="/", stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def table(title: str, seconds: dict[tuple[str, str], list[float]], calls: dict[tuple[str, str], int]) -> None:
    print(title)
    for mode in MODES:
        parts = (
            f"{name} {statistics.median(seconds[mode, name]):.1f} s, {calls[mode, name]:,} calls" for name in STARTS
        )
        print(f"{mode:22} {'; '.join(parts)}", flush=True)


@click.command()
@click.argument("environment", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--statement", default="import torch", show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--latency", default=1.0, show_default=True, metavar="MS")
def main(environment: Path, statement: str, rounds: int, latency: float) -> None:
    """ENVIRONMENT: the directory of a virtual environment."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    calls: dict[tuple[str, str], int] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as work:
        for number in range(rounds):
            for mode, arguments in MODES.items():
                place, cache = Path(work, "mnt"), Path(work, f"cache-{number}-{len(calls)}-{mode.replace(' ', '')}")
                arguments = [*arguments, "--simulate-latency", str(latency)]
                for starts in (STARTS[:2], STARTS[2:]):
                    with mounted(environment.resolve(), place, cache, *arguments) as status:
                        for name in starts:
                            before = sum(status()["source_ops"].values())
                            seconds[mode, name].append(start(place, statement))
                            calls[mode, name] = sum(status()["source_ops"].values()) - before
            table(
                f"{statement!r}, {latency:g} ms for each call to the source, medians of {number + 1} rounds",
                seconds,
                calls,
            )


if __name__ == "__main__":
    main()
