"""The memory that daemon and fast path share, as cachefs/contract/shared.py lays it out.

Each field has one writer, and is read and written whole: `struct` would do that byte by byte, and write zeros before.
"""

import mmap
import os
import struct
from collections import Counter
from dataclasses import dataclass, fields

from cachefs.contract.shared import (
    ACCESS_ENTRIES,
    ACCESS_LOGS,
    ACCESS_UNIT_BITS,
    COUNTERS,
    HEAD_BYTES,
    LATENCY_COPIES,
    MAGIC,
    MAX_THREADS,
    OPERATIONS,
    SETTLE_NS,
    SHARED,
    SHARED_BYTES,
    SLOT_BYTES,
    SLOT_COUNT,
    SLOT_HEAD,
    VERSION,
    YOUNG_ENTRIES,
    YOUNG_FILES,
    SharedFlag,
)
from cachefs.options import CacheLevel, Options
from cachefs.source.shares import UNKNOWN
from cachefs.stats.latency import BUCKETS, KINDS, Histogram
from cachefs.system.clock import NANOSECONDS

COUNTERS_OFFSET = SHARED.offset("counters")
ACCESSES_OFFSET = SHARED.offset("accesses")
SLOTS_OFFSET = SHARED.offset("slots")
LATENCIES_OFFSET = SHARED.offset("latencies")
YOUNG_OFFSET = SHARED.offset("young")
PASSED_OFFSET = SHARED.offset("passed")
_REQUEST = struct.Struct("<16xQI")  # struct fuse_in_header: nodeid, uid
_PLACE_MASK = (1 << 63) - 1
_LOG_WORDS = 8 + 2 * ACCESS_ENTRIES
_MARGIN = 256
"""So many of the oldest entries of a log may be overwritten while it is read."""

OPERATION_NAMES = {
    1: "lookup", 2: "forget", 3: "getattr", 4: "setattr", 5: "readlink", 6: "symlink", 8: "mknod", 9: "mkdir",
    10: "unlink", 11: "rmdir", 12: "rename", 13: "link", 14: "open", 15: "read", 16: "write", 17: "statfs",
    18: "release", 20: "fsync", 21: "setxattr", 22: "getxattr", 23: "listxattr", 24: "removexattr", 25: "flush",
    28: "readdir", 30: "fsyncdir", 35: "create", 42: "forget", 44: "readdir", 45: "rename",
}  # fmt: skip

FIELDS = {name: (each.offset, each.code) for name, each in SHARED.fields.items() if isinstance(each.type, str)}
"""Name → (byte offset, struct format). Of an array: of its first element."""
FIELDS["young_written"] = YOUNG_OFFSET + YOUNG_FILES.offset("written"), "Q"
FIELDS["young_taken"] = YOUNG_OFFSET + YOUNG_FILES.offset("taken"), "Q"


@dataclass(slots=True)
class Counters:
    """What all threads of the fast path have counted together."""

    hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    miss_bytes: int = 0
    answered: int = 0
    """Requests that the fast path answered."""
    failed: int = 0
    corrupt: int = 0
    """Reads that were passed on because the record was not what had been written."""
    source_opens: int = 0
    source_reads: int = 0
    source_fstats: int = 0
    skipped_admissions: int = 0
    source_timeouts: int = 0
    guesses: int = 0
    """Reads of the blob for a READ that is expected (ahead.h)."""
    guessed: int = 0
    """READs that found their bytes there."""
    prefetched: int = 0
    """Units that were fetched ahead because the daemon wished for them."""
    source_bytes: int = 0
    disk_bytes: int = 0
    """Of the replies that were hits: read from the local disk."""
    young_reads: int = 0


def mount_flags(options: Options) -> int:
    """What the fast path must know of how a mount was asked for. A mount keeps them for its life."""
    asked = {
        SharedFlag.PINS_EVERYTHING: options.pins_everything,
        SharedFlag.PINS_FILES: options.pins_files,
        SharedFlag.NO_OPEN: options.is_complete,
        SharedFlag.READ_ONLY: options.read_only,
        SharedFlag.KEEPS_DATA: options.cache is CacheLevel.FULL,
        SharedFlag.LOGS_ACCESSES: options.logs_accesses,
        SharedFlag.EVICTS: options.evicts,
        SharedFlag.READS_AHEAD: options.prefetch != "none",
        SharedFlag.EVICTS_AHEAD: options.evicts_ahead,
    }
    return sum(int(flag) for flag, is_on in asked.items() if is_on)


class OtherVersion(Exception):
    """Memory that another version of cachefs has laid out."""


