"""The options of a mount. Immutable; made by the command line."""

import enum
import math
from dataclasses import dataclass, field

from cachefs.contract.shared import SETTLE_NS
from cachefs.system.clock import NANOSECONDS
from policies.globs import AllExcept, Globs, Names
from policies.prefetch import GRAPH, LISTENING

MIB = 1 << 20
METADATA_RETENTION = ("no-replacement", "fifo", "lru")
MUTABLE_NAMES = (
    *("lock.mdb", "*.lock", "*.lck"),  # LMDB; filelock, Hugging Face; others
    *("*-journal", "*-wal", "*-shm"),  # SQLite
    *(".nfs*", "*.swp"),  # files removed while open on NFS; vim
    *("*.tmp", "*.part", "*.incomplete"),  # downloads, and files that are renamed when they are complete
    *("*.distcp", ".metadata"),  # torch.distributed.checkpoint overwrites them in place
)
"""Names of files that lie beside data, and that their readers, or other nodes, write to."""
DEFAULT_NAME = "./"
"""Begins a default name among the patterns of a mount. A glob that begins so is refused."""


class CacheLevel(enum.Enum):
    NONE = "none"
    METADATA = "metadata"
    FULL = "full"


class Revalidate(enum.Enum):
    AUTO = "auto"
    LAZY = "lazy"
    NEVER = "never"
    RCTIME = "rctime"


@dataclass(frozen=True, slots=True)
class Options:
    cache: CacheLevel = CacheLevel.FULL
    cache_size_bytes: int = 1 << 40
    read_only: bool = False
    mutable: Globs = field(default_factory=lambda: Globs(()))
    immutable: Globs = field(default_factory=lambda: Globs(()))
    """If there are any, only these paths may become immutable."""
    mutable_defaults: bool = False
    """Do files with one of MUTABLE_NAMES stay mutable? The default of the command line is True."""
    small_file_bytes: int = 1 * MIB
    attr_timeout_s: float = 1.0
    """How long a record is valid that is not pinned. `inf` only on read-only mounts."""
    revalidate: Revalidate = Revalidate.AUTO
    source_timeout_s: float = 30.0
    simulate_latency_s: float = 0.0
    fastpath: bool = True
    """False: pyfuse3 serves /dev/fuse itself."""
    fetch_threads: int = 64
    """How many small files the fast path fetches at once."""
    retention: str = "no-replacement"
    """Which cached data are evicted when space is needed: a name of `policies.retention`."""
    metadata_limit: int | None = None
    """How many inodes may be pinned; None: all of them."""
    metadata_retention: str = "no-replacement"
    """Which inodes are dropped beyond that limit: one of METADATA_RETENTION."""
    prefetch: str = "sequential"
    """What is fetched before it is read: a name of `policies.prefetch`."""
    graph: tuple[str, ...] = ()
    """For prefetch "graph": the partitions, as lines of JSON."""
    reconnect_timeout_s: float = 60.0
    """How long requests that need the daemon wait for a successor if it has died."""
    settle_ns: int = SETTLE_NS
    """How long an object must be unchanged to be valid for ever, and file data to be cached (validity.py)."""

    @property
    def rctime_grace_s(self) -> float:
        """How far behind a recursive ctime may be (rctime.py): a minute; less in tests, which shorten `settle_ns`."""
        return 30 * self.settle_ns / NANOSECONDS

    @property
    def unpinned_timeout_s(self) -> float:
        """How long an unpinned record is valid: one second for mutable files on a mount that pins all others."""
        return 1.0 if math.isinf(self.attr_timeout_s) else self.attr_timeout_s

    @property
    def evicts(self) -> bool:
        """May data be evicted?"""
        return self.retention != "no-replacement" and self.cache is CacheLevel.FULL

    @property
    def evicts_ahead(self) -> bool:
        """Are data that have been read evicted for prefetched data?"""
        return self.evicts and self.prefetch == GRAPH

    @property
    def logs_accesses(self) -> bool:
        """Must reads be recorded, for a policy?"""
        used = self.metadata_limit is not None and self.metadata_retention == "lru"
        return self.evicts or used or (self.prefetch in LISTENING and self.cache is CacheLevel.FULL)

    @property
    def pins_everything(self) -> bool:
        """Does a read-only mount take the dataset as complete, and pin what it has seen once?"""
        return self.read_only and math.isinf(self.attr_timeout_s) and self.cache is not CacheLevel.NONE

    @property
    def is_complete(self) -> bool:
        """Is each file pinned as soon as it is looked up, and immutable from then on?"""
        full = self.metadata_limit is not None and self.metadata_retention == "no-replacement"
        return self.pins_everything and not self.mutable_paths and not full

    @property
    def mutable_paths(self) -> Globs:
        """Paths that never become immutable."""
        return AllExcept(self.immutable.patterns, self.mutable) if self.immutable else self.mutable

    @property
    def mutable_names(self) -> Names:
        """Names of files that never become immutable. A read-only mount needs none: no reader of it can write."""
        return Names(MUTABLE_NAMES if self.mutable_defaults and self.pins_files and not self.read_only else ())

    @property
    def mutable_patterns(self) -> tuple[str, ...]:
        """What decides which files stay mutable, as the cache directory records it."""
        return (*self.mutable_paths.patterns, *(DEFAULT_NAME + name for name in self.mutable_names.patterns))

    @property
    def pins_files(self) -> bool:
        """Do files become immutable that are opened read-only?"""
        return self.cache is not CacheLevel.NONE
