"""The inodes and names that a FUSE request may have changed, for a request that may or may not have been executed."""

from cachefs.contract.fuse import CHANGES, FUSE_OPERATIONS, IN_HEADER

_HEADER = IN_HEADER.codec()
_CHANGES_OF_NAMES = {
    each.number: each
    for each in FUSE_OPERATIONS
    if each.kind is CHANGES and each.names and not each.name.endswith("XATTR")
}
"""By opcode. The names of the *XATTR operations are those of attributes, not of directory entries."""


def touched(request: bytes) -> tuple[list[int], list[tuple[int, bytes]]]:
    """(inodes, (directory, name)) of a request as the kernel sent it; its end may be missing."""
    _, opcode, _, inode, *_ = _HEADER.unpack_from(request)
    body = request[_HEADER.size :]
    inodes, entries = [inode], []
    operation = _CHANGES_OF_NAMES.get(opcode)
    if operation is not None:
        names = body[operation.body_bytes :].split(b"\0")
        entries.append((inode, names[0]))
        if operation.name in ("RENAME", "RENAME2", "LINK"):
            other = int.from_bytes(body[:8], "little")  # the new directory; of LINK, the inode
            inodes.append(other)
            if operation.name != "LINK":
                entries.append((other, names[1]))
    return inodes, entries
