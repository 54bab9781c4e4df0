"""Prefetch policies: what they name, and what they refuse."""

import json

import pytest

from policies import prefetch
from policies.prefetch.base import Target
from policies.prefetch.dependency_graph import DependencyGraph, InvalidGraph, parse_graph


def graph(*partitions: tuple[str, object]) -> DependencyGraph:
    return DependencyGraph(parse_graph(json.dumps({"partition": name, "depends": d}) for name, d in partitions))


def paths(targets: tuple[Target, ...]) -> list[bytes]:
    return [target.path for target in targets]


@pytest.mark.parametrize("name", ["none", "sequential"])
def test_nothing_is_named_by_those_that_stay_within_files(name: str) -> None:
    policy = prefetch.make(name)
    assert not policy.started() and not policy.read(b"a/b")


def test_everything_is_everything_from_the_start() -> None:
    policy = prefetch.make("all")
    assert policy.started() == (Target(b"", recursive=True),)
    assert not policy.read(b"a/b")


def test_a_directory_is_named_once() -> None:
    policy = prefetch.make("directory")
    assert policy.read(b"a/b/c") == (Target(b"a/b"),)
    assert policy.read(b"a/b/d") == ()
    assert policy.read(b"top") == (Target(b""),)


def test_what_depends_on_a_partition_comes_after_it_most_connected_first() -> None:
    policy = graph(("p0", {"p2": 1}), ("p1", {"p0": 5}), ("p2", {"p0": 7, "p1": 2}), ("p3", {"p0": 6, "p3": 100}))
    assert paths(policy.read(b"p0/f")) == [b"p0", b"p2", b"p3", b"p1"]
    assert policy.read(b"p0/g") == ()
    assert paths(policy.read(b"p2/f")) == [b"p2"]  # p0 was read in this epoch
    assert policy.read(b"elsewhere/f") == ()
    assert paths(policy.read(b"p3/f")) == [b"p3"]
    assert paths(policy.read(b"p1/f")) == [b"p1"]
    assert paths(policy.read(b"p0/f")) == [b"p0", b"p2", b"p3", b"p1"]  # the next epoch


def test_a_partition_that_comes_again_is_opened_again() -> None:
    policy = graph(*((f"p{number}", []) for number in range(40)))
    for _ in range(2):
        for number in range(40):
            assert paths(policy.read(b"p%d/f" % number)) == [b"p%d" % number]


def test_partitions_are_paths_or_globs() -> None:
    policy = graph(("data/p1", []), ("data/p1/special", ["data/p1"]), ("data/shard-*.bin", []))
    assert policy.partition_of(b"data/p1/x/y") == "data/p1"
    assert policy.partition_of(b"data/p1/special/y") == "data/p1/special"
    assert policy.partition_of(b"data/shard-7.bin") == "data/shard-*.bin"
    assert policy.partition_of(b"other/data/p1/x") is None
    (target,) = policy.read(b"data/shard-7.bin")
    assert target.path == b"data" and target.globs is not None
    assert target.globs.matches(b"data/shard-8.bin") and not target.globs.matches(b"data/p1/x")


def test_cycles_are_fine() -> None:
    policy = graph(("a", ["b"]), ("b", ["a"]))
    assert paths(policy.read(b"a/f")) == [b"a", b"b"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no partitions"),
        (["", "  "], "no partitions"),
        (["{"], "line 1: expected"),
        (["[]"], "line 1: expected"),
        (['{"partition": 3}'], "line 1: expected"),
        (['{"partition": "a"}', '{"partition": "b", "depends": {"a": "many"}}'], "line 2: expected"),
        (['{"partition": "a"}', '{"partition": "a"}'], "line 2: 'a' occurs twice"),
        (['{"partition": "a", "depends": ["b"]}'], "'a' depends on 'b', which is not in the graph"),
        (['{"partition": "../*"}'], "beneath the mount"),
    ],
)
def test_a_graph_that_makes_no_sense_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(InvalidGraph, match=message.replace("(", "\\(")):
        DependencyGraph(parse_graph(lines))
