"""The memory that daemon and fast path share, as cachefs/contract/shared.py lays it out.

Each field has one writer, and is read and written as one word. The `struct` module is not used for that, because it
writes byte by byte, and zeros first.
"""

import mmap
import os
import struct
from collections import Counter
from collections.abc import Mapping

from cachefs.contract import shared as layout
from cachefs.contract.fuse import FUSE_OPERATIONS, IN_HEADER
from cachefs.contract.shared import ACCESS_ENTRIES, COUNTERS, SHARED, SLOT_COUNT, YOUNG_ENTRIES, SharedFlag, SourceFlag
from cachefs.options import CacheLevel, Options
from cachefs.source.credentials import Caller
from cachefs.source.shares import UNKNOWN
from cachefs.stats.latency import BUCKETS, KINDS, Histogram
from cachefs.store.filesystem import has_late_pages, is_coherent, is_in_snapshot, kind_of, numbers_stay
from cachefs.system.clock import NANOSECONDS

COUNTERS_OFFSET = SHARED.offset("counters")
ACCESSES_OFFSET = SHARED.offset("accesses")
SLOTS_OFFSET = SHARED.offset("slots")
YOUNG_OFFSET = SHARED.offset("young")
_REQUEST = IN_HEADER.codec()
_PLACE_MASK = (1 << 63) - 1
_SLOT_WORDS = layout.SLOT_HEAD.size // 8
_LOG_WORDS = 8 + 2 * ACCESS_ENTRIES
_MARGIN = 256
"""The fast path may overwrite so many of the oldest entries of a log while it is read."""

_READ = next(each.number for each in FUSE_OPERATIONS if each.name == "READ")
_COUNTED_AS = {each.number: each.counted_as for each in FUSE_OPERATIONS}

FIELDS = {name: (each.offset, each.code) for name, each in SHARED.fields.items() if isinstance(each.type, str)}
"""Name → (byte offset, struct format). Of an array: of its first element."""
for _name in ("written", "taken"):
    FIELDS[f"young_{_name}"] = YOUNG_OFFSET + layout.YOUNG_FILES.offset(_name), "Q"


def mount_flags(options: Options) -> int:
    """The options that the fast path must know and that stay the same as long as the mount lives."""
    asked = {
        SharedFlag.PINS_EVERYTHING: options.pins_everything,
        SharedFlag.PINS_FILES: options.pins_files,
        SharedFlag.NO_OPEN: options.is_complete,
        SharedFlag.READ_ONLY: options.read_only,
        SharedFlag.KEEPS_DATA: options.cache is CacheLevel.FULL,
        SharedFlag.LOGS_ACCESSES: options.logs_accesses,
        SharedFlag.EVICTS: options.evicts,
        SharedFlag.READS_AHEAD: options.prefetch != "none",
        SharedFlag.EVICTS_FOR_PREFETCH: options.evicts_ahead,
    }
    return _sum(asked)


def _sum(asked: Mapping[SharedFlag, bool] | Mapping[SourceFlag, bool]) -> int:
    return sum(int(flag) for flag, is_on in asked.items() if is_on)


class OtherVersion(Exception):
    """The memory has the layout of another version of cachefs."""


