"""Names of an inode, and the paths that they form."""

import errno
import stat
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import IntEnum
from itertools import islice

from cachefs.contract.index import ROOT_INODE, Table
from cachefs.errors import failed
from cachefs.printable import one_line
from cachefs.source.directories import ROOT, Directory
from cachefs.store import aliases
from cachefs.store.index.environment import View
from cachefs.store.index.index import Index
from cachefs.store.index.records import PINNED, STALE, Dentry, Inode, inode_key, inode_of_key
from cachefs.system.stat import NO_NUMBER, Stat

REMEMBERED_DIRECTORIES = 4096
REMEMBERED_NAMES = 4096
MOST_NAMES = 64
"""How many names of one file are looked at, at a time."""
_LINK = struct.Struct("<IQ")  # flags, when the name expires
_NEVER_NS = 1 << 63


def links_of(
    view: View, number: int, most: int | None = None, *, after: tuple[int, bytes] | None = None
) -> list[tuple[int, bytes]]:
    """The known names of an inode, (parent, name), in order: at most `most` of those that follow `after`."""
    start = link_key(number, after) + b"\0" if after is not None else None
    links = islice(view.scan(Table.LINKS, inode_key(number), start), most)
    return [(inode_of_key(key[8:16]), key[16:]) for key, _ in links]


def links_if(index: Index, number: int, *, least: int) -> Iterator[tuple[int, bytes]]:
    """All known names of an inode that has at least so many. The index may change meanwhile."""
    links: list[tuple[int, bytes]] = []
    while True:
        after = links[-1] if links else None
        with index.view() as view:
            links = links_of(view, number, MOST_NAMES, after=after)
        if after or len(links) >= least:
            yield from links
        if len(links) < MOST_NAMES:
            return


def has_name(view: View, number: int) -> bool:
    return view.first_key(Table.LINKS, inode_key(number)) is not None


def directory_of(view: View, number: int) -> int | None:
    """The parent of an inode, by the first of its names."""
    link = view.first_key(Table.LINKS, inode_key(number))
    return inode_of_key(link[8:16]) if link is not None else None


def leads_to(view: View, link: tuple[int, bytes], number: int) -> bool:
    """Does the name lead to the inode? False for a link that has outlived its name, or the record of its inode."""
    return bool(number) and _named(view, link) == number


def is_same_place(view: View, link: tuple[int, bytes], others: Iterable[tuple[int, bytes]], now: Stat) -> bool:
    """Does a name differ from one of the others only in the number that its directory has here? `now`: of the inode.

    A directory that was renamed has another number than the descriptors of it that are open, where the source has no
    birth times. Where two objects may have one number, nothing shows that.
    """

    def directory(number: int) -> tuple[int, int] | None:
        record = view.get(Table.INODES, inode_key(number))
        inode = Inode.unpack(number, record) if record is not None else None
        return None if inode is None or inode.source_inode == NO_NUMBER else (inode.device, inode.source_inode)

    place = None if now.may_have_twins else directory(link[0])
    return place is not None and any(name == link[1] and directory(parent) == place for parent, name in others)


def link_key(number: int, link: tuple[int, bytes]) -> bytes:
    return inode_key(number) + inode_key(link[0]) + link[1]


def link_value(expires_ns: int) -> bytes:
    """The value of a link by a name that is not pinned."""
    return _LINK.pack(0, expires_ns)


def name_expires_ns(view: View, number: int, link: tuple[int, bytes]) -> int:
    """CLOCK_MONOTONIC until which a name is valid for an inode; `_NEVER_NS` for a pinned name."""
    value = view.get(Table.LINKS, link_key(number, link))
    if value is None:
        return 0
    if value[0] & PINNED:
        return _NEVER_NS
    return int(_LINK.unpack(value)[1]) if len(value) == _LINK.size else 0


def _validated_run(view: View, link: tuple[int, bytes]) -> int:
    """The run in which a name was compared last; 0: the name is doubtful."""
    value = view.get(Table.DENTRIES, inode_key(link[0]) + link[1])
    return Dentry.unpack(value).validated_run if value is not None else 0


class SecondName(Exception):
    """An object with one link has another known name in the directory in which it was looked up.

    Either it has been renamed, or the directory folds names, and both spellings lead to it. Raised by
    `check_only_name`; the caller asks the source for both names at once.
    """

    def __init__(self, name: bytes) -> None:
        super().__init__(name)
        self.name = name


