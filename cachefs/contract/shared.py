"""The memory that the daemon and the fast path share: a memfd that both have open, so that it outlives either.

It contains what a successor must know: how the mount was set up, what was negotiated with the kernel, and the requests
that have been read from /dev/fuse and not been answered (hazard 9). The requests themselves follow `SHARED`, from the
next page boundary: SLOT_COUNT times SLOT_BYTES. A change of the layout or of a meaning needs another SHARED_VERSION.
"""

import enum
from typing import Protocol

from cachefs.contract.structs import Struct

SHARED_MAGIC = 0x48505443  # "CTPH"
SHARED_VERSION = 6
MAX_THREADS = 192
SLOT_COUNT = 2048
PARKED_COUNT = 8192
SLOT_BYTES = 140 << 10
"""Of one request: a WRITE of 128 KiB and its headers."""
INIT_BYTES = 128
PARKED_BYTES = 1016
"""Of one request whose user has no slot left."""
OPERATIONS = 64
YOUNG_ENTRIES = 8192
MAX_VOLUMES = 256
ACCESS_LOGS = 16
"""One for each of the first serving threads."""
ACCESS_ENTRIES = 4096
ACCESS_UNIT_BITS = 24
LATENCY_COPIES = 16
LATENCY_KINDS = ("lookup", "getattr", "open", "read_hit", "read_miss", "readdir", "write", "other")
LATENCY_BUCKETS = 104
LATENCY_FIRST_BIT = 10
"""Shorter than 1,024 ns: bucket 0."""
PAGE = 4096
LATE_NS = 600_000_000_000
"""How late another clock may be: a version whose ctime is not older may be recent."""
SETTLE_NS = 2_000_000_000
"""The age that a file must have before its data are cached: no single write() lasts longer. Less is not safe."""


class SharedFlag(enum.IntFlag):
    """The options of a mount that the fast path must know."""

    PINS_EVERYTHING = 1
    """A read-only mount of a complete dataset."""
    PINS_FILES = 2
    """Not --cache=none."""
    NO_OPEN = 4
    """Nothing is mutable: OPEN, OPENDIR and FLUSH are answered ENOSYS (hazard 3)."""
    READ_ONLY = 8
    KEEPS_DATA = 16
    """--cache=full: fetched data are appended to the blob."""
    LOGS_ACCESSES = 32
    """READs are logged for the daemon."""
    EVICTS = 64
    """The daemon makes room on request."""
    READS_AHEAD = 128
    """Readahead in large files."""
    EVICTS_FOR_PREFETCH = 256
    """Also for prefetch requests."""


class Words(Protocol):
    """The fields of `SHARED` by their names; a dictionary where there is no fast path."""

    def __getitem__(self, field: str) -> int: ...
    def __setitem__(self, field: str, value: int) -> None: ...


class SourceFlag(enum.IntFlag):
    """What the fast path must know of the source. 0: of a daemon of an earlier version."""

    SOURCE_INCOHERENT = 1
    """Versions are compared with AT_STATX_FORCE_SYNC, and reads bypass the page cache of the source."""
    SOURCE_BY_PATH = 2
    """A descriptor leads to what has its path now (hazard 57): the directory must not move while a file is opened."""
    SOURCE_PAGES_ARE_LATE = 4
    """Reads of a version that may be recent bypass the page cache of the source (hazard 62)."""
    SOURCE_IS_SNAPSHOT = 8
    """It may be removed unnoticed (hazard 71): the daemon fetches."""


class SlotState(enum.IntEnum):
    """The state of a request. `word` of its slot is generation << 8 | state."""

    SLOT_FREE = 0
    SLOT_READING = 1
    """Owned by a thread, for the request that it reads next or handles now. Length 0: it has none yet."""
    SLOT_QUEUED = 2
    """To be passed on."""
    SLOT_PASSING = 3
    """Being sent to Python: it may have arrived or not."""
    SLOT_PASSED = 4
    """Python has it."""
    SLOT_IN_DOUBT = 5
    """A Python that died may have executed it. Answered with an error, or about to be; kept until a daemon knows it."""
    SLOT_ANSWERED = 6
    """The kernel was answered (EINTR); Python's answer has not come yet."""
    SLOT_ANSWERING = 7
    """Python's answer is on its way to the kernel: it may have arrived or not."""


