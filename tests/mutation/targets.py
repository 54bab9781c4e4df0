"""Which modules are mutated, and which tests run."""

TARGETS: dict[str, frozenset[str]] = {
    path: frozenset(left_out.split())
    for path, left_out in {
        "cachefs/store/index/records.py": "",
        "cachefs/metadata/validity.py": "",
        "cachefs/store/blob/blob.py": "",
        "cachefs/data/commit.py": "",
        "cachefs/data/data_cache.py": (
            "admits fits skipped resize capacity_bytes lasting_bytes "
            "_reserve_bytes admission_bytes used_bytes accessed expected make_room _beyond"
        ),
        "cachefs/store/index/dirty.py": "",
        "cachefs/store/index/extents.py": "",
        "cachefs/data/fetcher.py": "_follow _read_ahead",
        "cachefs/data/shared_files.py": "",
        "cachefs/source/identity.py": "",
        "cachefs/store/index/index.py": "",
        "cachefs/metadata/listings.py": "",
        "cachefs/metadata/inode_cache.py": "",
        "cachefs/metadata/mutable_names.py": "",
        "cachefs/fs/descriptors.py": "",
        "cachefs/fs/handles.py": "",
        "cachefs/fs/immutability.py": "",
        "cachefs/fs/permissions.py": "",
        "cachefs/store/blob/record.py": "",
        "cachefs/store/recovery.py": "",
        "cachefs/store/runs.py": "",
        "cachefs/source/directories.py": "",
        "cachefs/data/write_behind.py": "resize used_bytes stored_bytes may_have_room_soon hurry wake is_idle",
        "cachefs/data/young_files.py": "",
        "cachefs/fastpath/c/cache/age.h": "",
        "cachefs/fastpath/c/hits/answer.c": "serve_init",
        "cachefs/fastpath/c/hits/attributes.c": "",
        "cachefs/fastpath/c/appender/append.c": "",
        "cachefs/fastpath/c/appender/fetch.c": "",
        "cachefs/fastpath/c/appender/space.c": "space_update_locked space_has_locked",
        "cachefs/fastpath/c/cache/blob.c": "",
        "cachefs/fastpath/c/misses/miss_threads.c": (
            "count_buffered_locked count_stuck_locked is_stuck_locked max_buffered_bytes may_cache_locked "
            "has_room_locked thread_for_prefetch_locked begin_prefetch prefetch report_again prefetch_requested"
        ),
        "cachefs/fastpath/c/misses/miss.c": "",
        "cachefs/fastpath/c/misses/fetch_table.c": "find_owner_locked queue_pop_fair_locked",
        "cachefs/fastpath/c/cache/index.c": "",
        "cachefs/fastpath/c/hits/listing.c": "",
        "cachefs/fastpath/c/hits/reading.c": "log_access",
        "cachefs/fastpath/c/appender/record.c": "",
        "cachefs/fastpath/c/serve/serve.c": "takes_time has_concurrent_readers next_request",
        "cachefs/fastpath/c/misses/source.c": "simulate_latency go_direct",
        "cachefs/fastpath/c/misses/window.c": "at_most share_locked",
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
        *["overtaken", "swapped", "source_connection", "space", "many_names", "depth", "hand_over", "fairness"],
    ]
]
_QUICK = [f"tests/{name}" for name in ("cachefs", "agreement", "fastpath", "policies")]
_QUICK += ["tests/model/test_finds.py", "tests/model/test_node.py"]
Runs = list[tuple[list[str], list[str]]]
RUNS: Runs = [
    (
        _QUICK,
        ["--timeout-method", "thread"],  # what loops in the library hears of no signal
    ),
    (_MOUNT, []),
    (_MOUNT, ["--no-fastpath"]),
]
"""Files and options, in the order in which they run; the last one where there are mutants in Python."""
