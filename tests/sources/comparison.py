"""What a mount has to have in common with its source, whose kind may have results that a mount does not repeat."""

import re

from tests.same_calls import Results, differences, without_numbers
from tests.sources.kinds import Source

_WITHOUT_ATTRIBUTES = {"listxattr": [], "getxattr": "ENODATA"}


def compare(source: Source, mounted: Results, found: Results, *, numbers: bool = True) -> Results:
    """Name → (on the mount, on the source), of the results that differ. `numbers`: of inodes."""
    expected = {name: _as_on_a_mount(name, value) for name, value in found.items()}
    kept = [
        {name: value for name, value in results.items() if not name.startswith(source.own_results)}
        for results in (mounted, expected)
    ]
    if not numbers or not source.has_numbers:
        kept = [without_numbers(results) for results in kept]
    return differences(*kept)


def _as_on_a_mount(name: str, value: object) -> object:
    """Where there are no extended attributes, no object has one. An fsync of what was not written succeeds (FA-38)."""
    call = name.partition(" ")[0]
    if value == "ENOTSUP" and call in _WITHOUT_ATTRIBUTES:
        return _WITHOUT_ATTRIBUTES[call]
    if value == "EINVAL" and call == "fsync":
        return None
    if call == "tar" and isinstance(value, str):
        return re.sub(r"tar: .*: Warning: Cannot \w*listxattr\w*: Operation not supported\n", "", value)
    return value
