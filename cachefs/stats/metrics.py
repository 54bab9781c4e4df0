"""All counters of the filesystem, with unit and meaning. They are incremented only on the trio thread."""

from dataclasses import dataclass, field, fields

from cachefs.stats.latency import Latencies


@dataclass(slots=True)
class Metrics:
    hits: int = 0
    """READ requests answered without the source."""
    misses: int = 0
    """READ requests that had to wait for the source."""
    hit_bytes: int = 0
    """Bytes of hit replies."""
    disk_bytes: int = 0
    """Bytes of hit replies that were read from the local disk. The others were in memory."""
    miss_bytes: int = 0
    """Bytes of miss replies."""
    skipped_admissions: int = 0
    """Fetched units that were not cached: the cache or the write-behind queue was full, the disk failed, their file was
    not pinned any more, or the fast path left a read to Python."""
    young_reads: int = 0
    """READ requests that were not cached: the file had changed shortly before."""
    evictions: int = 0
    """Units that were evicted to make room."""
    metadata_evictions: int = 0
    """Inodes that were unpinned to pin others."""
    prefetched: int = 0
    """Units that were fetched before they were read."""
    errors: int = 0
    """Failures of the cache itself, made good from the source."""
    corrupt_records: int = 0
    """Records of the blob that differ from what was written."""
    refused_changes: int = 0
    """Changes of immutable files, and unlinks after one, that failed with EPERM."""
    stale_reads: int = 0
    """Reads answered ESTALE because the source had changed."""

    latencies: Latencies = field(default_factory=Latencies)
    """Of the requests that Python answered, from the time it received them."""

    def as_dict(self) -> dict[str, int]:
        """The counters."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "latencies"}
