import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.admission import Capacity
from policies.globs import Globs, InvalidGlob


@given(st.lists(st.integers(1, 1000), max_size=50), st.integers(0, 10_000))
def test_no_replacement_never_exceeds_its_capacity_and_wastes_no_room_for_what_fits(
    sizes: list[int], capacity: int
) -> None:
    policy = Capacity(capacity)
    used = 0
    for size in sizes:
        admitted = policy.admits(size, used)
        assert admitted == (used + size <= capacity)
        used += size if admitted else 0
    assert used <= capacity


@pytest.mark.promise("EX-1")
@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*.log", ["a.log", "x/y/b.log", "x.log/inside"], ["a.logs", "log", "a.log2"]),
        ("runs/**", ["runs/a", "runs/a/b/c"], ["runs", "other/runs/a"]),
        ("runs", ["runs", "a/runs", "runs/a/b"], ["runs2", "a/xruns"]),
        ("/top", ["top", "top/x"], ["a/top"]),
        ("a/*/c", ["a/b/c", "a/b/c/d"], ["a/c", "a/b/b/c"]),
        ("a/**/c", ["a/c", "a/b/c", "a/b/b/c"], ["c", "a/b"]),
        ("**/tmp", ["tmp", "a/tmp", "a/b/tmp/x"], ["tmpx"]),
        ("f[0-9]?", ["f1x", "d/f9_"], ["fa1", "f1"]),
        ("f[!a]", ["fb"], ["fa", "f/"]),
        ("a+b (c)", ["a+b (c)"], ["aab c"]),
        ("[", ["["], ["x"]),
        ("line\nfeed", ["line\nfeed"], ["line"]),
    ],
)
def test_globs(pattern: str, yes: list[str], no: list[str]) -> None:
    globs = Globs([pattern])
    assert [path for path in yes if not globs.matches(path.encode())] == []
    assert [path for path in no if globs.matches(path.encode())] == []


@pytest.mark.promise("EX-1")
@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("runs/**", ["runs", "runs/1", "runs/1/2"], ["run", "out", "out/runs"]),
        ("*.log", ["a.log", "x/b.log", "a.log/x"], ["a", "x/b"]),
        ("a/*/c/d", ["a", "a/b", "a/b/c", "a/b/c/d"], ["b", "a/b/d", "a/b/c/e"]),
        ("a/**/c", ["a", "a/x", "a/x/y"], ["b", "b/a"]),
        ("/x", ["x"], ["y", "y/x"]),
        ("**/x", ["a", "a/b"], []),
    ],
)
def test_globs_know_beneath_which_directories_names_match(pattern: str, yes: list[str], no: list[str]) -> None:
    globs = Globs([pattern])
    assert [path for path in yes if not globs.reach_beneath(path.encode())] == []
    assert [path for path in no if globs.reach_beneath(path.encode())] == []


@pytest.mark.promise("EX-1")
@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("runs/**", ["runs", "runs/1", "runs/1/2"], ["", "run", "out/runs"]),
        ("*.log", ["", "a", "a/b"], []),
        ("a/*/c", ["a/b", "a/b/c", "a/b/c/d"], ["", "a", "b/c", "a/b/d"]),
        ("a/**/c", ["a", "a/b", "a/b/b"], ["", "b", "b/a"]),
        ("/x", ["", "x", "x/y"], ["y"]),
        ("**/x", ["", "a", "a/b"], []),
        ("**", ["", "a"], []),
    ],
)
def test_globs_know_in_which_directories_a_name_may_match(pattern: str, yes: list[str], no: list[str]) -> None:
    globs = Globs([pattern])
    assert [path for path in yes if not globs.match_within(path.encode())] == []
    assert [path for path in no if globs.match_within(path.encode())] == []


@pytest.mark.parametrize("pattern", ["", "/", "../x", "a/../b", "./a", "[z-a]"])
def test_patterns_that_can_match_nothing_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidGlob):
        Globs([pattern])


def test_names_that_are_not_utf8() -> None:
    assert Globs(["*.log"]).matches(b"\xff\xfe.log")
    assert not Globs([])
