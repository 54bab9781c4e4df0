"""Which modules are mutated, and which tests are most likely to notice."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    quick: tuple[str, ...]
    """Test files, in the order in which they run."""
    left_out: frozenset[str] = frozenset()
    """Functions that decide when something is fetched or stored, how fast, or whether there is room for it. No byte
    that a reader gets depends on them; tests of their own and benchmarks look at them."""


def _tests(unit: str = "", mount: str = "", left_out: str = "") -> Target:
    """Names without `test_` and `.py`: of tests/cachefs or tests/model, and of tests/mount."""
    quick = [name if "/" in name else f"cachefs/{name}" for name in unit.split()]
    quick += [f"mount/{name}" for name in [*mount.split(), "semantics"]]
    paths = tuple(f"tests/{'/test_'.join(name.split('/'))}.py" for name in quick)
    return Target(paths, frozenset(left_out.split()))


TARGETS = {
    "cachefs/age.py": _tests("age model/node", "age"),
    "cachefs/attributes.py": _tests("index identity model/node", "posix"),
    "cachefs/belief.py": _tests("model/node identity", "identity moved"),
    "cachefs/blob.py": _tests("storage durability", "damage"),
    "cachefs/data_cache.py": _tests(
        "storage durability tasks space model/node",
        "retention damage",
        "admits _has_room _fits skipped resize capacity_bytes lasting_bytes _reserve_bytes admission_bytes used_bytes "
        "accessed expected make_room _beyond",
    ),
    "cachefs/dirty.py": _tests("commit_order durability"),
    "cachefs/extents.py": _tests("extents storage model/node", "large_files"),
    "cachefs/fetch.py": _tests("tasks model/node", "large_files contents age", "_follow _read_ahead"),
    "cachefs/identity.py": _tests("identity model/node", "identity"),
    "cachefs/index.py": _tests("index storage durability model/node", "damage"),
    "cachefs/listings.py": _tests("listings model/node", "listings"),
    "cachefs/metadata_cache.py": _tests("metadata_cache model/finds model/node", "identity listings hazards"),
    "cachefs/mutable_names.py": _tests("names model/node", "mutable_names"),
    "cachefs/open_files.py": _tests("tasks model/node", "contents comparisons own_changes mutable_names"),
    "cachefs/permissions.py": _tests("model/node", "permissions credentials"),
    "cachefs/record.py": _tests("storage", "damage"),
    "cachefs/recovery.py": _tests("storage runs durability model/node", "damage numbers"),
    "cachefs/runs.py": _tests("runs model/node", "numbers"),
    "cachefs/source_directories.py": _tests("source_directories identity model/node", "moved identity"),
    "cachefs/write_behind.py": _tests(
        "tasks durability storage model/node",
        "contents full_runtime",
        "resize used_bytes stored_bytes may_have_room_soon hurry wake is_idle",
    ),
    "cachefs/young_files.py": _tests("age tasks model/node", "age own_changes"),
    "cachefs/fastpath/age.h": _tests("fastpath", "age clock fastpath_hazards"),
    "cachefs/fastpath/answer.c": _tests("", "posix permissions identity", "serve_init"),
    "cachefs/fastpath/append.c": _tests("fastpath", "fastpath contents full_runtime"),
    "cachefs/fastpath/blob.c": _tests("", "damage fastpath"),
    "cachefs/fastpath/fetching.c": _tests(
        "",
        "fastpath_hazards contents first_epoch",
        "fill_hold fill_stuck fill_is_stuck most_held fill_admits has_room fill_for_wishes begin_wish fulfil settled "
        "tell_again fill_wish",
    ),
    "cachefs/fastpath/fill.c": _tests("", "fastpath contents age large_files"),
    "cachefs/fastpath/fill_table.c": _tests("", "fastpath fastpath_hazards contents", "find_owner queue_pop_fair"),
    "cachefs/fastpath/index.c": _tests("fastpath", "damage large_files numbers"),
    "cachefs/fastpath/listing.c": _tests("", "listings"),
    "cachefs/fastpath/reading.c": _tests("", "fastpath large_files damage", "log_access"),
    "cachefs/fastpath/record.c": _tests("", "damage fastpath"),
    "cachefs/fastpath/serve.c": _tests(
        "", "fastpath identity mutable_names", "takes_time in_crowd next_request give_turn take_turn"
    ),
    "cachefs/fastpath/source.c": _tests("", "identity age contents", "simulate_latency go_direct"),
    "cachefs/fastpath/window.c": _tests("", "large_files fetching_ahead", "at_most share_of_run share_of_start"),
}

WIDE = [
    f"tests/mount/test_{name}.py"
    for name in [
        *["semantics", "places", "posix", "own_changes", "comparisons", "contents", "credentials", "writing_rights"],
        *["hazards", "damage", "numbers", "identity", "age", "listings", "mutable_names", "permissions", "retention"],
        *["fastpath", "fastpath_hazards", "large_files", "moved", "snapshot", "epochs", "metrics", "faults"],
    ]
]
"""What a mutant meets that survived its own tests: with the fast path, then without it."""
