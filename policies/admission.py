"""Admission: may a record enter the cache? Yes, if there is room. Retention policies make room."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capacity:
    capacity_bytes: int

    def admits(self, record_bytes: int, used_bytes: int) -> bool:
        """Does a record of `record_bytes` fit beside the `used_bytes` that are stored, or will be?"""
        return used_bytes + record_bytes <= self.capacity_bytes
