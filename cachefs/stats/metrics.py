"""Every counter of the filesystem: its name, its unit and its meaning. Incremented on the trio thread alone."""

from dataclasses import dataclass, field, fields

from cachefs.stats.latency import Latencies


@dataclass(slots=True)
class Metrics:
    hits: int = 0
    """READ requests answered without the source."""
    misses: int = 0
    """READ requests that had to wait for the source."""
    hit_bytes: int = 0
    """Bytes of the replies that were hits."""
    disk_bytes: int = 0
    """Of those: read from the local disk. The others were in memory."""
    miss_bytes: int = 0
    """Bytes of the replies that were misses."""
    skipped_admissions: int = 0
    """Fetched units that were not cached: cache full, write-behind queue full, the disk refused them, their file is
    not pinned any more, or the fast path left a read to Python."""
    young_reads: int = 0
    """READ requests that were not cached: the file had changed less than 2 s before, or has a time in the future."""
    evictions: int = 0
    """Units that made room for others."""
    metadata_evictions: int = 0
    """Inodes that are no longer pinned, because others are."""
    prefetched: int = 0
    """Units that were fetched before anybody asked for them."""
    errors: int = 0
    """What went wrong in the cache itself (not in the source), and was made good from the source."""
    corrupt_records: int = 0
    """Records of the blob that were not what was written."""
    stale_reads: int = 0
    """Reads answered ESTALE because the source had changed."""

    latencies: Latencies = field(default_factory=Latencies)
    """Of requests that Python answered, from when it heard of them."""

    def as_dict(self) -> dict[str, int]:
        """The counters."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "latencies"}