# Counters of one thread, so that counting needs no lock. answered: requests that the fast path answered. corrupt: reads
# that were passed on because the record was not what had been written. guesses, guessed: reads of the blob for a READ
# that is expected (ahead.h), and READs that found their bytes there. prefetched: units fetched for prefetch requests.
# disk_bytes: of hits, what was read from the local disk.
COUNTERS = Struct(
    "counters",
    ("u64", "hits hit_bytes misses miss_bytes answered failed corrupt source_opens source_reads source_fstats"),
    ("u64", "skipped_admissions source_timeouts guesses guessed prefetched source_bytes disk_bytes young_reads"),
    ("u64", "reserved[6]"),
    size=192,
)
ACCESS = Struct("access", ("u64", "inode when_and_unit"))  # microseconds << ACCESS_UNIT_BITS | chunk of the file
ACCESS_LOG = Struct(  # READs of cached files, in a ring with one writer, which the daemon polls
    "access_log",
    ("atomic_u64", "written"),  # entries so far
    ("u64", "reserved[7]"),
    (ACCESS, f"entries[{ACCESS_ENTRIES}]"),
)
YOUNG_FILE = Struct("young_file", ("u64", "inode due_ns"))  # CLOCK_MONOTONIC: when its pages are to be dropped
YOUNG_FILES = Struct(  # READs of young files whose pages the kernel has; an entry goes when the pages are dropped
    "young_files",
    ("atomic_u64", "written taken"),  # entries added, by the fast path; entries removed, by the daemon
    (YOUNG_FILE, f"entries[{YOUNG_ENTRIES}]"),
)
SLOT_HEAD = Struct(
    "slot_head",
    ("atomic_u64", "word unique"),  # generation << 8 | SlotState; the kernel's number of the request
    ("u32", "length parts attempts"),  # bytes; pieces of a READ that was passed on; fast paths that died with it
    ("atomic_u32", "caller"),  # the process that waits for it; 0: of a version that did not say
)
PARKED = Struct(  # a request that waits for a slot of its owner; length 0: none
    "parked", ("atomic_u32", "length"), ("u32", "reserved"), ("u8", f"message[{PARKED_BYTES}]"), size=1024
)
LATENCY = Struct("latency", ("atomic_u64", f"sum_ns counts[{LATENCY_BUCKETS}]"))
LATENCIES = Struct("latencies", (LATENCY, f"kinds[{len(LATENCY_KINDS)}]"))
SHARED = Struct(
    "shared",
    ("u32", "magic version slot_count slot_bytes"),
    # How the mount was set up: written by the daemon before the fast path starts.
    ("u32", "flags threads fetch_threads source_flags"),
    ("u64", "seed small_file_bytes reconnect_timeout_ns source_timeout_ns simulate_latency_ns root_device"),
    # Written by the daemon at any time. serving, 0: answer nothing from the index. capacity_bytes: of the blob.
    # committed_bytes: of records that the index has. resolved: the last report that is committed or refused.
    ("atomic_u64", "run floor serving capacity_bytes committed_bytes resolved"),
    # Written by the fast path. init: of the kernel, length 0: not arrived yet; init_passed: to the current Python.
    # generation: of slots, never used twice. pending_bytes: records that were appended and are not committed or
    # refused. buffered_bytes: payload that is being fetched or waits to be appended. reported: the number of the last
    # report of this fast path or its predecessors. stuck: fetches that took too long and have not returned. pid: of the
    # fast path that ran last. passed: requests passed on to Python, by opcode; the last element counts all others.
    # prefetch_done: prefetch requests of the daemon that are fetched, or not needed any more.
    ("u32", "init_length init_passed"),
    ("u8", f"init[{INIT_BYTES}]"),
    ("atomic_u64", f"generation pending_bytes buffered_bytes reported stuck pid passed[{OPERATIONS}] prefetch_done"),
    # Written by the daemon, in the order in which versions added them; 0: of an older daemon. prefetch_jobs: prefetch
    # requests that are fetched at once, 0: adaptive limit. settle_ns: set when the mount is set up (age.h).
    # clock_offset_ns: from CLOCK_BOOTTIME to the time of day, for fast paths of earlier versions. strict_floor and
    # links_floor: see validity.py. pass_names_until_ns: until then (CLOCK_MONOTONIC) Python answers every LOOKUP
    # (permissions.py). pass_opens_until_ns: the same for OPEN (validity.py).
    ("atomic_u64", "prefetch_jobs"),
    ("u64", "settle_ns"),
    ("atomic_u64", "clock_offset_ns strict_floor links_floor pass_names_until_ns pass_opens_until_ns"),
    (COUNTERS, f"counters[{MAX_THREADS}]"),
    (ACCESS_LOG, f"accesses[{ACCESS_LOGS}]"),
    (SLOT_HEAD, f"slots[{SLOT_COUNT}]"),
    (LATENCIES, f"latencies[{LATENCY_COPIES}]"),
    (YOUNG_FILES, "young"),
    (PARKED, f"parked[{PARKED_COUNT}]"),
    aligned={"counters": PAGE},
)
HEAD_BYTES = -(-SHARED.size // PAGE) * PAGE
# Behind the slots, so that the memory of an earlier version can be extended. Written by the daemon, `count` last. What
# is not in it is left to Python. mount: STATX_MNT_ID_UNIQUE. device: st_dev. number: see volumes.py.
VOLUME = Struct("volume", ("atomic_u64", "mount device number"))
VOLUMES = Struct("volumes", ("atomic_u64", "count"), (VOLUME, f"entries[{MAX_VOLUMES}]"))
VOLUMES_OFFSET = HEAD_BYTES + SLOT_COUNT * SLOT_BYTES
SHARED_BYTES = VOLUMES_OFFSET + VOLUMES.size
