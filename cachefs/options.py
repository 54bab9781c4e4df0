"""What a mount was asked to do. Immutable; made by the command line, read by everything else."""

import enum
import math
from dataclasses import dataclass, field

from cachefs.contract.shared import SETTLE_NS
from cachefs.system.clock import NANOSECONDS
from policies.globs import Globs
from policies.prefetch import GRAPH, LISTENING

MIB = 1 << 20


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
    small_file_bytes: int = 1 * MIB
    attr_timeout_s: float = 1.0
    """How long anything that is not pinned is believed. `inf` only on read-only mounts."""
    revalidate: Revalidate = Revalidate.AUTO
    source_timeout_s: float = 30.0
    simulate_latency_s: float = 0.0
    fastpath: bool = True
    """False: pyfuse3 serves /dev/fuse itself."""
    fetch_threads: int = 64
    """Of the fast path: how many small files are fetched at once."""
    retention: str = "no-replacement"
    """Which cached data go when room is needed: a name of `policies.retention`."""
    metadata_limit: int | None = None
    """How many inodes may be pinned; None: all of them."""
    metadata_retention: str = "no-replacement"
    """Which of them go beyond that: a name of `cachefs.metadata.limit`."""
    prefetch: str = "sequential"
    """What is fetched before it is read: a name of `policies.prefetch`."""
    graph: tuple[str, ...] = ()
    """Of prefetch "graph": the partitions, as lines of JSON."""
    reconnect_timeout_s: float = 60.0
    """How long requests that need the daemon wait for another when it has died."""
    settle_ns: int = SETTLE_NS
    """How long an object must not have changed to be believed for ever, and a file to be cached (age.py)."""

    @property
    def rctime_grace_s(self) -> float:
        """How far behind a recursive ctime may be (rctime.py): a minute. Tests have less time, for this as for ages."""
        return 30 * self.settle_ns / NANOSECONDS

    @property
    def unpinned_timeout_s(self) -> float:
        """How long what is not pinned is believed: a second for mutable files on a mount that pins all else."""
        return 1.0 if math.isinf(self.attr_timeout_s) else self.attr_timeout_s

    @property
    def evicts(self) -> bool:
        """Data may leave the cache again."""
        return self.retention != "no-replacement" and self.cache is CacheLevel.FULL

    @property
    def evicts_ahead(self) -> bool:
        """What is through makes room for what is fetched ahead as well."""
        return self.evicts and self.prefetch == GRAPH

    @property
    def logs_accesses(self) -> bool:
        """Somebody must know what is read."""
        used = self.metadata_limit is not None and self.metadata_retention == "lru"
        return self.evicts or used or (self.prefetch in LISTENING and self.cache is CacheLevel.FULL)

    @property
    def pins_everything(self) -> bool:
        """Read-only mounts take the dataset as complete: whatever was seen once is pinned."""
        return self.read_only and math.isinf(self.attr_timeout_s) and self.cache is not CacheLevel.NONE

    @property
    def is_complete(self) -> bool:
        """Every file is pinned as soon as it is looked up, and stays immutable."""
        full = self.metadata_limit is not None and self.metadata_retention == "no-replacement"
        return self.pins_everything and not self.mutable and not full

    @property
    def pins_files(self) -> bool:
        """Files that were opened read-only become immutable."""
        return self.cache is not CacheLevel.NONE
