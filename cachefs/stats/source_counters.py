"""The system calls to the source, counted by kind, and delayed if a latency is simulated."""

import threading
import time
from collections import Counter


class SourceCounters:
    """The number of system calls of each kind. Used by many threads."""

    def __init__(self, simulate_latency_s: float = 0.0) -> None:
        self._latency_s = simulate_latency_s
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.bytes_read = 0
        """Bytes of files. Listings of directories do not count."""

    def add(self, operation: str, count: int = 1) -> None:
        with self._lock:
            self._counts[operation] += count

    def add_bytes(self, count: int) -> None:
        with self._lock:
            self.bytes_read += count

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def round_trip(self, operation: str) -> None:
        """Count one system call to the source, and wait for the simulated latency."""
        self.add(operation)
        if self._latency_s:
            time.sleep(self._latency_s)
