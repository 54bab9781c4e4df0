"""Read-ahead within large files, and no prefetching of others.

The kernel reads ahead for whoever reads a file sequentially; where a miss fetches a chunk of 4 MiB at once, the next
one should be under way by then. The rule: the first read of a chunk whose predecessor is cached, or being fetched,
fetches its successor. It is applied where misses are (fastpath/fill.c); this object says that nothing else is wanted.
"""

from policies.prefetch.base import Target


class NoPrefetch:
    per_file = False

    def started(self) -> tuple[Target, ...]:
        return ()

    def read(self, path: bytes) -> tuple[Target, ...]:
        return ()
