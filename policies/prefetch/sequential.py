"""Large files: how much a read fetches, and what is fetched ahead of it. Other files are not prefetched.

A file is read from end to end (a tar archive, a checkpoint), or somebody jumps about in it (two columns of a parquet
file, an array that is mapped into memory). The first wants large requests to the source, the second pays for every
byte that he did not ask for. As in the kernel's read-ahead the difference is what lies before the read: the longer the
*run* of bytes that are cached or being fetched already, the more is fetched at once. What is fetched in vain is then a
small part of what was read.

- At the beginning of the file, and its end is not known: a chunk. Most files are read so; where the table of contents
  is at the end (parquet, zip), whoever jumps about has been there first.
- A run that begins where the file begins: half as much again.
- Any other: a sixteenth. A column may be long, too.
- No more than a chunk (4 MiB), nothing less than what was asked for, and whole MiB: as much as the kernel asks for at
  once, so that its requests do not lie across two of ours.
- Once the window is a whole chunk, the first read of one fetches the next one meanwhile, unless `--prefetch none`.

A chunk of which so many small pieces are known (`MAX_PIECES`) is fetched whole: each piece costs a request to the
source and an entry in the index, and somebody seems to want it all.

The fast path has the same rule (fastpath/c/misses/window.c).
"""

from policies.prefetch.base import Target

CHUNK_BYTES = 4 << 20
REQUEST_BYTES = 1 << 20
FROM_START = 2
ELSEWHERE = 16
MAX_PIECES = 32


def window_bytes(run_start: int, offset: int, *, end_known: bool) -> int:
    """How much to fetch from `offset` on, if more than was asked for.

    `run_start`: from where on all up to `offset` is known. `end_known`: so is the last byte of the file.
    """
    if offset == 0:
        return 0 if end_known else CHUNK_BYTES
    share = FROM_START if run_start == 0 else ELSEWHERE
    return min((offset - run_start) // share // REQUEST_BYTES * REQUEST_BYTES, CHUNK_BYTES)


class NoPrefetch:
    per_file = False

    def started(self) -> tuple[Target, ...]:
        return ()

    def read(self, path: bytes) -> tuple[Target, ...]:
        return ()
