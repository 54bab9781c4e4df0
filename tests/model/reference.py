"""The reference: from what the source was at each moment, what may a mount show now?

Files and directories are the source's inodes: a name in a directory leads to one or to none, and a file has one content
after the other. All that is kept with times. A mount believes a name or a content from some moment on
(docs/SEMANTICS.md):

- Nothing that was true only before the mount began, because a restart compares everything.
- What is not pinned: for the attribute time-out.
- What may be pinned: since it was first seen, or may have been.
- What this mount itself changed, or has shown already, never goes back to what was before that.

So each question has a *window*, and the answer must be what was true at some moment of the window, component by
component of a path: directories keep their names wherever they are moved to. A read-only mount pins whatever it has
seen.

An immutable file that is open is one version: each read narrows down which. Of a file that may be mutable each page is
of some version since it was opened.
"""

import itertools
import math
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from cachefs.options import CacheLevel, Options, Revalidate
from cachefs.system.syscalls import statx

T = TypeVar("T")
PAGE = 4096


class Id(NamedTuple):
    """An object of the source."""

    inode: int
    btime_ns: int
    is_directory: bool


Name = tuple[Id, str]
"""A name in a directory."""


@dataclass
class _Moment(Generic[T]):
    """What was true from `since` until `until`."""

    value: T
    since: float
    until: float = math.inf


class Change(NamedTuple):
    """What has changed in the source: names, with what they led to and lead to now, and files with another content."""

    names: dict[Name, tuple[Id | None, Id | None]]
    files: set[Id]


class Source:
    """The history of a directory that is looked at after everything that may have changed it."""

    def __init__(self, root: Path) -> None:
        self._path = root
        self.root: Id
        self._names: defaultdict[Name, list[_Moment[Id | None]]] = defaultdict(list)
        self._contents: defaultdict[Id, list[_Moment[bytes]]] = defaultdict(list)
        self._seen: dict[Id, tuple[int, int]] = {}
        """File → (ctime, size) when its content was read."""
        self._tree: dict[Name, Id] = {}

    def observe(self, began: float, ended: float) -> Change:
        """Something may have changed between these two moments."""
        tree: dict[Name, Id] = {}
        files: set[Id] = set()
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.root = self._id(fd, b"")[0]
        finally:
            os.close(fd)
        todo = [(self.root, str(self._path))]
        while todo:
            directory, path = todo.pop()
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                for name in os.listdir(fd):
                    found, times = self._id(fd, os.fsencode(name))
                    tree[directory, name] = found
                    if found.is_directory:
                        todo.append((found, f"{path}/{name}"))
                    elif self._seen.get(found) != times:
                        self._seen[found] = times
                        files |= self._read(found, f"{path}/{name}", began, ended)
            finally:
                os.close(fd)
        names = {}
        for name in self._tree.keys() | tree.keys():
            before, now = self._tree.get(name), tree.get(name)
            if before != now:
                names[name] = before, now
                self._add(self._names[name], now, began, ended)
        self._tree = tree
        return Change(names, files)

    @staticmethod
    def _id(fd: int, name: bytes) -> tuple[Id, tuple[int, int]]:
        now = statx(fd, name)
        return Id(now.inode, now.btime_ns, stat.S_ISDIR(now.mode)), (now.ctime_ns, now.size)

    def _read(self, file: Id, path: str, began: float, ended: float) -> set[Id]:
        content = Path(path).read_bytes()
        moments = self._contents[file]
        if moments and moments[-1].value == content:
            return set()
        self._add(moments, content, began, ended)
        return {file}

    @staticmethod
    def _add(moments: list[_Moment[T]], value: T, began: float, ended: float) -> None:
        if moments:
            moments[-1].until = ended
        moments.append(_Moment(value, began))

    def files(self) -> set[Id]:
        return set(self._contents)

    def may_be_written(self, files: set[Id], offset: int, data: bytes, now: float) -> None:
        """One of these was written to through the mount. Of those without a name nobody can see whether."""
        for file in files - set(self._tree.values()):
            for moment in self._contents[file][-8:]:  # the last of them, and what that may have become
                before = moment.value.ljust(offset, b"\0")
                content = before[:offset] + data + before[offset + len(data) :]
                self._contents[file].append(_Moment(content, now))

    def leads_to(self, name: Name, since: float) -> set[Id | None]:
        """All that a name has led to since then."""
        moments = self._names.get(name, [])
        found = {moment.value for moment in moments if moment.until > since}
        return found | {None} if not moments or moments[0].since > since else found

    def ways_to(self, objects: set[Id], since: float) -> set[Name]:
        """All names that have led to one of these since then, and to the directories of those names."""
        ways: set[Name] = set()
        while objects:
            names = {
                name
                for name, moments in self._names.items()
                if any(moment.value in objects and moment.until > since for moment in moments)
            }
            objects = {directory for directory, _ in names - ways}
            ways |= names
        return ways

    def now_at(self, name: Name) -> Id | None:
        return self._tree.get(name)

    def contents(self, file: Id, since: float) -> list[tuple[float, bytes]]:
        """All that was in a file since then: (since when, content)."""
        return [(moment.since, moment.value) for moment in self._contents[file] if moment.until > since]

    def names_in(self, directory: Id) -> set[str]:
        """That there ever were."""
        return {name for parent, name in self._names if parent == directory}

    def paths(self) -> Iterator[tuple[str, Id]]:
        todo = [(self.root, "")]
        while todo:
            directory, path = todo.pop()
            for (parent, name), found in self._tree.items():
                if parent == directory:
                    yield path + name, found
                    if found.is_directory:
                        todo.append((found, f"{path}{name}/"))


