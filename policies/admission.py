"""Admission: may this record enter the cache? While there is room. Who makes room is a matter of retention."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capacity:
    capacity_bytes: int

    def admits(self, record_bytes: int, used_bytes: int) -> bool:
        """True if a record of `record_bytes` fits beside the `used_bytes` that are stored or on their way."""
        return used_bytes + record_bytes <= self.capacity_bytes
