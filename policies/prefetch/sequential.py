"""Large files: how much a read fetches, and what is fetched ahead of it. Small files are not prefetched.

A file is read sequentially (a tar archive, a checkpoint), or at random (two columns of a parquet file, an array that is
mapped into memory). Sequential readers want large requests to the source; random readers pay for every byte that they
did not ask for. As in the kernel's readahead, the bytes before the read decide: the longer the *run* of bytes that are
cached or being fetched, the more is fetched at once. Bytes that are fetched in vain are then a small part of the bytes
that were read.

- At the beginning of a file whose end is not known: a chunk. Most files are read so. If the table of contents is at the
  end (parquet, zip), a random reader has read the end before.
- A run from the beginning of the file: half as much again.
- Any other run: a sixteenth. A column may be long, too.
- No more than a chunk (4 MiB), no less than was asked for, and whole MiB: the kernel asks for at most 1 MiB at once,
  and its requests should not span two fetches.
- When the window is a whole chunk, the first read of a chunk also fetches the next one, unless `--prefetch none`.

A chunk of which `MAX_PIECES` small pieces are known is fetched whole: each piece costs a request to the source and an
entry in the index, and all of it is likely to be read.

The fast path has the same rule (fastpath/c/misses/window.c).
"""

CHUNK_BYTES = 4 << 20
REQUEST_BYTES = 1 << 20
FROM_START = 2
ELSEWHERE = 16
MAX_PIECES = 32


def window_bytes(run_start: int, offset: int, *, end_known: bool) -> int:
    """How much to fetch from `offset` on, if more than was asked for.

    `run_start`: the start of the known bytes before `offset`. `end_known`: the last byte of the file is known.
    """
    if offset == 0:
        return 0 if end_known else CHUNK_BYTES
    share = FROM_START if run_start == 0 else ELSEWHERE
    return min((offset - run_start) // share // REQUEST_BYTES * REQUEST_BYTES, CHUNK_BYTES)
