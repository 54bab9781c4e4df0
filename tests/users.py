"""Acting as another user: a thread with its own uid, gid, groups and, unless root, no capabilities."""

import ctypes
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cachefs.system.syscalls import set_thread_groups

_SYS_SETRESUID, _SYS_SETRESGID = {"x86_64": (117, 119)}.get(os.uname().machine, (147, 149))


def as_user(uid: int, gid: int, groups: Iterable[int], function: Callable[[], object]) -> object:
    """What the function returns as that user, or the errno it fails with."""
    result: list[object] = []

    def run() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        set_thread_groups(list(groups))
        # Raw system calls: glibc would change all threads of the process.
        libc.syscall(_SYS_SETRESGID, gid, gid, gid)
        libc.syscall(_SYS_SETRESUID, uid, uid, uid)
        try:
            result.append(function())
        except OSError as error:
            result.append(error.errno)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


# The interpreter may lie where only root can read, so everything is imported before privileges are dropped.
_COMMAND = """
import os, sys
import daemon.cli.main, daemon.session, daemon.cli.display, click, trio, encodings.idna
uid, gid = map(int, sys.argv[1:3])
os.setgroups([]); os.setgid(gid); os.setuid(uid)
if sys.argv[3] == "read":
    print(open(sys.argv[4], "rb").read().hex(), end="")
else:
    daemon.cli.main.main(sys.argv[3:])
"""


def cachefs_as(
    uid: int, gid: int, environment: Mapping[str, str], *arguments: object
) -> subprocess.CompletedProcess[str]:
    """Run the command line as that user; `read FILE` prints its bytes."""
    repository = Path(__file__).resolve().parent.parent
    python_path = os.pathsep.join([str(repository), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", _COMMAND, str(uid), str(gid), *map(str, arguments)],
        env={"PATH": os.defpath, "PYTHONPATH": python_path, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )


IDS = (1, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0x80000001, 3_000_000_000, 0xFFFFFFFE)
"""The range of user and group ids, with its edges as a signed and as an unsigned number. 2^32 - 1 is no id."""

USER_OBJ, USER, GROUP_OBJ, MASK, OTHER = 1, 2, 4, 16, 32
NOBODYS = 0xFFFFFFFF
"""The id of an entry that has none."""
CAPABILITY = struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0)
"""A value of security.capability: cap_net_raw, effective and permitted."""


def acl(*entries: tuple[int, int, int]) -> bytes:
    """A POSIX ACL as the kernel stores it: (tag, permissions, id)."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def open_to_all(path: Path) -> None:
    """Let other users walk to a path."""
    for parent in path.parents:
        if parent != Path("/") and parent.stat().st_uid == os.geteuid():
            parent.chmod(parent.stat().st_mode | 0o011)


MAY_NOT_RAISE_LIMITS = ["setpriv", "--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource"]
"""Before a command: root that may not raise hard limits, like every other user."""
