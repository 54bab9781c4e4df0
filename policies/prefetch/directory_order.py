"""Directory order: the other files of the directory of a file that was read, or the whole tree.

Datasets are laid out by class, by day or by shard, and are stored in that order: neighbours in a directory are
neighbours on the disks.
"""

from policies.prefetch.base import Prefetch, Target


class WholeTree(Prefetch):
    def started(self) -> tuple[Target, ...]:
        return (Target(b"", recursive=True),)


class Directory(Prefetch):
    """Fetches the other files of a directory when one of its files is first read."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()

    def read(self, path: bytes) -> tuple[Target, ...]:
        directory = path.rpartition(b"/")[0]
        if directory in self._known:
            return ()
        self._known.add(directory)
        return (Target(directory),)
