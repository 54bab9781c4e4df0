"""Which inodes and names a FUSE request may have changed: for changes of which nobody knows whether they were made."""

import struct

_HEADER = struct.Struct("<2I2Q4I")  # struct fuse_in_header: length, opcode, unique, nodeid, …
_SYMLINK, _MKNOD, _MKDIR, _UNLINK, _RMDIR, _RENAME, _LINK, _CREATE, _RENAME2 = 6, 8, 9, 10, 11, 12, 13, 35, 45
_NAMES_AT = {_SYMLINK: 0, _MKNOD: 16, _MKDIR: 8, _UNLINK: 0, _RMDIR: 0, _RENAME: 8, _LINK: 8, _CREATE: 16, _RENAME2: 16}
"""Operation → bytes of its struct, which the names follow."""


def touched(request: bytes) -> tuple[list[int], list[tuple[int, bytes]]]:
    """(inodes, (directory, name)) of a request as the kernel sent it; its end may be missing."""
    _, opcode, _, inode, *_ = _HEADER.unpack_from(request)
    body = request[_HEADER.size :]
    inodes, entries = [inode], []
    if opcode in _NAMES_AT:
        names = body[_NAMES_AT[opcode] :].split(b"\0")
        entries.append((inode, names[0]))
        if opcode in (_RENAME, _RENAME2, _LINK):
            other = int.from_bytes(body[:8], "little")  # the new directory; of LINK, the inode
            inodes.append(other)
            if opcode != _LINK:
                entries.append((other, names[1]))
    return inodes, entries