class Shared:
    """The mapped memory. `shared["floor"] = 7` writes a field."""

    def __init__(self, fd: int) -> None:
        """Raises OtherVersion."""
        self.fd = fd
        try:
            self._map = mmap.mmap(fd, YOUNG_OFFSET + 16 + YOUNG_ENTRIES * 16)
        except ValueError:  # it is smaller
            raise OtherVersion from None
        with memoryview(self._map) as whole:
            self._words = {"I": whole.cast("I"), "Q": whole.cast("Q")}
        if (self["magic"], self["version"]) != (layout.SHARED_MAGIC, layout.SHARED_VERSION):
            self._unmap()
            raise OtherVersion
        if os.fstat(fd).st_size < layout.SHARED_BYTES:  # of an earlier version
            os.ftruncate(fd, layout.SHARED_BYTES)
        self._volumes = mmap.mmap(fd, layout.VOLUMES.size, offset=layout.VOLUMES_OFFSET)

    @classmethod
    def create(cls, name: str = "cachefs") -> "Shared":
        """`name`: of the mount; visible in /proc/PID/fd."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, layout.SHARED_BYTES)
        os.pwrite(fd, struct.pack("<4I", layout.SHARED_MAGIC, layout.SHARED_VERSION, SLOT_COUNT, layout.SLOT_BYTES), 0)
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
        """Store how the mount is set up, before the fast path starts."""
        self["flags"] = mount_flags(options)
        self["threads"] = threads
        self["fetch_threads"] = options.fetch_threads
        self["seed"] = seed
        self["small_file_bytes"] = options.small_file_bytes
        self.set_timeouts(options)
        self["simulate_latency_ns"] = int(options.simulate_latency_s * NANOSECONDS)
        self["root_device"] = root_device
        self["settle_ns"] = options.settle_ns

    def set_source(self, fstype: str, root_inode: int) -> None:
        """Store what must be known of the source. `fstype`: as in the mount table. `root_inode`: of the source."""
        asked = {
            SourceFlag.SOURCE_INCOHERENT: not is_coherent(fstype),
            SourceFlag.SOURCE_PAGES_ARE_LATE: has_late_pages(fstype),
            SourceFlag.SOURCE_BY_PATH: kind_of(fstype).follows_paths and numbers_stay(fstype),
            SourceFlag.SOURCE_IS_SNAPSHOT: is_in_snapshot(fstype, root_inode),
        }
        self["source_flags"] = _sum(asked)

    def set_volume(self, mount: int, device: int, number: int) -> None:
        """Store the volume of a place (source/volumes.py). One of too many is left out: Python serves its files."""
        with memoryview(self._volumes) as whole, whole.cast("Q") as words:
            count = words[0]
            at = next((at for at in range(1, 1 + 3 * count, 3) if (words[at], words[at + 1]) == (mount, device)), None)
            if at is not None:
                words[at + 2] = number
            elif count < layout.MAX_VOLUMES:
                at = 1 + 3 * count
                words[at], words[at + 1], words[at + 2] = mount, device, number
                words[0] = count + 1

    def was_set_up_for(self, options: Options) -> bool:
        """Does this match what `configure` stores for these options, as far as a mount cannot change them?"""
        settle_ns = self["settle_ns"] or layout.SETTLE_NS  # 0: of an older daemon, which had no other
        return self["flags"] == mount_flags(options) and settle_ns == options.settle_ns

    def set_timeouts(self, options: Options) -> None:
        self["reconnect_timeout_ns"] = int(options.reconnect_timeout_s * NANOSECONDS)
        self["source_timeout_ns"] = int(options.source_timeout_s * NANOSECONDS)

    def hurry(self, within_s: float) -> None:
        """The mount ends: reduce the timeout of fetches."""
        self["source_timeout_ns"] = min(self["source_timeout_ns"], int(within_s * NANOSECONDS))

    def counters(self) -> dict[str, int]:
        """The fields of COUNTERS, each summed over all threads."""
        row = COUNTERS.size // 8
        words = self._words["Q"][COUNTERS_OFFSET // 8 :][: layout.MAX_THREADS * row].tolist()
        names = (name for name in COUNTERS.fields if name != "reserved")
        return {name: sum(words[COUNTERS.offset(name) // 8 :: row]) for name in names}

    def latencies(self) -> dict[str, Histogram]:
        """Of requests that the fast path answered, from when it read them."""
        row = 1 + BUCKETS
        words = self._words["Q"][SHARED.offset("latencies") // 8 :][: layout.LATENCY_COPIES * len(KINDS) * row].tolist()
        size = len(KINDS) * row
        copies = [words[start : start + size] for start in range(0, len(words), size)]
        together = list(map(sum, zip(*copies, strict=True)))
        return {kind: together[number * row : (number + 1) * row] for number, kind in enumerate(KINDS)}

    def passed(self) -> dict[str, int]:
        """The number of requests that were passed on to Python, by operation."""
        counts: Counter[str] = Counter()
        for opcode, count in enumerate(self._words["Q"][SHARED.offset("passed") // 8 :][: layout.OPERATIONS]):
            counts[_COUNTED_AS.get(opcode, "other")] += count
        return dict(+counts)

    def request_at(self, handle: int) -> tuple[int, int, Caller | None]:
        """(inode, uid of the caller, caller) of a request that was passed on with this handle (relay.c).

        (0, UNKNOWN, None): the request was passed on again, so that nothing waits for this answer.
        """
        slot = handle & 0xFFFF
        if slot >= SLOT_COUNT:
            return 0, UNKNOWN, None
        word = self._words["Q"][(SLOTS_OFFSET + slot * layout.SLOT_HEAD.size) // 8]
        if (word >> 8 << 16 | slot) & _PLACE_MASK != handle & _PLACE_MASK:
            return 0, UNKNOWN, None
        _, _, _, inode, uid, gid, pid, *_ = self._request(slot)
        return inode, uid, Caller(uid, gid, pid)

    def served_now(self) -> set[tuple[int, int]]:
        """(slot, the kernel's number) of the requests that threads of the fast path are serving; READs may last."""
        heads = self._words["Q"][SLOTS_OFFSET // 8 :][: SLOT_COUNT * _SLOT_WORDS]
        served = zip(range(SLOT_COUNT), heads[::_SLOT_WORDS].tolist(), heads[1::_SLOT_WORDS].tolist(), strict=True)
        return {
            (slot, unique)
            for slot, word, unique in served
            if word & 0xFF == layout.SlotState.SLOT_READING and unique and self._request(slot)[1] != _READ
        }

    def _request(self, slot: int) -> tuple[int, ...]:
        """The fields of the header of a request."""
        return _REQUEST.unpack(os.pread(self.fd, _REQUEST.size, layout.HEAD_BYTES + slot * layout.SLOT_BYTES))

    def accesses(self, seen: list[int]) -> list[tuple[int, int]]:
        """(inode, number of the chunk) of READs since the last time, in order.

        `seen`: for each log the number of entries that were read; updated. Entries that were overwritten are lost.
        """
        words = self._words["Q"]
        found: list[tuple[int, int]] = []
        for number in range(layout.ACCESS_LOGS):
            start = ACCESSES_OFFSET // 8 + number * _LOG_WORDS
            written = words[start]
            first, seen[number] = max(seen[number], written - ACCESS_ENTRIES + _MARGIN), written
            at, end = first % ACCESS_ENTRIES, written - first
            entries = words[start + 8 : start + _LOG_WORDS]
            part = entries[2 * at : 2 * (at + end)].tolist()
            part += entries[: 2 * (end - len(part) // 2)].tolist()
            found += zip(part[1::2], part[::2], strict=True)
        found.sort()
        return [(inode, when & (1 << layout.ACCESS_UNIT_BITS) - 1) for when, inode in found]

    def young(self, seen: int) -> list[tuple[int, int]]:
        """(inode, when its pages are to be dropped) of reads of young files, except for the first `seen`."""
        entries = self._words["Q"][YOUNG_OFFSET // 8 + 2 :]
        places = (place % YOUNG_ENTRIES * 2 for place in range(seen, self["young_written"]))
        return [(entries[at], entries[at + 1]) for at in places]

    def _unmap(self) -> None:
        for words in self._words.values():
            words.release()
        self._map.close()

    def close(self) -> None:
        self._unmap()
        self._volumes.close()
        os.close(self.fd)
