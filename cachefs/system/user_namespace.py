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
    """The attributes of an object whose owner and group may not be mapped.

    A process may be that owner, or in that group, and look like one of the others, or the other way round. So they all
    get what each of them may do.
    """
    uid, gid = _overflow_ids()
    owner, group, others = now.mode >> 6 & 7, now.mode >> 3 & 7, now.mode & 7
    common = others & (owner if now.uid == uid else 7) & (group if now.gid == gid else 7)
    mode = now.mode & ~0o007 | common
    if now.uid == uid:
        mode = mode & ~0o4700 | common << 6
    if now.gid == gid:
        mode = mode & ~0o2070 | common << 3
    return now if mode == now.mode else now._replace(mode=mode)


def acl_of_nobody(acl: bytes, now: Stat) -> bytes:
    """The value of an ACL attribute without entries for users and groups that are not mapped, which the kernel refuses.
    `now`: of the object. The entries for its group, if that may not be mapped, and for others are as of `of_nobody`."""
    entries = list(_ACL_ENTRY.iter_unpack(acl[4:]))
    unmapped = [each for each in entries if each[0] in _NAMED and each[2] == _ALL_USERS]
    common = {_OTHER, *((_GROUP_OBJ,) if now.gid == _overflow_ids()[1] else ())}
    least = 7
    for tag, permissions, _ in entries:
        if tag in common:
            least &= permissions
    for _, permissions, _ in unmapped:
        least &= permissions
    known = (each for each in entries if each not in unmapped)
    return acl[:4] + b"".join(
        _ACL_ENTRY.pack(tag, least if tag in common else permissions, who) for tag, permissions, who in known
    )
