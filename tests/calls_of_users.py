"""Calls of users in a tree: what each returns, in a form that two trees have in common."""

import mmap
import os
import random
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.users import acl, as_user

ACL = "system.posix_acl_access"
DIRECTORIES = ("", "a", "b", "a/c", "b/d")
NAMES = ("x", "y", "z")
MODES = (0o644, 0o600, 0o666, 0o640, 0o604, 0o755, 0o700, 0o444, 0o000, 0o777)
DIRECTORY_MODES = (0o755, 0o700, 0o777, 0o1777, 0o2775, 0o711, 0o744, 0o750, 0o733)
SIZES = (5, 40, 4096, 5000, 9000)
OPENS = (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_TRUNC)
SLOTS = 3
KNOWN_FILE = 0.8
"""The share of paths that lead to something."""


class User(NamedTuple):
    uid: int
    groups: tuple[int, ...]


ROOT = User(0, ())
USERS = (ROOT, User(7301, (7390,)), User(7302, (7390,)), User(7303, ()))
Call = tuple[str, tuple[object, ...]]
Outcome = tuple[str, object]
"""("returned", what) or ("failed", errno)."""

READS = frozenset({"stat", "listing", "content", "target", "acl", "read", "end", "mapped", "fstat"})
"""Calls that change nothing: they may be repeated."""
BY_DESCRIPTOR = frozenset({"read", "end", "mapped", "fstat", "write", "ftruncate", "fchmod", "futimens", "close"})