def number_of(view: View, now: Stat, found_by: tuple[int, bytes]) -> int:
    """The inode number that an object of the source has here, or would get. 0: a new one.

    `found_by`: the name that has led to it. It decides where inode numbers do not stay. There each name is an inode of
    its own: nothing shows that two names are of one object. Where two objects may have one number, it decides first.
    """
    if now.inode == NO_NUMBER:
        number = _named(view, found_by)
        others = (link for link in links_of(view, number, MOST_NAMES) if link != found_by)
        return 0 if any(leads_to(view, link, number) for link in others) else number
    if now.may_have_twins and is_name_of(view, number := _named(view, found_by), found_by, now):
        record = view.get(Table.INODES, inode_key(number))
        known = Inode.unpack(number, record) if record is not None else None
        if known is not None and (known.device, known.source_inode) == (now.device, now.inode):
            return number
    return aliases.number_of(view, now)


def is_name_of(view: View, number: int, link: tuple[int, bytes], now: Stat) -> bool:
    """Was this name known to lead to the inode? `now`: an lstat of it.

    A name outlives the record of its inode. Where two objects may have one number, the next record with the inode's
    number may be of another object.
    """
    outlives = now.may_have_twins and view.get(Table.LINKS, link_key(number, link)) is None
    return not outlives and leads_to(view, link, number)


def _named(view: View, link: tuple[int, bytes]) -> int:
    """The inode that a name leads to. 0: none is known."""
    value = view.get(Table.DENTRIES, inode_key(link[0]) + link[1])
    return Dentry.unpack(value).inode if value is not None else 0


def check_only_name(view: View, parent: int, name: bytes, now: Stat) -> None:
    """Raises `SecondName` if the object that `name` leads to has another name in this directory, the listed one if
    there is one. Not for hard links, and not where numbers do not stay: there each name is an inode of its own."""
    if (now.nlink > 1 and not stat.S_ISDIR(now.mode)) or now.inode == NO_NUMBER:
        return
    number = number_of(view, now, (parent, name))
    found: dict[bytes, int] = {}
    for link in links_of(view, number, MOST_NAMES):
        value = view.get(Table.DENTRIES, inode_key(link[0]) + link[1])
        if link[0] == parent and link[1] != name and value is not None:
            found[link[1]] = Dentry.unpack(value).position
    if found:
        raise SecondName(max(found, key=lambda each: found[each]))


class _Way(IntEnum):
    """How the names of directories lead from the root to one of them."""

    NONE = 0
    DOUBTFUL = 1
    """One of them was dropped, and has not been looked up since."""
    KNOWN = 2


