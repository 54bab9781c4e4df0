import time
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.admission import Capacity
from policies.globs import AllExcept, Globs, InvalidGlob


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


@pytest.mark.promise("EX-14")
@pytest.mark.parametrize(
    ("patterns", "immutable", "mutable"),
    [
        (["data/**"], ["data", "data/a", "data/a/b"], ["", "a", "other/data", "database"]),
        (["data"], ["data", "data/a", "x/data/b"], ["x", "database"]),
        (["a/b/**"], ["a", "a/b", "a/b/c"], ["a/c", "b"]),
        (["a/*/c"], ["a", "a/x/c", "a/x/c/d"], ["a/x", "a/x/d"]),
        (["*.jpg"], ["x.jpg", "a/b/x.jpg"], ["x", "a", "a/b"]),
        (["**/raw/**"], ["raw", "a/raw", "a/raw/x"], ["a", "a/b"]),
        (["data/**", "*.jpg"], ["data/x", "x.jpg"], ["x", "data/x.log", "x.log"]),
    ],
)
def test_all_paths_but_some_are_mutable(patterns: list[str], immutable: list[str], mutable: list[str]) -> None:
    globs = AllExcept(patterns, Globs(["*.log"]))
    assert globs
    assert [path for path in immutable if globs.matches(path.encode())] == []
    assert [path for path in mutable if not globs.matches(path.encode())] == []
    for path in mutable:
        directory = path.rpartition("/")[0].encode()
        assert globs.match_within(directory) and globs.reach_beneath(directory)


def test_other_patterns_are_recorded_as_others() -> None:
    recorded = {globs.patterns for globs in (Globs(["a"]), AllExcept(["a"], Globs([])), AllExcept(["a"], Globs(["a"])))}
    assert len(recorded) == 3


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


@cache
def component_matches(pattern: str, name: str) -> bool:
    """One that is slow and plain; classes are left out."""
    if not pattern:
        return not name
    if pattern[0] == "*":
        return component_matches(pattern[1:], name) or (bool(name) and component_matches(pattern, name[1:]))
    return bool(name) and pattern[0] in ("?", name[0]) and component_matches(pattern[1:], name[1:])


@cache
def leads_to(components: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Does the whole path match?"""
    if not components:
        return not path
    if components[0] == "**":
        return leads_to(components[1:], path) or (bool(path) and leads_to(components, path[1:]))
    return bool(path) and component_matches(components[0], path[0]) and leads_to(components[1:], path[1:])


def matches(pattern: str, path: str) -> bool:
    components = tuple(pattern.strip("/").split("/"))
    if "/" not in pattern.rstrip("/"):
        components = ("**", *components)
    if components[-1] == "**":
        components = (*components, "*")  # something beneath
    parts = tuple(path.split("/"))
    return any(leads_to(components, parts[:length]) for length in range(1, len(parts) + 1))


_parts = st.text("ab", min_size=1, max_size=4)
_patterns = st.lists(
    st.text("ab*?", min_size=1, max_size=5).filter(lambda text: "**" not in text) | st.just("**"),
    min_size=1,
    max_size=5,
)


@pytest.mark.promise("EX-1")
@given(components=_patterns, anchored=st.booleans(), parts=st.lists(_parts, min_size=1, max_size=6))
def test_globs_match_what_they_say(components: list[str], anchored: bool, parts: list[str]) -> None:
    pattern, path = "/" * anchored + "/".join(components), "/".join(parts)
    globs = Globs([pattern])
    assert globs.matches(path.encode()) == matches(pattern, path)
    if matches(pattern, path):
        directory = "/".join(parts[:-1]).encode()
        assert globs.match_within(directory)
        assert not anchored or not directory or globs.reach_beneath(directory)


@pytest.mark.promise("FA-4")
@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("*-*-*-*.log", "-" * 255),
        ("**/a/**/a/**/b", "a/" * 2000 + "a"),
        ("a/**/*-*-*-*x/**/*.log", "a/" + ("-" * 250 + "/") * 120),
        ("*?*?*?*?*?*?b", "a" * 255),
    ],
)
def test_a_near_miss_takes_no_longer_than_a_match(pattern: str, path: str) -> None:
    """Any user may ask for any name: with backtracking these took from half a second to minutes."""
    began = time.process_time()
    globs = Globs([pattern])
    assert not globs.matches(path.encode())
    globs.match_within(path.encode())
    globs.reach_beneath(path.encode())
    assert time.process_time() - began < 0.2


@pytest.mark.parametrize("pattern", ["", "/", "../x", "a/../b", "./a", "[z-a]"])
def test_patterns_that_can_match_nothing_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidGlob):
        Globs([pattern])


def test_names_that_are_not_utf8() -> None:
    assert Globs(["*.log"]).matches(b"\xff\xfe.log")
    assert not Globs([])
