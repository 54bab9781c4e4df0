"""The blob: one append-only file that holds all cached payload.

Space is granted in aligned slabs of 64 MiB, each with one writer. A record never crosses the end of a slab, and the
unused rest of a slab stays a hole. A new run begins a new slab, and so does a writer after a failed append, because
half a record may be at the end of the old one. Nothing is ever moved; space is freed by punching holes (space.py).

`append` and `punch` are called only from the write-behind thread, `read` from any thread.
"""

import errno
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from cachefs.contract.blob import BLOCK_BYTES, RECORD_HEADER_BYTES, SLAB_BYTES
from cachefs.errors import CorruptRecord
from cachefs.store.blob import record
from cachefs.store.index.records import PINNED, Extent
from cachefs.system import private_files, syscalls

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
_IOV_MAX = 1024
_MAX_OFFSET = 1 << 62


class BlobFull(OSError):
    """No room on the disk, or the file has reached its largest size (EFBIG). The batch is not cached."""


class Blob:
    def __init__(self, path: Path, seed: int) -> None:
        """Opens or creates the file. `seed`: of all checksums."""
        self.fd = private_files.open_file(path, os.O_RDWR | os.O_CREAT)
        self.seed = seed
        self.punches = self._can_punch()
        """Can holes be punched here? If not, nothing is evicted: the space would not be free (CL-6)."""
        self._frontier = 0
        """The end of the last slab that this process has granted."""
        self._next = self._slab_end = 0
        self._granting = threading.Lock()

    def _can_punch(self) -> bool:
        beyond = -(-self.size() // PAGE_BYTES) * PAGE_BYTES
        try:
            syscalls.punch_hole(self.fd, beyond, PAGE_BYTES)
        except OSError as error:
            return error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS)
        return True

    def grant(self) -> int:
        """Grant a slab to one writer, and return its offset. Called by two threads: write-behind takes slabs, too."""
        with self._granting:
            offset = self.frontier
            self._frontier = offset + SLAB_BYTES
            return offset

    def _new_slab(self) -> None:
        self._next = self.grant()
        self._slab_end = self._next + SLAB_BYTES

    def leave_slabs_before(self, offset: int) -> None:
        """The slabs before this offset are closed: the next append writes to none of them."""
        if self._slab_end - SLAB_BYTES < offset:
            self._next = self._slab_end = 0

    def append(self, records: Sequence[tuple[record.Header, bytes]]) -> list[Extent]:
        """Write records and sync them. On an error none of them is valid, and the next append begins a new slab.

        After a failed fdatasync the pages are clean but lost, so the batch is never retried (hazard 17).
        """
        extents = []
        buffers: list[bytes] = []
        start = self._next
        try:
            for header, payload in records:
                size = header.record_bytes
                if self._next + size > self._slab_end:
                    self._write(buffers, start)
                    buffers = []
                    self._new_slab()
                    start = self._next
                checksums = record.checksums_of(payload, self.seed)
                prefix = record.encode_prefix(header, checksums, self.seed)
                buffers += (prefix, payload, bytes(size - len(prefix) - len(payload)))
                offset = self._next + len(prefix)
                extents.append(Extent(PINNED, header.length, offset, header.version, size, checksums))
                self._next += size
            self._write(buffers, start)
            os.fdatasync(self.fd)
        except OSError as error:
            self._new_slab()
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise BlobFull(error.errno, os.strerror(error.errno)) from error
            raise
        return extents

    def _write(self, buffers: list[bytes], offset: int) -> None:
        for first in range(0, len(buffers), _IOV_MAX):
            part = [memoryview(b) for b in buffers[first : first + _IOV_MAX] if b]
            while part:
                written = os.pwritev(self.fd, part, offset)
                offset += written
                while part and written >= len(part[0]):
                    written -= len(part[0])
                    part.pop(0)
                if written:
                    part[0] = part[0][written:]

    def read(self, extent: Extent, start: int, length: int, *, nowait: bool = False) -> memoryview:
        """`length` bytes of the extent's payload from `start`, verified. Raises CorruptRecord.

        `nowait`: raise BlockingIOError instead of waiting for the disk.
        """
        first = start // BLOCK_BYTES
        last = -(-(start + length) // BLOCK_BYTES)
        begin = first * BLOCK_BYTES
        wanted = min(last * BLOCK_BYTES, extent.length) - begin
        if start + length > extent.length or not 0 <= extent.blob_offset <= _MAX_OFFSET or last > len(extent.checksums):
            raise CorruptRecord("the extent does not match the index")
        buffer = bytearray(wanted)
        count = os.preadv(self.fd, [buffer], extent.blob_offset + begin, os.RWF_NOWAIT if nowait else 0)
        if count != wanted:
            if nowait:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            raise CorruptRecord("the blob ends within a record")
        view = memoryview(buffer)
        for block in range(first, last):
            at = block * BLOCK_BYTES - begin
            record.verify_block(view[at : at + BLOCK_BYTES], extent.checksums[block], self.seed)
        return view[start - begin : start - begin + length]

    # --- freeing space: space.py decides what ----------------------------------------------------------------------

    def punch(self, start: int, end: int) -> None:
        """Free the whole pages between two offsets, where the filesystem can do that."""
        first, last = -(-start // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES
        if last > first and self.punches:
            syscalls.punch_hole(self.fd, first, last - first)

    def mark_gap(self, start: int, end: int, version: int) -> None:
        """Write a header at the start of a range without records, so that a rebuild finds the next record.

        `version`: not below that of any record that was in the range.
        """
        if end - start < RECORD_HEADER_BYTES:  # the end of a slab
            return
        try:
            os.pwrite(self.fd, record.encode_gap(end - start, version, self.seed), start)
        except OSError as error:  # the disk is full: a rebuild stops at this gap
            log.debug("cannot mark a gap of the blob: %s", error)

    def allocated_bytes(self) -> int:
        """The disk space that the file occupies."""
        return os.fstat(self.fd).st_blocks * 512

    @property
    def frontier(self) -> int:
        """Where the next slab begins."""
        end = max(self.size(), self._frontier)
        return -(-end // SLAB_BYTES) * SLAB_BYTES

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def sync(self, extents: Sequence[Extent]) -> None:
        """Sync what the fast path appended, and drop its pages here: the page cache of the mount has a copy."""
        os.fdatasync(self.fd)
        start = min(e.blob_offset for e in extents)
        end = max(e.blob_offset + e.length for e in extents)
        os.posix_fadvise(self.fd, start, end - start, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self.fd)
