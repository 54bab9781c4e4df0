"""A metadata snapshot of many entries: export, size, mount, first find."""

import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.harness import CACHEFS, mounted

FILES_A_DIRECTORY = 1000
EXPORT_S, BYTES_EACH, MOUNT_S = 20.0, 40.0, 5.0


def make_small_files(root: Path, files: int) -> None:
    """Files with names and sizes like those of ImageNet, and any content."""
    draw = random.Random(1)
    for _ in range(files // FILES_A_DIRECTORY):
        directory = root / f"n{draw.randrange(10**8):08}"
        directory.mkdir(parents=True)
        for number in draw.sample(range(10**5), FILES_A_DIRECTORY):
            with open(directory / f"{directory.name}_{number}.JPEG", "wb") as file:
                file.truncate(draw.randint(20_000, 220_000))
    time.sleep(2.1)


def timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


@click.command()
@click.option("--files", default=1_000_000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(files: int, rounds: int) -> None:
    """Exit with 1 if a bound does not hold."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as work:
        base = Path(work)
        make_small_files(base / "source", files)
        snapshot = base / "snapshot"
        exports, mounts = [], []
        with mounted(base / "source", base / "mnt", base / "first", "--read-only") as status:
            subprocess.run([*CACHEFS, "warmup", base / "mnt", "--metadata-only"], check=True)
            for _ in range(rounds):
                exports.append(
                    timed(lambda: subprocess.run([*CACHEFS, "snapshot", "export", base / "mnt", snapshot], check=True))
                )
            names = status()["pinned_inodes"]
        for number in range(rounds):
            context = mounted(
                base / "source",
                base / "mnt",
                base / f"new{number}",
                "--read-only",
                "--metadata-snapshot",
                str(snapshot),
            )
            started = time.perf_counter()
            with context as status:
                mounts.append(time.perf_counter() - started)
                found = subprocess.run(["find", base / "mnt", "-ls"], stdout=subprocess.PIPE, check=True).stdout
                calls = status()["source_ops"]
            if found.count(b"\n") != names:
                raise SystemExit(f"{len(found.splitlines())} of {names} were found")
        each = snapshot.stat().st_size / names
    rows = [
        ("export, s", f"{max(exports):.1f}", f"{EXPORT_S:g}", max(exports) <= EXPORT_S),
        ("bytes an entry", f"{each:.1f}", f"{BYTES_EACH:g}", each <= BYTES_EACH),
        ("mount with it, s", f"{max(mounts):.1f}", f"{MOUNT_S:g}", max(mounts) <= MOUNT_S),
        ("calls to the source, first find", str(sum(calls.values())), "0", not calls),
    ]
    table = Table(title=f"A snapshot of {names:,} entries, the worst of {rounds}", title_justify="left")
    for heading in ("", "got", "at most", "holds"):
        table.add_column(heading)
    for name, got, bound, holds in rows:
        table.add_row(name, got, bound, "yes" if holds else "NO")
    Console(width=100).print(table)
    raise SystemExit(0 if all(row[3] for row in rows) else 1)


if __name__ == "__main__":
    main()
