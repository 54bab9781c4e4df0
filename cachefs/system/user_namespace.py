"""The user namespace of this process (user_namespaces(7)): `unshare --user`, or a rootless container.

Users that it does not map all look the same there: stat(2) shows the overflow uid, usually 65534. So does an idmapped
mount. That number is also a real user's, nobody: `of_nobody` and `acl_of_nobody` give nobody no more than all others.
"""

import fcntl
import os
import struct
from functools import cache
from pathlib import Path

from cachefs.system.descriptors import closing
from cachefs.system.stat import Stat

_ALL_USERS = 0xFFFFFFFF
_ACL_ENTRY = struct.Struct("<HHI")
_GROUP_OBJ, _OTHER, _NAMED = 4, 32, (2, 8)
_NS_GET_USERNS = 0xB701
"""ioctl_ns(2): the user namespace that owns another namespace."""


def maps_all_users() -> bool:
    """True in the initial namespace."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    return sum(int(line.split()[2]) for line in lines) >= _ALL_USERS


def is_unmapped(uid: int) -> bool:
    """May this be the uid that is shown for users outside the namespace?"""
    return uid == int(Path("/proc/sys/kernel/overflowuid").read_text()) and not maps_all_users()


def owns_mounts() -> bool:
    """May root of this user namespace mount in its mount namespace?"""
    with closing(os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)) as mounts:
        try:
            owner = fcntl.ioctl(mounts, _NS_GET_USERNS)
        except PermissionError:  # the owner is outside this user namespace
            return False
    with closing(owner):
        return os.path.samestat(os.fstat(owner), os.stat("/proc/self/ns/user"))


@cache
def _overflow_ids() -> tuple[int, int]:
    uid, gid = (int(Path(f"/proc/sys/kernel/overflow{name}").read_text()) for name in ("uid", "gid"))
    return uid, gid


def of_nobody(now: Stat) -> Stat:
    """The attributes of an object whose owner and group may not be mapped: then the bits for others count for them."""
    uid, gid = _overflow_ids()
    mode, others = now.mode, now.mode & 0o007
    if now.uid == uid:
        mode = mode & ~0o4700 | others << 6
    if now.gid == gid:
        mode = mode & ~0o2070 | others << 3
    return now if mode == now.mode else now._replace(mode=mode)


def acl_of_nobody(acl: bytes, now: Stat) -> bytes:
    """The value of an ACL attribute without entries for users and groups that are not mapped, which the kernel refuses.
    `now`: of the object; if its group may not be mapped, it gets what others get."""
    entries = list(_ACL_ENTRY.iter_unpack(acl[4:]))
    others = min((permissions for tag, permissions, _ in entries if tag == _OTHER), default=0)
    if now.gid == _overflow_ids()[1]:
        entries = [(tag, others if tag == _GROUP_OBJ else permissions, who) for tag, permissions, who in entries]
    known = (each for each in entries if each[0] not in _NAMED or each[2] != _ALL_USERS)
    return acl[:4] + b"".join(_ACL_ENTRY.pack(*each) for each in known)
