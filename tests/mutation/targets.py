"""Which modules are mutated, and which tests run."""

TARGETS: dict[str, frozenset[str]] = {
    path: frozenset(left_out.split())
    for path, left_out in {
        "cachefs/age.py": "",
        "cachefs/attributes.py": "",
        "cachefs/belief.py": "",
        "cachefs/blob.py": "",
        "cachefs/data_cache.py": (
            "admits _has_room _fits skipped resize capacity_bytes lasting_bytes "
            "_reserve_bytes admission_bytes used_bytes accessed expected make_room _beyond"
        ),
        "cachefs/dirty.py": "",
        "cachefs/extents.py": "",
        "cachefs/fetch.py": "_follow _read_ahead",
        "cachefs/identity.py": "",
        "cachefs/index.py": "",
        "cachefs/listings.py": "",
        "cachefs/metadata_cache.py": "",
        "cachefs/mutable_names.py": "",
        "cachefs/open_files.py": "",
        "cachefs/permissions.py": "",
        "cachefs/record.py": "",
        "cachefs/recovery.py": "",
        "cachefs/runs.py": "",
        "cachefs/source_directories.py": "",
        "cachefs/write_behind.py": "resize used_bytes stored_bytes may_have_room_soon hurry wake is_idle",
        "cachefs/young_files.py": "",
        "cachefs/fastpath/age.h": "",
        "cachefs/fastpath/answer.c": "serve_init",
        "cachefs/fastpath/append.c": "settle_locked has_room_locked",
        "cachefs/fastpath/blob.c": "",
        "cachefs/fastpath/fetching.c": (
            "fill_hold fill_stuck fill_is_stuck most_held fill_admits has_room "
            "fill_for_wishes begin_wish fulfil settled tell_again fill_wish"
        ),
        "cachefs/fastpath/fill.c": "",
        "cachefs/fastpath/fill_table.c": "find_owner queue_pop_fair",
        "cachefs/fastpath/index.c": "",
        "cachefs/fastpath/listing.c": "",
        "cachefs/fastpath/reading.c": "log_access",
        "cachefs/fastpath/record.c": "",
        "cachefs/fastpath/serve.c": "takes_time in_crowd next_request give_turn take_turn",
        "cachefs/fastpath/source.c": "simulate_latency go_direct",
        "cachefs/fastpath/window.c": "at_most share_of_run share_of_start",
    }.items()
}
"""The functions of each module that are left out: they decide when something is fetched or stored, how fast, or whether
there is room for it. No byte that a reader gets depends on them; tests of their own and benchmarks look at them."""

_MOUNT = [
    f"tests/mount/test_{name}.py"
    for name in [
        *["semantics", "fastpath", "damage", "places", "contents", "identity", "permissions", "listings", "age"],
        *["large_files", "mutable_names", "posix", "own_changes", "comparisons", "credentials", "writing_rights"],
        *["hazards", "numbers", "moved", "clock", "fastpath_hazards", "snapshot", "epochs", "first_epoch"],
        *["fetching_ahead", "full_runtime", "metrics", "retention", "durability", "faults", "closed_above"],
        *["overtaken", "swapped", "source_connection", "space", "many_names", "depth", "hand_over"],
    ]
]
Runs = list[tuple[list[str], list[str]]]
RUNS: Runs = [
    (
        ["tests/cachefs", "tests/agreement", "tests/policies", "tests/model/test_finds.py", "tests/model/test_node.py"],
        ["--timeout-method", "thread"],  # what loops in the library hears of no signal
    ),
    (_MOUNT, []),
    (_MOUNT, ["--no-fastpath"]),
]
"""Files and options, in the order in which they run; the last one where there are mutants in Python."""
