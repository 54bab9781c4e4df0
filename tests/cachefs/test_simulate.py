"""Traces, and the command that replays them."""

import json
import struct
import time
import tracemalloc
import zlib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from cachefs.errors import CacheFsError
from cachefs.tools.trace import BLOCK_ACCESSES, Access, TraceWriter, read_trace
from daemon.cli.main import main

ACCESSES = [Access(inode=number % 7, directory=number % 3, size_bytes=100 + number % 7) for number in range(100)]


def write(path: Path, accesses: list[Access], **limits: int) -> None:
    writer = TraceWriter(path, **limits)
    for access in accesses:
        writer.write(access)
    writer.close()


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)])


def test_a_trace_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / "t", ACCESSES)
    trace, whole = read_trace(tmp_path / "t")
    assert whole
    assert list(trace.accesses) == [number % 7 for number in range(100)]
    assert list(trace.sizes) == [100 + number for number in range(7)]
    assert list(trace.parts) == [number % 3 for number in range(7)]


def test_a_trace_rotates_and_keeps_the_newest(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", max_bytes=2000)
    for number in range(100):
        for inode in range(50):
            writer.write(Access(number * 50 + inode, 1, inode))
        writer.flush()
    writer.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2000
    trace, whole = read_trace(tmp_path / "t")
    assert whole and 50 < len(trace.accesses) < 5000
    assert list(trace.sizes)[-50:] == list(range(50))


def test_a_trace_that_is_written_over_an_older_one_is_a_trace_of_its_own(tmp_path: Path) -> None:
    for count in (100, 1):
        writer = TraceWriter(tmp_path / "t", max_bytes=2000)
        for number in range(count):
            for inode in range(50):
                writer.write(Access(number * 50 + inode, 1, inode))
            writer.flush()
        writer.close()
    trace, whole = read_trace(tmp_path / "t")
    assert whole and len(trace.accesses) == 50


def test_a_trace_that_expands_to_25_gb_is_refused(tmp_path: Path) -> None:
    block = zlib.compress(bytes(28 * BLOCK_ACCESSES), 9)
    count = 25 * 10**9 // (28 * BLOCK_ACCESSES)
    (tmp_path / "t").write_bytes(b"CFTRACE1" + (struct.pack("<2I", len(block), BLOCK_ACCESSES) + block) * count)
    assert (tmp_path / "t").stat().st_size < 30_000_000
    began = time.process_time()
    done = simulate(tmp_path / "t", "--cache", "10M")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1 and "too many" in done.stderr
    assert time.process_time() - began < 10, "nothing was unpacked"


@pytest.mark.parametrize("count", [900 * 10**6, 1])
def test_a_block_that_expands_to_more_than_it_says_is_damaged(tmp_path: Path, count: int) -> None:
    packer = zlib.compressobj(9)
    block = b"".join(packer.compress(bytes(1 << 20)) for _ in range(200)) + packer.flush()
    (tmp_path / "t").write_bytes(b"CFTRACE1" + struct.pack("<2I", len(block), count) + block)
    tracemalloc.start()
    with pytest.raises(CacheFsError):
        read_trace(tmp_path / "t")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 20 << 20


@given(st.data())
def test_a_trace_that_is_cut_off_or_damaged_gives_what_is_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t"
    writer = TraceWriter(path)
    for access in ACCESSES:
        writer.write(access)
        writer.flush()
    writer.close()
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    try:
        trace, _ = read_trace(path)
    except CacheFsError as error:
        assert "holds no accesses" in str(error) or "not a cachefs trace" in str(error)
        return
    assert list(trace.accesses) == [number % 7 for number in range(len(trace.accesses))]


def test_simulating_a_trace(tmp_path: Path) -> None:
    write(tmp_path / "t", ACCESSES)
    done = simulate(tmp_path / "t", "--json", "--cache", "1.0,10M", "--retention", "no-replacement,lru")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["hits"] for row in rows] == [93] * 4
    assert [row["cache_bytes"] for row in rows] == [721, 721, 10 << 20, 10 << 20]
    assert rows[0]["hit_ratio"] == 0.93


def test_a_truncated_trace_is_said_to_be_one(tmp_path: Path) -> None:
    write(tmp_path / "t", ACCESSES)
    content = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(content + content[8:40])
    done = simulate(tmp_path / "t")
    assert done.exit_code == 0 and "is truncated: using its first 100 accesses" in done.stderr


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_plot_is_drawn(tmp_path: Path, kind: str) -> None:
    plot = tmp_path / f"hits.{kind}"
    done = simulate("--random", "100,1K,3", "--order", "random,bundle-random,sequential", "--plot", plot)
    assert done.exit_code == 0 and "bundle-random" in done.stdout
    assert plot.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--random", "10,1K,2", "--retention", "mru"], "'mru' is unknown; choose from no-replacement, lru"),
        (["--random", "10,1K,2", "--order", "backwards"], "'backwards' is unknown"),
        (["--random", "10,1K"], "is not FILES,SIZE,EPOCHS"),
        (["--random", "10,1K,0"], "must be at least 1"),
        (["--random", "10,1K,2", "--cache", "1.5"], "between 0 and 1"),
        (["--random", "10,1K,2", "--cache", "some"], "is not a fraction"),
        (["--random", "10,1K,2", "--plot", "x.pdf"], ".png and .svg"),
        ([], "either TRACE or --random"),
        (["absent.trace"], "cannot read absent.trace: No such file"),
        (["README.md"], "is not a cachefs trace"),
    ],
)
def test_bad_input_gets_one_clear_line(arguments: list[str], message: str) -> None:
    done = simulate(*arguments)
    assert done.exit_code in (1, 2)
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_an_empty_trace_is_said_to_be_one(tmp_path: Path) -> None:
    write(tmp_path / "t", [])
    done = simulate(tmp_path / "t")
    assert done.exit_code == 1 and "holds no accesses" in done.stderr


def test_a_cache_of_nothing_hits_nothing() -> None:
    done = simulate("--random", "10,1K,3", "--cache", "0", "--json")
    assert {json.loads(line)["hits"] for line in done.stdout.splitlines()} == {0}
