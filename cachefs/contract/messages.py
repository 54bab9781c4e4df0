"""Messages on the control socket (SOCK_SEQPACKET) between the daemon and the fast path, each with the head CONTROL."""

import enum

from cachefs.contract.structs import Struct


class Message(enum.IntEnum):
    """daemon → fast path (D), fast path → daemon (F); a and b are fields of the head."""

    ATTACH = 1
    """D: serve me; descriptors: the fuse socket's two ends."""
    ATTACHED = 2
    """F"""
    HANDOVER = 3
    """D: give me what you hold (a take-over)."""
    HANDED_OVER = 4
    """F; descriptors: /dev/fuse, shared memory, source, blob, listening socket."""
    IN_DOUBT = 5
    """F: a change that a dead daemon may or may not have made."""
    SLAB = 6
    """F: needs one. D: a = its offset in the blob."""
    FILLED = 7
    """F: an array of FILLED."""
    CORRUPT = 8
    """F: of inode a, offset b, the record at the blob offset that follows."""
    REFUSED = 9
    """F: the blob cannot be written, errno a."""
    ROOM = 10
    """F: a record has none, a: number. D: what can go has gone, a: the same."""
    PREFETCH = 11
    """D: an array of PREFETCH_REQUEST, to be prefetched."""
    ALL_REPORTED = 12
    """F: all that an earlier daemon granted has been reported, and is not written to."""
    SOURCE = 13
    """D: it was mounted anew; descriptor: its root."""


ATTACH_SAME_PYTHON = 1
"""a of ATTACH: the Python that has the passed requests is alive."""
FAST_HANDLE = 1 << 63
"""In file handles: the fast path's; the rest is the inode, or the request's place (hazard 2)."""
OPEN_REPORT = 1 << 30
"""In the flags of an OPEN that is passed on and answered: no O_* flag."""

CONTROL = Struct("control", ("u32", "type length"), ("u64", "a b"), size=24)  # length: of what follows
FILLED = Struct(  # one unit that was appended to the blob; its checksums follow
    "filled",
    ("u64", "report inode offset version blob_offset record_bytes"),
    ("u32", "length checksums"),
    size=56,
)
PREFETCH_REQUEST = Struct(
    "prefetch_request", ("u64", "inode offset")
)  # the unit of a file that holds the byte at `offset`
