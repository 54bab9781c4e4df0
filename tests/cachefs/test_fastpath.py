"""The fast path's structs against Python's, and what needs no mount."""

import mmap
import multiprocessing
import os
import struct
import subprocess
from typing import Any

import pytest

from cachefs.contract import shared as layout
from cachefs.contract.shared import SHARED_VERSION, SharedFlag
from cachefs.data.commit import Filled
from cachefs.fastpath import connection, in_doubt, processes, shared_memory
from cachefs.options import CacheLevel, Options
from cachefs.source.shares import UNKNOWN
from cachefs.store.index import records
from cachefs.store.index.records import Extent
from policies.globs import Globs

built = pytest.mark.skipif(not processes.is_built(), reason="the fast path is not built")


def test_a_report_of_units_is_parsed() -> None:
    report = struct.pack("<6Q2I2Q", 1, 2, 3, 4, 5, 6, 7, 2, 8, 9)
    extent = Extent(records.PINNED, 7, 5, 4, 6, (8, 9))
    assert [*connection.parse_filled(report * 2)] == [Filled(1, 2, 3, extent)] * 2


@built
def test_the_program_says_so_when_it_is_started_by_hand() -> None:
    done = subprocess.run([processes.PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "started by cachefs" in done.stderr


def test_a_request_is_found_by_its_handle_until_its_slot_has_another_generation() -> None:
    memory = shared_memory.Shared.create()
    slot, generation = 2047, (7 << 47) + 5
    header = struct.pack("<2I2Q2I", 80, 15, 1, (1 << 62) + 3, 4321, 1)
    os.pwrite(memory.fd, header, layout.HEAD_BYTES + slot * layout.SLOT_BYTES)
    os.pwrite(memory.fd, struct.pack("<Q", generation << 8 & (1 << 64) - 1 | 4), shared_memory.SLOTS_OFFSET + slot * 32)
    handle = 1 << 63 | 5 << 16 | slot
    assert memory.request_at(handle)[:2] == ((1 << 62) + 3, 4321)
    assert memory.request_at(handle - (1 << 16)) == (0, UNKNOWN, None)
    assert memory.request_at(handle - 1) == (0, UNKNOWN, None)
    assert memory.request_at((1 << 64) - 1) == (0, UNKNOWN, None)
    memory.close()


def test_shared_memory_of_another_version_is_refused() -> None:
    memory = shared_memory.Shared.create()
    os.pwrite(memory.fd, struct.pack("<I", SHARED_VERSION + 1), 4)
    with pytest.raises(shared_memory.OtherVersion):
        shared_memory.Shared(memory.fd)
    memory.close()


def test_open_is_answered_enosys_only_where_nothing_is_mutable() -> None:
    """Hazard 3."""
    dataset = Options(read_only=True, attr_timeout_s=float("inf"))
    assert shared_memory.mount_flags(dataset) & SharedFlag.NO_OPEN
    for other in (
        Options(),
        Options(read_only=True, attr_timeout_s=1.0),
        Options(read_only=True, attr_timeout_s=float("inf"), mutable=Globs(("*.log",))),
        Options(read_only=True, attr_timeout_s=float("inf"), cache=CacheLevel.NONE),
    ):
        assert not shared_memory.mount_flags(other) & SharedFlag.NO_OPEN


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
    words = memoryview(mmap.mmap(fd, shared_memory.COUNTERS_OFFSET)).cast("Q")
    results.put("looking")
    results.put({words[offset // 8] for _ in range(3_000_000)})


def test_shared_fields_are_written_whole() -> None:
    """Who reads while a value is written again finds it, not zeros: a capacity of 0 kept a file out of the cache."""
    memory = shared_memory.Shared.create()
    value = 0x0102030405060708
    memory["capacity_bytes"] = value
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    other = fork.Process(target=look_at, args=(memory.fd, shared_memory.FIELDS["capacity_bytes"][0], results))
    other.start()
    assert results.get(timeout=20) == "looking"
    while results.empty():
        for _ in range(1000):
            memory["capacity_bytes"] = value
    assert results.get(timeout=20) == {value}
    other.join(20)
    memory.close()