class Found(NamedTuple):
    """What may be at a path."""

    objects: set[Id]
    is_missing: bool
    """There may be nothing."""
    is_no_directory: bool
    """What is above it may be a file."""
    names: set[Name]
    """Every name that may have been looked up on the way."""

    @property
    def files(self) -> set[Id]:
        return {each for each in self.objects if not each.is_directory}

    @property
    def directories(self) -> set[Id]:
        return {each for each in self.objects if each.is_directory}

    @property
    def one(self) -> Id | None:
        """The only possibility."""
        return next(iter(self.objects)) if len(self.objects) == 1 and not self.is_missing else None


@dataclass
class Opened:
    """An open file."""

    file: object
    """What the system calls take."""
    candidates: set[Id]
    """It is one of these."""
    writable: bool
    immutable: bool
    """For certain."""
    since: float
    """Nothing older than this may be read."""
    versions: list[bytes] = field(default_factory=list)
    """Of an immutable file: which it may be. Narrowed down by each read."""


class Reference:
    """What is allowed on a mount with these options."""

    def __init__(self, source: Source, options: Options, now: float, slack: float) -> None:
        """`slack`: how much longer than it should something may be believed, in seconds."""
        self.source = source
        self._options = options
        self._belief_s = options.unpinned_timeout_s + slack
        self._compares = options.revalidate is not Revalidate.NEVER
        self.began = now
        self.disturbed = False
        """Was the source changed behind this mount's back?"""
        self._names: dict[Name, float] = {}
        """Pinned, maybe: since when."""
        self._files: dict[Id, float] = {}
        self._listed: dict[Id, float] = {}
        self.mounted(now)
        self._told: dict[object, float] = {}
        """Name or file → since when nothing older may be shown."""
        self._moved: set[Id] = set()
        """By another node: the mount may take what each name leads to for a file of its own."""
        self._ever_pinned: set[Id] = set()
        """Maybe, on any mount: it stays immutable over restarts."""
        self.written: set[Id] = set()
        """Maybe, through any mount: it stays mutable over restarts."""
        self.opened: list[Opened] = []
        self._results: set[Id] = set()
        """Maybe: directories that hold results, so that nothing in them is immutable for certain."""

    def mounted(self, now: float) -> None:
        """A new mount. What was pinned before is still pinned, if a comparison after `now` agrees: a directory that has
        not changed vouches for its names. With --revalidate=never nothing is compared, except after a damage."""
        if self._compares:
            self.began = now
            self._names = dict.fromkeys(self._names, now)
            self._files = dict.fromkeys(self._files, now)
            self._listed = dict.fromkeys(self._listed, now)
            self.disturbed = False
        self.frozen: set[Id] = set()
        """Immutable for certain."""
        self.refused: set[Id] = set()
        """Refused to be written to: not unlinked for a while."""
        self._unpinned: set[Id] = set()
        """Maybe: mutable until a new mount."""
        self.opened = []

    # --- windows ---------------------------------------------------------------------------------------------------

    def _since(self, key: object, pinned: Iterable[float | None], now: float) -> float:
        since = min(now - self._belief_s, *(each for each in pinned if each is not None), now)
        return max(since, self.began, self._told.get(key, -math.inf))

    def name_since(self, name: Name, now: float) -> float:
        return self._since(name, (self._names.get(name), self._listed.get(name[0])), now)

    def file_since(self, file: Id, now: float) -> float:
        return self._since(file, (self._files.get(file),), now)

    def find(self, path: str, now: float) -> Found:
        objects: set[Id] = {self.source.root}
        names: set[Name] = set()
        missing = no_directory = False
        for component in path.split("/") if path else ():
            no_directory = no_directory or any(not each.is_directory for each in objects)
            here = {(each, component) for each in objects if each.is_directory}
            names |= here
            found = set(itertools.chain.from_iterable(self.source.leads_to(n, self.name_since(n, now)) for n in here))
            missing = missing or None in found
            objects = {each for each in found if each is not None}
        return Found(objects, missing, no_directory, names)

    def contents(self, files: Iterable[Id], now: float) -> list[tuple[Id, float, bytes]]:
        return [
            (file, since, content)
            for file in files
            for since, content in self.source.contents(file, self.file_since(file, now))
        ]

    # --- what a mount remembers ------------------------------------------------------------------------------------

    def saw(self, found: Found, now: float, *, read: bool = False) -> None:
        """These may be pinned from now on. `read`: a file was opened for reading."""
        if self._options.cache is CacheLevel.NONE or not (read or self._options.read_only):
            return
        since = now - self._belief_s
        for name in found.names | self.source.ways_to(found.files, since):
            self._names.setdefault(name, since)
        for file in found.files:
            self._files.setdefault(file, since)
            self._ever_pinned.add(file)

    def listed(self, directory: Id, now: float) -> None:
        if not self._options.read_only or self._options.cache is CacheLevel.NONE:
            return
        self._listed.setdefault(directory, now - self._belief_s)
        for name in self.source.names_in(directory):
            for each in self.source.leads_to((directory, name), now - self._belief_s):
                if each is not None and not each.is_directory:
                    self._files.setdefault(each, now - self._belief_s)
                    self._ever_pinned.add(each)

    def told(self, key: object, since: float) -> None:
        """Nothing older than this is shown any more."""
        self._told[key] = max(since, self._told.get(key, -math.inf))

    def changed_here(self, change: Change, now: float) -> None:
        """By this mount itself: it shows at once."""
        for name, (_, after) in change.names.items():
            self.told(name, now)
            if after is not None and not after.is_directory and after not in self._files:
                self.told(after, now)
        for file in change.files:
            if not (file in self._moved and file in self._files):
                self.told(file, now)
            self.written.add(file)
            self.frozen.discard(file)

    def renamed(self, old: Name, new: Name, now: float) -> None:
        """By this mount: what was pinned under the old name is pinned under the new one."""
        if old in self._names:
            self._names[new] = now

    def changed_behind(self, change: Change) -> None:
        for before, after in change.names.values():
            self._moved |= {each for each in (before, after) if each is not None}
        if change.names or change.files:
            self.disturbed = True
            self.frozen.clear()

    def unpinned(self) -> None:
        """Some file is mutable until it is pinned, or until a new mount: as if it had been written here."""
        self.frozen.clear()
        self._unpinned = self.source.files()

    def overwritten(self, files: Iterable[Id]) -> None:
        """Through a mount: the directories of these files hold results, and so may those above, for the model."""
        self._results |= {directory for directory, _ in self.source.ways_to(set(files), -math.inf)}
        self.frozen = {file for file in self.frozen if not self._are_results({file})}
        for opened in self.opened:
            opened.immutable = opened.immutable and not self._are_results(opened.candidates)

    def _are_results(self, files: set[Id]) -> bool:
        return any(directory in self._results for directory, _ in self.source.ways_to(files, -math.inf))

    def forgot(self, now: float) -> None:
        """Everything was invalidated: nothing from before is believed."""
        self._names.clear()
        self._files.clear()
        self._listed.clear()
        self.frozen.clear()
        for name in list(self.source._names):
            self.told(name, now)
        for file in list(self.source._contents):
            self.told(file, now)

    # --- open files ------------------------------------------------------------------------------------------------

    def may_be_pinned(self, file: Id) -> bool:
        return file in self._ever_pinned

    def is_immutable(self, files: set[Id]) -> bool:
        """Opened for reading now, for certain."""
        if not self._options.pins_files or self._options.mutable or files & (self.written | self._unpinned):
            return False
        if self._options.metadata_limit is not None:  # any of them may be dropped, or not be pinned
            return False
        if self._are_results(files):
            return False
        return not any(each.writable and each.candidates & files for each in self.opened)

    def check_read(self, opened: Opened, offset: int, length: int, data: bytes) -> str:
        """What is wrong with what was read; empty where nothing is."""
        if opened.immutable:
            opened.versions = [each for each in opened.versions if each[offset : offset + length] == data]
            return "" if opened.versions else "these bytes are of no version that it may be"
        contents = [
            content
            for file in opened.candidates
            for _, content in self.source.contents(file, max(opened.since, self._told.get(file, -math.inf)))
        ]
        if any(content[offset : offset + length] == data for content in contents):
            return ""
        if len(contents) == 1:
            return "these bytes are not in the file"
        for start in range(offset // PAGE * PAGE, offset + len(data), PAGE):
            first = max(start, offset)
            part = data[first - offset : start + PAGE - offset]
            if not any(_is_like(part, content[first : start + PAGE]) for content in contents):
                return f"the bytes from {first} on are of no version"
        return ""


def _is_like(part: bytes, content: bytes) -> bool:
    """A page of a version, which may have been cut off, and filled up with zeros."""
    length = min(len(part), len(content))
    return part[:length] == content[:length] and not any(part[length:])
