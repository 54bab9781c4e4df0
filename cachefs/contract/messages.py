"""Messages on the control socket (SOCK_SEQPACKET) between the daemon and the fast path, each with the head CONTROL."""

import enum

from cachefs.contract.structs import Struct


class Message(enum.IntEnum):
    """daemon → fast path (D), fast path → daemon (F); a and b are fields of the head."""

    ATTACH = 1
    """D: serve this daemon; descriptors: both ends of the socket for FUSE messages."""
    ATTACHED = 2
    """F"""
    HANDOVER = 3
    """D: a take-over: send the descriptors of the mount."""
    HANDED_OVER = 4
    """F; descriptors: /dev/fuse, shared memory, source, blob, listening socket."""
    IN_DOUBT = 5
    """F: a request for a change that a dead daemon may or may not have executed."""
    SLAB = 6
    """F: it needs a slab. D: a = its offset in the blob."""
    FILLED = 7
    """F: an array of FILLED."""
    CORRUPT = 8
    """F: the record of inode a at offset b, whose blob offset follows."""
    REFUSED = 9
    """F: the blob cannot be written, errno a."""
    ROOM = 10
    """F: there is no room for a record, a: number of this request. D: room was made as far as possible, a: the same."""
    PREFETCH = 11
    """D: prefetch requests, an array of PREFETCH_REQUEST."""
    ALL_REPORTED = 12
    """F: all records in slabs of earlier daemons have been reported, and no more will be written to them."""
    SOURCE = 13
    """D: the source was mounted anew; descriptor: its root."""


ATTACH_SAME_PYTHON = 1
"""a of ATTACH: the Python that requests were passed on to is still alive."""
FAST_HANDLE = 1 << 63
"""Marks a file handle of the fast path; the rest is the inode, or the place of the request (hazard 2)."""
OPEN_REPORT = 1 << 30
"""In the flags of an OPEN that is passed on and answered, with no O_* flag. An earlier version left those in it."""
OPEN_HAS_VERSION = 1 << 3
"""In these flags: from bit OPEN_VERSION_BIT on they have the last bits of the version that the file had then."""
OPEN_VERSION_BIT = 10
OPEN_VERSION_MASK = (1 << 20) - 1

CONTROL = Struct("control", ("u32", "type length"), ("u64", "a b"), size=24)  # length: of what follows
FILLED = Struct(  # one unit that was appended to the blob; its checksums follow
    "filled",
    ("u64", "report inode offset version blob_offset record_bytes"),
    ("u32", "length checksums"),
    size=56,
)
PREFETCH_REQUEST = Struct(
    "prefetch_request", ("u64", "inode offset")
)  # the unit of a file that contains the byte at `offset`