class Paths:
    """Finds paths. Remembers directories with all directories above them, until one of them moves or goes (`forget`).

    A user may give a file very many names (ext4: 65,000). So that no request takes long for that, it looks at
    `MOST_NAMES` of them, and at the name that was looked up last. Only before a file is written all are looked at
    (`links_if`).
    """

    def __init__(self, run: int = 0, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """`run`: the current one."""
        # constants
        self._run = run
        self._monotonic_ns = monotonic_ns
        # state
        self._directories: dict[int, Directory] = {}
        self._last: dict[int, tuple[int, bytes]] = {}
        """Inode number → the name by which it was looked up last."""

    def forget(self) -> None:
        self._directories.clear()

    def begin_run(self, run: int) -> None:
        self._run = run
        self.forget()

    def note(self, inode: Inode) -> None:
        """The record of a directory has changed: whether its name is pinned is remembered, and its identity.

        The change time of an identity counts only after the connection has ended. Then all are forgotten.
        """
        known = self._directories.get(inode.number)
        if known is None:
            return
        is_compared_again = known.identity is not None and known.identity.connection != inode.connection
        if is_compared_again or known.has_pinned_name != _has_pinned_name(inode):
            self.forget()

    def named(self, number: int, parent: int, name: bytes) -> None:
        """A name leads to an inode. A directory that is remembered by another name, or without one, is forgotten."""
        if len(self._last) >= REMEMBERED_NAMES:
            self._last.clear()
        self._last[number] = parent, name
        known = self._directories.get(number)
        if known is not None and (known.parent is None or (known.parent.number, known.name) != (parent, name)):
            self.forget()

    def path(self, view: View, number: int) -> bytes:
        """Raises OSError ESTALE where no name leads to the inode."""
        if number == ROOT_INODE:
            return b""
        known = self._directories.get(number)
        if known is not None:
            return _path_of(known)
        link = self.name(view, number)
        if link is None:
            raise failed(errno.ESTALE)
        return _joined(_path_of(self.directory(view, link[0])), link[1])

    def logged(self, view: View, number: int) -> str:
        """The path as a log shows it; where no name leads to the inode, its number."""
        try:
            return one_line(self.path(view, number))
        except OSError:
            return f"inode {number}"

    def beneath(self, view: View, directory: int, name: bytes) -> bytes:
        """The path of a name in a directory; the name alone where the directory has no path."""
        return _joined(self.directory(view, directory).path, name)

    def name(self, view: View, number: int, not_in: Collection[int] = ()) -> tuple[int, bytes] | None:
        """The best name that leads to the inode: (parent, name). `not_in`: not in these directories; then any other.

        A name in a directory without a path may be of no use: only a descriptor leads to such a directory. A doubtful
        name, which was invalidated, or looked up before the others, may lead to another inode by now; so may a name in
        a directory that was invalidated. Such names are taken only where there is no other.
        """
        if not_in:
            return next((link for link in self.names(view, number) if link[0] not in not_in), None)
        few = links_of(view, number, 3)
        if len({parent for parent, _ in few}) < 2 and len(few) < 3:
            # Always so for a directory, which has one name, or two spellings of it: the recursion by `_leads_up` ends.
            few = [link for link in few if leads_to(view, link, number)]
            return max(few, key=lambda link: self._age(view, number, link), default=None)
        last = self._last.get(number)
        if last is not None and self._is_valid(view, number, last):
            return last
        names = self.names(view, number)
        if len(names) < 2:
            return names[0] if names else None
        return max(names, key=lambda link: (self._leads_up(view, link[0]), *self._age(view, number, link)))

    def _age(self, view: View, number: int, link: tuple[int, bytes]) -> tuple[int, int, bool]:
        """Greater for a name that was looked up later."""
        return _validated_run(view, link), name_expires_ns(view, number, link), link == self._last.get(number)

    def links(self, view: View, number: int) -> list[tuple[int, bytes]]:
        """The names of an inode; where there are very many, some of them and the one that was looked up last."""
        links = links_of(view, number, MOST_NAMES)
        last = self._last.get(number)
        if last is not None and len(links) == MOST_NAMES and last not in links:
            links.insert(0, last)
        return links

    def names(self, view: View, number: int) -> list[tuple[int, bytes]]:
        """Those of `links` that do lead to the inode."""
        return [link for link in self.links(view, number) if leads_to(view, link, number)]

    def _is_valid(self, view: View, number: int, link: tuple[int, bytes]) -> bool:
        """Is this name valid? Then no other name is better."""
        return (
            leads_to(view, link, number)
            and _validated_run(view, link) == self._run
            and name_expires_ns(view, number, link) > self._monotonic_ns()
            and self._leads_up(view, link[0]) is _Way.KNOWN
        )

    def known_name(self, view: View, number: int) -> tuple[int, bytes] | None:
        """The best name, if the inode and the directories above it were not dropped since they were looked up."""
        link = self.name(view, number)
        if link is None or _is_stale(view, number) or self._leads_up(view, link[0]) is not _Way.KNOWN:
            return None
        return link

    def _leads_up(self, view: View, directory: int) -> _Way:
        """Does a path lead to the directory? A directory has one name only, so this does not recurse deeply."""
        try:
            at = self.directory(view, directory)
        except OSError:
            return _Way.NONE
        way = _Way.KNOWN
        while at.identity is not None:
            if at.parent is None:
                return _Way.NONE
            if _is_stale(view, at.number):
                way = _Way.DOUBTFUL
            at = at.parent
        return way

    def directory(self, view: View, number: int) -> Directory:
        """A directory and all directories above it. Raises OSError ESTALE where there is no such directory."""
        waiting: dict[int, tuple[tuple[int, bytes] | None, Inode]] = {}
        above: Directory | None = None
        while above is None:
            if number == ROOT_INODE:
                above = ROOT
            elif number in self._directories:
                above = self._directories[number]
            else:
                value = view.get(Table.INODES, inode_key(number))
                if value is None or number in waiting:  # the names form a circle
                    raise failed(errno.ESTALE)
                inode = Inode.unpack(number, value)
                link = self.name(view, number)
                waiting[number] = link, inode
                if link is None:
                    break
                number = link[0]
        while waiting:
            number, (link, inode) = waiting.popitem()
            if not inode.is_directory:
                raise failed(errno.ENOTDIR)
            name = link[1] if link is not None else b""
            above = Directory(number, inode.identity, above, name, _has_pinned_name(inode))
            if len(self._directories) >= REMEMBERED_DIRECTORIES:
                self._directories.clear()
            self._directories[number] = above
        assert above is not None
        return above


def _is_stale(view: View, number: int) -> bool:
    value = view.get(Table.INODES, inode_key(number))
    return value is not None and bool(Inode.unpack(number, value).flags & STALE)


def _has_pinned_name(inode: Inode) -> bool:
    return inode.flags & (PINNED | STALE) == PINNED


def _joined(path: bytes | None, name: bytes) -> bytes:
    return path + b"/" + name if path else name


def _path_of(directory: Directory) -> bytes:
    if directory.path is None:
        raise failed(errno.ESTALE)
    return directory.path