class Shared:
    """The mapped memory. `shared["floor"] = 7` writes a field."""

    def __init__(self, fd: int) -> None:
        """Raises OtherVersion."""
        self.fd = fd
        try:
            self._map = mmap.mmap(fd, YOUNG_OFFSET + 16 + YOUNG_ENTRIES * 16)
        except ValueError:  # it is smaller than that
            raise OtherVersion from None
        with memoryview(self._map) as whole:
            self._words = {"I": whole.cast("I"), "Q": whole.cast("Q")}
        if (self["magic"], self["version"]) != (MAGIC, VERSION):
            self._unmap()
            raise OtherVersion

    @classmethod
    def create(cls, name: str = "cachefs") -> "Shared":
        """`name`: of the mount; it is to be seen in /proc/PID/fd."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, SHARED_BYTES)
        os.pwrite(fd, struct.pack("<4I", MAGIC, VERSION, SLOT_COUNT, SLOT_BYTES), 0)
        return cls(fd)

    def __getitem__(self, field: str) -> int:
        offset, code = FIELDS[field]
        words = self._words[code]
        return words[offset // words.itemsize]

    def __setitem__(self, field: str, value: int) -> None:
        offset, code = FIELDS[field]
        words = self._words[code]
        words[offset // words.itemsize] = value

    def configure(self, options: Options, *, seed: int, root_device: int, threads: int) -> None:
        """Write down how the mount was set up, before the fast path starts."""
        self["flags"] = mount_flags(options)
        self["threads"] = threads
        self["fetch_threads"] = options.fetch_threads
        self["seed"] = seed
        self["small_file_bytes"] = options.small_file_bytes
        self.set_timeouts(options)
        self["simulate_latency_ns"] = int(options.simulate_latency_s * NANOSECONDS)
        self["root_device"] = root_device
        self["settle_ns"] = options.settle_ns

    def was_set_up_for(self, options: Options) -> bool:
        """Is this what `configure` wrote down for the same options, as far as a mount keeps them for its life?"""
        settle_ns = self["settle_ns"] or SETTLE_NS  # a daemon that knew of no other
        return self["flags"] == mount_flags(options) and settle_ns == options.settle_ns

    def set_timeouts(self, options: Options) -> None:
        self["reconnect_timeout_ns"] = int(options.reconnect_timeout_s * NANOSECONDS)
        self["source_timeout_ns"] = int(options.source_timeout_s * NANOSECONDS)

    def hurry(self, within_s: float) -> None:
        """The mount ends: fetches that are older than this are answered ETIMEDOUT."""
        self["source_timeout_ns"] = min(self["source_timeout_ns"], int(within_s * NANOSECONDS))

    def counters(self) -> Counters:
        words = self._words["Q"][COUNTERS_OFFSET // 8 :][: MAX_THREADS * COUNTERS.size // 8].tolist()
        return Counters(*(sum(words[number :: COUNTERS.size // 8]) for number in range(len(fields(Counters)))))

    def latencies(self) -> dict[str, Histogram]:
        """Of requests that the fast path answered, from when it read them."""
        row = 1 + BUCKETS
        words = self._words["Q"][LATENCIES_OFFSET // 8 :][: LATENCY_COPIES * len(KINDS) * row].tolist()
        size = len(KINDS) * row
        copies = [words[start : start + size] for start in range(0, len(words), size)]
        together = list(map(sum, zip(*copies, strict=True)))
        return {kind: together[number * row : (number + 1) * row] for number, kind in enumerate(KINDS)}

    def passed(self) -> dict[str, int]:
        """How many requests were passed on to Python, by operation."""
        counts: Counter[str] = Counter()
        for code, count in enumerate(self._words["Q"][PASSED_OFFSET // 8 :][:OPERATIONS]):
            counts[OPERATION_NAMES.get(code, "other")] += count
        return dict(+counts)

    def request_at(self, handle: int) -> tuple[int, int]:
        """(inode, uid of the caller) of a request that was passed on with this handle (relay.c).

        (0, UNKNOWN): its answer will find nobody, because it was passed on again.
        """
        slot = handle & 0xFFFF
        if slot >= SLOT_COUNT:
            return 0, UNKNOWN
        word = self._words["Q"][(SLOTS_OFFSET + slot * SLOT_HEAD.size) // 8]
        if (word >> 8 << 16 | slot) & _PLACE_MASK != handle & _PLACE_MASK:
            return 0, UNKNOWN
        inode, uid = _REQUEST.unpack(os.pread(self.fd, _REQUEST.size, HEAD_BYTES + slot * SLOT_BYTES))
        return inode, uid

    def accesses(self, seen: list[int]) -> list[tuple[int, int]]:
        """(inode, number of the chunk) of READs since the last time, in order.

        `seen`: how many of each log were, and are now. What was overwritten before we came is lost.
        """
        words = self._words["Q"]
        found: list[tuple[int, int]] = []
        for number in range(ACCESS_LOGS):
            start = ACCESSES_OFFSET // 8 + number * _LOG_WORDS
            written = words[start]
            first, seen[number] = max(seen[number], written - ACCESS_ENTRIES + _MARGIN), written
            at, end = first % ACCESS_ENTRIES, written - first
            entries = words[start + 8 : start + _LOG_WORDS]
            part = entries[2 * at : 2 * (at + end)].tolist()
            part += entries[: 2 * (end - len(part) // 2)].tolist()
            found += zip(part[1::2], part[::2], strict=True)
        found.sort()
        return [(inode, when & (1 << ACCESS_UNIT_BITS) - 1) for when, inode in found]

    def young(self, seen: int) -> list[tuple[int, int]]:
        """(inode, when its pages are to be dropped) of reads of young files, but for the first `seen`."""
        entries = self._words["Q"][YOUNG_OFFSET // 8 + 2 :]
        places = (place % YOUNG_ENTRIES * 2 for place in range(seen, self["young_written"]))
        return [(entries[at], entries[at + 1]) for at in places]

    def _unmap(self) -> None:
        for words in self._words.values():
            words.release()
        self._map.close()

    def close(self) -> None:
        self._unmap()
        os.close(self.fd)