class Side:
    """One of the trees, and what users have open in it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._opened: dict[tuple[User, int], int] = {}

    def do(self, user: User, call: Call) -> Outcome:
        name, arguments = call
        method: Callable[..., object] = getattr(self, f"_{name}")
        if name in BY_DESCRIPTOR or name == "open":
            arguments = (user, *arguments)
        found = as_user(user.uid, user.uid, user.groups, lambda: ("returned", method(*arguments)))
        return found if isinstance(found, tuple) else ("failed", found)

    def has_open(self, user: User, slot: int) -> bool:
        return (user, slot) in self._opened

    def opened(self) -> list[tuple[User, int]]:
        return sorted(self._opened)

    def files(self) -> list[str]:
        found = [Path(above, name) for above, _, names in os.walk(self._root) for name in names]
        return sorted(str(path.relative_to(self._root)) for path in found)

    def end(self) -> None:
        for fd in self._opened.values():
            os.close(fd)
        self._opened.clear()

    # --- by a path -------------------------------------------------------------------------------------------------

    def _stat(self, path: str) -> object:
        return attributes(os.lstat(self._root / path))

    def _listing(self, path: str) -> object:
        return sorted(os.listdir(self._root / path))

    def _content(self, path: str) -> object:
        fd = os.open(self._root / path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return os.read(fd, 1 << 20)
        finally:
            os.close(fd)

    def _target(self, path: str) -> object:
        return os.readlink(self._root / path)

    def _acl(self, path: str) -> object:
        """Only entries of named users and groups: the others are the mode, with or without an ACL."""
        with suppress(OSError):
            value = os.getxattr(self._root / path, ACL, follow_symlinks=False)
            entries = struct.iter_unpack("<HHI", value[4:])
            return sorted(entry for entry in entries if entry[0] in (0x02, 0x08))
        return []

    def _setacl(self, path: str, value: bytes) -> object:
        os.setxattr(self._root / path, ACL, value, follow_symlinks=False)
        return None

    def _note(self, path: str, value: bytes) -> object:
        os.setxattr(self._root / path, "user.note", value, follow_symlinks=False)
        return None

    def _put(self, path: str, flags: int, content: bytes) -> object:
        fd = os.open(self._root / path, os.O_WRONLY | flags, 0o666)
        try:
            return os.write(fd, content)
        finally:
            os.close(fd)

    def _mkdir(self, path: str, mode: int) -> object:
        os.mkdir(self._root / path, mode)
        return None

    def _rmdir(self, path: str) -> object:
        os.rmdir(self._root / path)
        return None

    def _unlink(self, path: str) -> object:
        os.unlink(self._root / path)
        return None

    def _symlink(self, target: str, path: str) -> object:
        os.symlink(target, self._root / path)
        return None

    def _rename(self, old: str, new: str) -> object:
        os.rename(self._root / old, self._root / new)
        return None

    def _link(self, old: str, new: str) -> object:
        os.link(self._root / old, self._root / new, follow_symlinks=False)
        return None

    def _chmod(self, path: str, mode: int) -> object:
        os.chmod(self._root / path, mode)
        return None

    def _chown(self, path: str, uid: int, gid: int) -> object:
        os.chown(self._root / path, uid, gid, follow_symlinks=False)
        return None

    def _truncate(self, path: str, size: int) -> object:
        os.truncate(self._root / path, size)
        return None

    # --- by a descriptor -------------------------------------------------------------------------------------------

    def _open(self, user: User, slot: int, path: str, flags: int) -> object:
        fd = os.open(self._root / path, flags | os.O_NONBLOCK, 0o640)
        if (user, slot) in self._opened:
            os.close(self._opened.pop((user, slot)))
        self._opened[user, slot] = fd
        return attributes(os.fstat(fd))

    def _close(self, user: User, slot: int) -> object:
        os.close(self._opened.pop((user, slot)))
        return None

    def _read(self, user: User, slot: int, offset: int, length: int) -> object:
        return os.pread(self._opened[user, slot], length, offset)

    def _end(self, user: User, slot: int) -> object:
        fd = self._opened[user, slot]
        end = os.lseek(fd, 0, os.SEEK_END)  # not after an fstat, which would make the kernel ask for the size
        return 0 if stat.S_ISDIR(os.fstat(fd).st_mode) else end

    def _mapped(self, user: User, slot: int) -> object:
        fd = self._opened[user, slot]
        size = os.fstat(fd).st_size
        if not size:
            return b""
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
            return mapped[:]

    def _fstat(self, user: User, slot: int) -> object:
        return attributes(os.fstat(self._opened[user, slot]))

    def _write(self, user: User, slot: int, offset: int, content: bytes) -> object:
        return os.pwrite(self._opened[user, slot], content, offset)

    def _ftruncate(self, user: User, slot: int, size: int) -> object:
        os.ftruncate(self._opened[user, slot], size)
        return None

    def _fchmod(self, user: User, slot: int, mode: int) -> object:
        os.fchmod(self._opened[user, slot], mode)
        return None

    def _futimens(self, user: User, slot: int, time_s: int) -> object:
        os.utime(self._opened[user, slot], (time_s, time_s))
        return None


def attributes(found: os.stat_result) -> object:
    """Without what differs between two trees (numbers, times), and without what a directory has by its filesystem."""
    is_directory = stat.S_ISDIR(found.st_mode)
    return oct(found.st_mode), found.st_uid, found.st_gid, *(() if is_directory else (found.st_nlink, found.st_size))


def random_acl(draw: random.Random) -> bytes:
    ids = {0x01: 0xFFFFFFFF, 0x02: draw.choice(USERS[1:]).uid, 0x04: 0xFFFFFFFF, 0x10: 0xFFFFFFFF, 0x20: 0xFFFFFFFF}
    return acl(*((tag, draw.randrange(8), number) for tag, number in ids.items()))


def calls(
    draw: random.Random, files: Callable[[], list[str]], *, by_path: bool = False, changes: bool = False
) -> Iterator[Call]:
    """Random calls, most of them for one of the `files`. `by_path`: only such. `changes`: only such."""

    def path() -> str:
        known = files()
        if known and draw.random() < KNOWN_FILE:
            return draw.choice(known)
        return os.path.join(draw.choice(DIRECTORIES), draw.choice(NAMES))

    def anything() -> str:
        return draw.choice([path(), draw.choice(DIRECTORIES[1:])])

    def content() -> bytes:
        return (b"<%d>" % draw.randrange(10**9) * 900)[: draw.choice(SIZES)]

    def slot() -> int:
        return draw.randrange(SLOTS)

    kinds: dict[str, Callable[[], tuple[object, ...]]] = {
        "stat": lambda: (anything(),),
        "listing": lambda: (draw.choice(DIRECTORIES),),
        "content": lambda: (path(),),
        "target": lambda: (path(),),
        "acl": lambda: (anything(),),
        "setacl": lambda: (anything(), random_acl(draw)),
        "note": lambda: (anything(), content()[:40]),
        "put": lambda: (path(), draw.choice([0, os.O_TRUNC, os.O_CREAT, os.O_CREAT | os.O_EXCL]), content()),
        "mkdir": lambda: (anything(), draw.choice(DIRECTORY_MODES)),
        "rmdir": lambda: (anything(),),
        "unlink": lambda: (path(),),
        "symlink": lambda: (draw.choice(["x", "a/x", "nowhere"]), path()),
        "rename": lambda: (anything(), anything()),
        "link": lambda: (path(), path()),
        "chmod": lambda: draw.choice(
            [(path(), draw.choice(MODES)), (draw.choice(DIRECTORIES[1:]), draw.choice(DIRECTORY_MODES))]
        ),
        "chown": lambda: (anything(), draw.choice(USERS).uid, draw.choice([7301, 7302, 7390])),
        "truncate": lambda: (path(), draw.choice(SIZES)),
        "open": lambda: (slot(), path(), draw.choice(OPENS)),
        "close": lambda: (slot(),),
        "read": lambda: (slot(), draw.choice([0, 4000]), draw.choice([10, 9000])),
        "end": lambda: (slot(),),
        "mapped": lambda: (slot(),),
        "fstat": lambda: (slot(),),
        "write": lambda: (slot(), draw.choice([0, 3, 4090]), content()),
        "ftruncate": lambda: (slot(), draw.choice(SIZES)),
        "fchmod": lambda: (slot(), draw.choice(MODES)),
        "futimens": lambda: (slot(), draw.randrange(10**9)),
    }
    names = [
        name
        for name in kinds
        if not (by_path and (name in BY_DESCRIPTOR or name == "open")) and not (changes and name in READS)
    ]
    weights = [3 if name in ("open", "put", "content", "read", "mapped") else 1 for name in names]
    while True:
        (name,) = draw.choices(names, weights)
        yield name, kinds[name]()
