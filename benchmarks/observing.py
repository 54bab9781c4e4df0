"""The cost of monitoring: readers with and without `cachefs status` every two seconds and scrapes of metrics."""

import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import click
import psutil

from benchmarks.harness import Comparison, make_tree, mounted, read_files, report
from cachefs.client.client import Client

READERS = 4
FILES = 5_000
BOUND = 0.99
STATUS_S, SCRAPE_S = 2.0, 5.0
WINDOW_S = 5.0
fork = multiprocessing.get_context("fork")


def read_on(root: str, paths: list[str], seed: int, count: "Synchronized[int]") -> None:
    draw = random.Random(seed)
    while True:
        draw.shuffle(paths)
        for start in range(0, len(paths), 50):
            read_files(root, paths[start : start + 50])
            with count.get_lock():
                count.value += 50


def scrape(address: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(address))
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        while connection.recv(1 << 16):
            pass


def observe(client: Client, address: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    next_scrape = time.monotonic()
    while time.monotonic() < end:
        client.status()
        if time.monotonic() >= next_scrape:
            scrape(address)
            next_scrape += SCRAPE_S
        time.sleep(min(STATUS_S, max(0.0, end - time.monotonic())))


@click.command()
@click.option("--rounds", default=20, show_default=True)
def main(rounds: int) -> None:
    """A warm read-write mount: every open and close is a message to the fast path."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as work:
        base = Path(work)
        paths = make_tree(base / "source", 10, FILES // 10, (25_000, 75_000))
        address = base / "metrics.sock"
        with mounted(base / "source", base / "mnt", base / "cache", "--metrics", str(address)) as status:
            read_files(str(base / "mnt"), paths)
            daemon = psutil.Process(status()["pid"])
            client = Client(base / "mnt")
            count = fork.Value("q", 0)
            readers = [
                fork.Process(target=read_on, args=(str(base / "mnt"), list(paths), seed, count), daemon=True)
                for seed in range(READERS)
            ]
            for reader in readers:
                reader.start()
            compared = Comparison(f"{READERS} readers, looked at: not", BOUND)
            time.sleep(2)
            for number in range(rounds):
                rates = {}
                for looked_at in (True, False) if number % 2 else (False, True):
                    started, before = time.perf_counter(), count.value
                    if looked_at:
                        observe(client, address, WINDOW_S)
                    else:
                        time.sleep(WINDOW_S)
                    rates[looked_at] = (count.value - before) / (time.perf_counter() - started)
                compared.add(rates[True], rates[False])
            costs = []
            for _ in range(20):
                before_s = sum(daemon.cpu_times()[:2])
                for _ in range(20):
                    client.status()
                costs.append((sum(daemon.cpu_times()[:2]) - before_s) / 20)
            for reader in readers:
                reader.terminate()
                reader.join()
        holds = report("What it costs to look", [compared], "files/s")
        cost_s = statistics.median(costs)
        print(f"a status: {1e3 * cost_s:.1f} ms of the daemon's CPU, {100 * cost_s / STATUS_S:.2f} % of one core")
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()
