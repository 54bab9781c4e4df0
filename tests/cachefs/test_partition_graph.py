"""`cachefs graph build`: counted edges, whatever the files are like."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
from click.testing import CliRunner, Result

from cachefs.tools import partition_graph
from daemon.cli.main import main

NODES, EDGES, PARTITIONS = 1000, 20_000, 7


def build(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["graph", "build", *map(str, arguments)])


@pytest.mark.parametrize("block", [999, 40], ids=["few-partitions", "many-partitions"])
@pytest.mark.parametrize("kind", ["npy", "txt"])
def test_edges_are_counted_between_partitions(
    tmp_path: Path, kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_graph, "BLOCK_EDGES", block)
    monkeypatch.setattr(partition_graph, "BLOCK_BYTES", 5000)
    draw = numpy.random.default_rng(1)
    part_of = draw.integers(0, PARTITIONS, NODES)
    part_of[:PARTITIONS] = range(PARTITIONS)  # in text partitions are numbered as they come
    edges = draw.zipf(1.3, (EDGES, 2)) % NODES
    edges_path, map_path = tmp_path / f"edges.{kind}", tmp_path / f"map.{kind}"
    if kind == "npy":
        numpy.save(edges_path, edges)
        numpy.save(map_path, part_of)
    else:
        edges_path.write_text("".join(f"{a} {b}\n" for a, b in edges))
        map_path.write_text("".join(f"{part}\n" for part in part_of))
    expected = Counter((part_of[a], part_of[b]) for a, b in edges)
    done = build(edges_path, map_path, "--prefix", "parts/p")
    assert done.exit_code == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["partition"] for row in rows] == [f"parts/p{number}" for number in range(PARTITIONS)]
    for number, row in enumerate(rows):
        counted = {f"parts/p{a}": count for (a, b), count in expected.items() if b == number and a != number}
        assert row["depends"] == counted
        assert list(row["depends"].values()) == sorted(row["depends"].values(), reverse=True)


@pytest.mark.parametrize(
    ("edges", "node_map", "message"),
    [
        ("0 1\n1 5\n", "a\nb\n", "edges: node 5 is not in the map "),
        ("0 1\n1 5\n", "a\nb\n", "map, which has 2 nodes"),
        ("0 -1\n", "a\nb\n", "node -1 is not in the map"),
        ("0 1 1\n", "a\nb\n", "expected two numbers per line"),
        ("a b\n", "a\nb\n", "expected two numbers per line"),
        ("0 1\n", "", "expected the name of a partition"),
        (f"0 {2**63}\n", "a\nb\n", "of at most 64 bits"),
        (f"0 -{2**200}\n", "a\nb\n", "of at most 64 bits"),
        ("0 1\n", b"a\n\xff\n", "must be UTF-8"),
        (None, "a\n", "cannot read"),
        ("0 1\n", None, "cannot read"),
    ],
)
def test_bad_input_is_one_clear_line(
    tmp_path: Path, edges: str | None, node_map: str | bytes | None, message: str
) -> None:
    for name, content in (("edges", edges), ("map", node_map)):
        if content is not None:
            (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    assert_one_clear_line(build(tmp_path / "edges", tmp_path / "map"), message)


def assert_one_clear_line(done: Result, message: str) -> None:
    assert done.exit_code == 1 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert isinstance(done.exception, SystemExit)


@pytest.mark.parametrize(
    ("edges", "node_map", "message"),
    [
        (numpy.array([[0, 1]]), numpy.array([0, -1]), "expected non-negative integers"),
        (numpy.array([[0, 1]]), numpy.array([0, 2**40]), "partitions, more than"),
        (numpy.array([[0, 1]]), numpy.array([0, 2**64 - 1], dtype=numpy.uint64), "partitions, more than"),
        (numpy.array([[0, 2**64 - 1]], dtype=numpy.uint64), numpy.array([0, 1]), "is not in the map"),
        (numpy.array([[0, 1]]), numpy.array([], dtype=int), "expected non-negative integers"),
        (numpy.array([[0, 1]]), None, "is not a NumPy array"),
        (None, numpy.array([0, 1]), "is not a NumPy array"),
    ],
)
def test_bad_arrays_are_one_clear_line(
    tmp_path: Path,
    edges: "numpy.ndarray[Any, Any] | None",
    node_map: "numpy.ndarray[Any, Any] | None",
    message: str,
) -> None:
    """None: a file of no bytes."""
    for name, array in (("edges.npy", edges), ("map.npy", node_map)):
        if array is None:
            (tmp_path / name).write_bytes(b"")
        else:
            numpy.save(tmp_path / name, array)
    assert_one_clear_line(build(tmp_path / "edges.npy", tmp_path / "map.npy"), message)


def test_an_array_of_another_shape_is_refused(tmp_path: Path) -> None:
    numpy.save(tmp_path / "edges.npy", numpy.zeros((4, 3), dtype=int))
    numpy.save(tmp_path / "map.npy", numpy.zeros(4, dtype=int))
    done = build(tmp_path / "edges.npy", tmp_path / "map.npy")
    assert done.exit_code == 1 and "two for each edge" in done.stderr


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_edges_in_two_rows_are_counted_as_edges_in_two_columns(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_graph, "BLOCK_EDGES", 999)
    draw = numpy.random.default_rng(1)
    edges, part_of = draw.integers(0, NODES, (EDGES, 2)), draw.integers(0, PARTITIONS, NODES)
    save = numpy.save if kind == "npy" else numpy.savez
    for name, array in (("columns", edges), ("rows", edges.T), ("map", part_of)):
        save(tmp_path / name, array)
    columns, rows = (build(tmp_path / f"{name}.{kind}", tmp_path / f"map.{kind}") for name in ("columns", "rows"))
    assert columns.exit_code == rows.exit_code == 0, rows.stderr
    assert columns.stdout == rows.stdout and columns.stdout.count("\n") == PARTITIONS


@pytest.mark.parametrize("name", ["edges.pt", "map.pth"])
def test_a_file_of_torch_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    places = [tmp_path / ("edges.pt" if name == "edges.pt" else "edges"), tmp_path / name]
    for place in places:
        place.write_bytes(b"PK")
    done = build(*places)
    assert_one_clear_line(done, f"{tmp_path / name} is a file of torch")
    assert "numpy.save" in done.stderr


def test_an_archive_of_several_arrays_is_refused_with_what_to_do(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "edges.npz", a=numpy.zeros((3, 2), int), b=numpy.zeros(2))
    (tmp_path / "map").write_text("a\nb\n")
    assert_one_clear_line(
        build(tmp_path / "edges.npz", tmp_path / "map"), "edges.npz: expected one array, and not: a, b"
    )
    (tmp_path / "broken.npz").write_bytes(b"PK")
    assert_one_clear_line(build(tmp_path / "broken.npz", tmp_path / "map"), "broken.npz is not a NumPy array")


def test_paths_that_match_no_file_are_an_error_with_root(tmp_path: Path) -> None:
    (tmp_path / "root/parts").mkdir(parents=True)
    for number in range(3):
        (tmp_path / f"root/parts/part-{number}.pt").touch()
    (tmp_path / "edges").write_text("0 1\n1 2\n")
    (tmp_path / "map").write_text("0\n1\n2\n")
    given = tmp_path / "edges", tmp_path / "map", "--prefix", "parts/part-"
    assert build(*given).exit_code == 0
    checked = *given, "--root", tmp_path / "root"
    assert_one_clear_line(
        build(*checked), "3 of 3 partitions match no file, the first is 'parts/part-0'. Use --suffix .pt"
    )
    done = build(*checked, "--suffix", ".pt")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["partition"] == "parts/part-0.pt"
    assert build(*checked, "--suffix", ".*").exit_code == 0
    assert_one_clear_line(build(*checked, "--suffix", "[.]npy"), "3 of 3 partitions match no file")
    (tmp_path / "root/parts/part-1.pt").unlink()
    assert_one_clear_line(
        build(*checked, "--suffix", ".pt"), "1 of 3 partitions match no file, the first is 'parts/part-1.pt'"
    )


def test_no_edges_are_no_dependencies(tmp_path: Path) -> None:
    (tmp_path / "edges").write_text("")
    (tmp_path / "map").write_text("a\nb\n")
    done = build(tmp_path / "edges", tmp_path / "map")
    assert done.stdout == '{"partition": "a", "depends": {}}\n{"partition": "b", "depends": {}}\n'
