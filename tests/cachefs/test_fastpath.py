"""The fast path's structs against Python's, and what needs no mount."""

import json
import mmap
import multiprocessing
import os
import struct
import subprocess
from typing import Any

import pytest

from cachefs import attributes, latency
from cachefs.attributes import Dentry, Extent, Inode
from cachefs.blob import SLAB_BYTES
from cachefs.fastpath import in_doubt, launcher, shared
from cachefs.options import CacheLevel, Options
from cachefs.shares import UNKNOWN
from policies.globs import Globs

built = pytest.mark.skipif(not launcher.is_built(), reason="the fast path is not built")


@pytest.fixture(scope="module")
def layout() -> tuple[dict[tuple[str, str], tuple[int, int]], dict[str, int]]:
    """(struct, field) → (offset, size) as the C compiler laid it out; sizes of the whole."""
    *fields, sizes = json.loads(subprocess.check_output([launcher.PROGRAM, "--layout"]))
    return {(f["struct"], f["field"]): (f["offset"], f["size"]) for f in fields}, sizes


def _differing_byte(pack: bytes, other: bytes) -> int:
    return next(i for i, (a, b) in enumerate(zip(pack, other, strict=True)) if a != b)


@built
@pytest.mark.parametrize(
    ("name", "zero", "fields"),
    [
        ("inode_record", Inode(*[0] * 22), [f for f in Inode._fields if f != "number"]),
        ("dentry_record", Dentry(*[0] * 4), Dentry._fields),
        ("extent_record", Extent(0, 0, 0, 0, 0, ()), [f for f in Extent._fields if f != "checksums"]),
    ],
)
def test_records_lie_in_c_where_python_packs_them(layout, name, zero, fields) -> None:  # type: ignore[no-untyped-def]
    by_field, _ = layout
    known = {field for struct_name, field in by_field if struct_name == name}
    assert known == set(fields)
    for field in fields:
        assert _differing_byte(zero._replace(**{field: 1}).pack(), zero.pack()) == by_field[name, field][0], field


@built
def test_the_shared_memory_has_one_layout(layout) -> None:  # type: ignore[no-untyped-def]
    by_field, sizes = layout
    for field, (offset, code) in shared.FIELDS.items():
        if field.startswith("young_"):
            continue
        assert by_field["shared", field] == (offset, struct.calcsize(code)), field
    assert by_field["shared", "passed"] == (shared.PASSED_OFFSET, 8 * shared.OPERATIONS)
    assert by_field["shared", "counters"][0] == shared.COUNTERS_OFFSET
    histograms = shared.LATENCY_COPIES * len(latency.KINDS) * (1 + latency.BUCKETS)
    assert by_field["shared", "latencies"] == (shared.LATENCIES_OFFSET, 8 * histograms)
    assert by_field["shared", "slots"] == (shared.SLOTS_OFFSET, shared.SLOT_HEAD_BYTES * shared.SLOT_COUNT)
    assert by_field["slot_head", "word"] == (0, 8)
    assert by_field["shared", "young"] == (shared.YOUNG_OFFSET, 16 * (1 + shared.YOUNG_ENTRIES))
    assert sizes == {
        "shared_bytes": shared.SHARED_BYTES,
        "counters": shared.COUNTER_BYTES,
        "threads": shared.MAX_THREADS,
        "slot": shared.SLOT_HEAD_BYTES,
        "head_bytes": shared.HEAD_BYTES,
        "slab": SLAB_BYTES,
    }


@built
def test_messages_have_one_layout(layout) -> None:  # type: ignore[no-untyped-def]
    by_field, _ = layout
    report = struct.pack("<6Q2I2Q", 1, 2, 3, 4, 5, 6, 7, 2, 8, 9)
    assert by_field["filled", "report"][0] == 0 and by_field["filled", "checksums"] == (52, 4)
    assert [*launcher.parse_filled(report * 2)] == [
        launcher.Filled(1, 2, 3, Extent(attributes.PINNED, 7, 5, 4, 6, (8, 9)))
    ] * 2
    assert by_field["control", "b"] == (16, 8)


