"""Directory order: what lies beside the file that was read, or the whole tree from its beginning.

Datasets are laid out by class, by day or by shard, and whoever stores them does so in that order: neighbours in a
directory are neighbours on the disks, too.
"""

from policies.prefetch.base import Target
from policies.prefetch.sequential import NoPrefetch


class WholeTree(NoPrefetch):
    def started(self) -> tuple[Target, ...]:
        return (Target(b"", recursive=True),)


class Directory(NoPrefetch):
    """The rest of a directory, as soon as one of its files is read; once."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()

    def read(self, path: bytes) -> tuple[Target, ...]:
        directory = path.rpartition(b"/")[0]
        if directory in self._known:
            return ()
        self._known.add(directory)
        return (Target(directory),)
