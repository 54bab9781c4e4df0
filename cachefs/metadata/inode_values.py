"""Symlink targets and extended attributes in the index. Each carries the version of the inode that it belongs to."""

import errno
import struct

from cachefs.contract.index import Table
from cachefs.store.index.environment import Update, View
from cachefs.store.index.records import FLAGS_PINNED, PINNED, UNSETTLED, Inode, inode_key

KNOWN, ABSENT = b"\1", b"\0"
"""The first byte of the value of an xattr, and what is stored for an xattr that does not exist."""
ACL = b"system.posix_acl_access"
NO_VALUE = (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of getxattr that mean: there is no value."""


_ACL_HEAD, _ACL_ENTRY = struct.Struct("<I"), struct.Struct("<HHI")
_ACL_VERSION, _USER_OBJ, _GROUP_OBJ, _OTHER, _NOBODYS = 2, 1, 4, 32, 0xFFFFFFFF  # linux/posix_acl_xattr.h


def acl_of(mode: int) -> bytes:
    """The xattr of an ACL that means the same as this mode without an ACL."""
    classes = (_USER_OBJ, mode >> 6), (_GROUP_OBJ, mode >> 3), (_OTHER, mode)
    entries = [_ACL_ENTRY.pack(tag, bits & 7, _NOBODYS) for tag, bits in classes]
    return _ACL_HEAD.pack(_ACL_VERSION) + b"".join(entries)


def get(view: View, table: Table, inode: Inode, name: bytes = b"") -> bytes | None:
    """A symlink's target or an xattr's value of this version of the inode; None if it is not known."""
    found = view.get(table, inode_key(inode.number) + name)
    if found is None or int.from_bytes(found[8:16], "little") != inode.version:
        return None
    return found[16:]


def put(update: Update, table: Table, inode: Inode, name: bytes, value: bytes) -> None:
    if inode.flags & PINNED:
        head = FLAGS_PINNED + bytes(4) + inode.version.to_bytes(8, "little")
        update.put(table, inode_key(inode.number) + name, head + value)


def is_public(view: View, directory: Inode) -> bool:
    """May everyone list and enter it? The bits for all others say nothing of the group, and none of them of an ACL."""
    return directory.mode & 0o555 == 0o555 and get(view, Table.XATTRS, directory, ACL) == ABSENT


def settle(update: Update, before: Inode | None, after: Inode) -> None:
    """After a comparison: drop the values of a record that has settled, or had not in an earlier run. They may have
    changed in the tick of the source's clock in which they were read, which does not show in ctime. A new symlink may
    have the former's number."""
    if before is None or not before.flags & UNSETTLED:
        return
    if not after.flags & UNSETTLED or before.validated_run != after.validated_run:
        drop(update, after.number)


def drop(update: Update, number: int) -> None:
    for table in (Table.XATTRS, Table.SYMLINKS):
        for key, _ in list(update.scan(table, inode_key(number))):
            update.delete(table, key)