@built
def test_the_program_says_so_when_it_is_started_by_hand() -> None:
    done = subprocess.run([launcher.PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "started by cachefs" in done.stderr


def test_a_request_is_found_by_its_handle_until_its_slot_has_another_generation() -> None:
    memory = shared.Shared.create()
    slot, generation = 2047, (7 << 47) + 5
    header = struct.pack("<2I2Q2I", 80, 15, 1, (1 << 62) + 3, 4321, 1)
    os.pwrite(memory.fd, header, shared.HEAD_BYTES + slot * shared.SLOT_BYTES)
    os.pwrite(memory.fd, struct.pack("<Q", generation << 8 & (1 << 64) - 1 | 4), shared.SLOTS_OFFSET + slot * 32)
    handle = 1 << 63 | 5 << 16 | slot
    assert memory.request_at(handle) == ((1 << 62) + 3, 4321)
    assert memory.request_at(handle - (1 << 16)) == (0, UNKNOWN)
    assert memory.request_at(handle - 1) == (0, UNKNOWN)
    assert memory.request_at((1 << 64) - 1) == (0, UNKNOWN)
    memory.close()


def test_shared_memory_of_another_version_is_refused() -> None:
    memory = shared.Shared.create()
    os.pwrite(memory.fd, struct.pack("<I", shared.VERSION + 1), 4)
    with pytest.raises(shared.OtherVersion):
        shared.Shared(memory.fd)
    memory.close()


def test_open_is_answered_enosys_only_where_nothing_is_mutable() -> None:
    """Hazard 3."""
    dataset = Options(read_only=True, attr_timeout_s=float("inf"))
    assert shared.mount_flags(dataset) & shared.NO_OPEN
    for other in (
        Options(),
        Options(read_only=True, attr_timeout_s=1.0),
        Options(read_only=True, attr_timeout_s=float("inf"), mutable=Globs(("*.log",))),
        Options(read_only=True, attr_timeout_s=float("inf"), cache=CacheLevel.NONE),
    ):
        assert not shared.mount_flags(other) & shared.NO_OPEN


@pytest.mark.parametrize(
    ("opcode", "body", "inodes", "entries"),
    [
        (10, b"gone\0", [7], [(7, b"gone")]),
        (9, bytes(8) + b"new\0", [7], [(7, b"new")]),
        (12, (9).to_bytes(8, "little") + b"old\0new\0", [7, 9], [(7, b"old"), (9, b"new")]),
        (45, (9).to_bytes(8, "little") + bytes(8) + b"old\0new\0", [7, 9], [(7, b"old"), (9, b"new")]),
        (13, (9).to_bytes(8, "little") + b"name\0", [7, 9], [(7, b"name")]),
        (35, bytes(16) + b"new\0", [7], [(7, b"new")]),
        (24, bytes(8), [7], []),
    ],
)
def test_what_a_change_in_doubt_may_have_touched(
    opcode: int, body: bytes, inodes: list[int], entries: list[tuple[int, bytes]]
) -> None:
    header = struct.pack("<2I2Q4I", 40 + len(body), opcode, 1, 7, 0, 0, 0, 0)
    assert in_doubt.touched(header + body) == (inodes, entries)


def look_at(fd: int, offset: int, results: Any) -> None:
    words = memoryview(mmap.mmap(fd, shared.COUNTERS_OFFSET)).cast("Q")
    results.put("looking")
    results.put({words[offset // 8] for _ in range(3_000_000)})


def test_shared_fields_are_written_whole() -> None:
    """Who reads while a value is written again finds it, not zeros: a capacity of 0 kept a file out of the cache."""
    memory = shared.Shared.create()
    value = 0x0102030405060708
    memory["capacity_bytes"] = value
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    other = fork.Process(target=look_at, args=(memory.fd, shared.FIELDS["capacity_bytes"][0], results))
    other.start()
    assert results.get(timeout=20) == "looking"
    while results.empty():
        for _ in range(1000):
            memory["capacity_bytes"] = value
    assert results.get(timeout=20) == {value}
    other.join(20)
    memory.close()
