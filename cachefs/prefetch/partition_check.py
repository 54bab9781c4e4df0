"""Partitions of a graph that match no file: a graph with wrong names prefetches nothing, and nobody would notice.

The check runs beside the first requests, once for each daemon. Of a glob, only the directory before its first wildcard
is looked up; `cachefs graph build --root` checks whether the glob matches a file.
"""

import errno
import logging
from collections.abc import Mapping

from cachefs.fs.names import FileSystem
from cachefs.printable import one_line
from policies.prefetch.base import Target

log = logging.getLogger(__name__)


class PartitionCheck:
    def __init__(self, partitions: Mapping[str, Target], filesystem: FileSystem) -> None:
        # dependencies
        self._partitions = partitions
        self._fs = filesystem
        # state
        self.problem: str | None = None
        """One line for users, if there are such partitions."""

    async def run(self) -> None:
        """The task: until all partitions were looked up."""
        missing = [name for name, target in self._partitions.items() if not await self._exists(target.path)]
        if missing:
            first = one_line(missing[0].encode("utf-8", "surrogateescape"))
            self.problem = (
                f"{len(missing):,} of {len(self._partitions):,} partitions of the graph match no file, the first is "
                f"{first}: nothing is prefetched for them. Compare --prefix and --suffix of cachefs graph build"
            )
            log.warning("%s", self.problem)

    async def _exists(self, path: bytes) -> bool:
        try:
            await self._fs.resolve(path)
        except OSError as error:  # a source that fails says nothing about names
            return error.errno not in (errno.ENOENT, errno.ENOTDIR)
        return True
