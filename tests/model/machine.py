"""Draws operations on a mount and changes behind its back, and compares every answer with the reference."""

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cachefs.options import Options
from tests.model.other_node import CONTENTS, NAMES, OtherNode
from tests.model.reference import Found, Id, Opened, Reference, Source

PATHS = ["a", "b", "d/a", "d/b", "e/a", "d", "e", "d/e", "e/b"]
"""Few, so that most operations meet something."""
SIZES = [0, 1, 5000, 5000, 300_000]
"""Two of the same size, so that sizes alone give nothing away; one beyond what is fetched at once."""
MOST_OPEN = 6
ATTEMPTS = 3
"""So often a whole file is read, at most, until nothing tells the reader that it has changed."""

paths = st.runner().flatmap(lambda machine: st.sampled_from(machine.focus))
sizes = st.sampled_from(SIZES)
numbers = st.integers(0, 1000)
settles = st.booleans()
shares = st.sampled_from([0.3, 1.0])


class Driven(Protocol):
    """A mount: system calls, commands, and what happens to it."""

    def stat(self, path: str) -> tuple[int, int]: ...
    def open(self, path: str, flags: int) -> Any: ...
    def read(self, file: Any, offset: int, length: int) -> bytes: ...
    def write(self, file: Any, offset: int, data: bytes) -> int: ...
    def close(self, file: Any) -> None: ...
    def listdir(self, path: str) -> list[str]: ...
    def truncate(self, path: str, size: int) -> None: ...
    def mkdir(self, path: str) -> None: ...
    def unlink(self, path: str) -> None: ...
    def rmdir(self, path: str) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def link(self, old: str, new: str) -> None: ...
    def invalidate(self, path: str) -> None: ...
    def evict(self, path: str) -> None: ...
    def unpin(self, path: str) -> None: ...
    def shrink(self, share: float) -> None: ...
    def pass_time(self, seconds: float) -> None: ...
    def remount(self) -> None: ...
    def crash(self) -> None: ...
    def lose_index(self) -> None: ...


class Machine(RuleBasedStateMachine):
    """One run: a source, a mount of it, and what comes."""

    options: Options
    slack_s = 0.05
    outlives_daemon = False
    """After a crash the next daemon takes the mount over, with all that is pinned."""
    judges_errors = True
    """False: any system call may fail; what does not must show what is allowed."""
    waits = (0.5, 1.2, 2.5)
    """Seconds that may pass: within the attribute time-out, beyond it, beyond the minimum age."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(dir=os.environ.get("MODEL_DIR")))
        self.root = self.place / "source"
        self.root.mkdir()
        self.other_node = OtherNode(self.root)
        self.other_node.build()
        self.source = Source(self.root)
        self.source.observe(self.now(), self.now())
        self.driven = self.make()
        self.driven.pass_time(self.waits[-1])
        self.reference = Reference(self.source, self.options, self.now(), self.slack_s)
        self.focus = PATHS

    def make(self) -> Driven:
        """Mount."""
        raise NotImplementedError

    def now(self) -> float:
        return time.monotonic()

    def end(self) -> None:
        """Unmount."""

    def teardown(self) -> None:
        try:
            self.end()
        finally:
            shutil.rmtree(self.place, ignore_errors=True)

    @initialize(focus=st.lists(st.sampled_from(PATHS), min_size=2, max_size=5, unique=True))
    def look_at_some(self, focus: list[str]) -> None:
        """Each run is about a few paths, so that more happens to each."""
        self.focus = focus

    # --- changes behind the mount's back ---------------------------------------------------------------------------

    @rule(change=st.sampled_from([change.__name__ for change in CONTENTS]), path=paths, size=sizes, settles=settles)
    def source_changes(self, change: str, path: str, size: int, settles: bool) -> None:
        self._behind(lambda: getattr(self.other_node, change)(path, size), settles=settles)

    @rule(change=st.sampled_from([change.__name__ for change in NAMES]), path=paths, other=paths, settles=settles)
    def names_change(self, change: str, path: str, other: str, settles: bool) -> None:
        self._behind(lambda: getattr(self.other_node, change)(path, other), settles=settles)

    def _behind(self, change: Callable[[], object], *, settles: bool) -> None:
        """`settles`: and everything grows old."""
        began = self.now()
        try:
            change()
        except OSError as error:
            note(f"    {error.strerror}")
        self.reference.changed_behind(self.source.observe(began, self.now()))
        if settles:
            self.driven.pass_time(self.waits[-1])

    # --- what happens to the mount ---------------------------------------------------------------------------------

    @rule(seconds=st.integers(0, 2))
    def time_passes(self, seconds: int) -> None:
        self.driven.pass_time(self.waits[seconds])

    @rule(share=shares)
    def memory_is_short(self, share: float) -> None:
        self.driven.shrink(share)

    @rule(
        what=st.sampled_from(["invalidate", "evict", "unpin", "invalidate_all", "remount", "crash", "lose_index"]),
        path=paths,
    )
    def happens(self, what: str, path: str) -> None:
        getattr(self, f"_{what}")(path)

    def _evict(self, path: str) -> None:
        with self._unknown_paths():
            self.driven.evict(path)

    def _unpin(self, path: str) -> None:
        if not self._read_only:
            with self._unknown_paths():
                self.driven.unpin(path)
            self.reference.unpinned()

    @contextmanager
    def _unknown_paths(self) -> Iterator[None]:
        """Of what is not known nothing is cached."""
        try:
            yield
        except OSError as error:
            self._check(error.errno == errno.ENOENT, str(error))

    def _invalidate_all(self, _: str) -> None:
        self._close_all()
        began = self.now()
        self.driven.invalidate("")
        self.reference.forgot(began)

    def _invalidate(self, path: str) -> None:
        self.driven.invalidate(path)
        self.reference.frozen.clear()

    def _remount(self, _: str) -> None:
        self._begin_anew(self.driven.remount)

    def _crash(self, _: str) -> None:
        if self.outlives_daemon:
            self._close_all()
            self.driven.crash()
        else:
            self._begin_anew(self.driven.crash)

    def _lose_index(self, _: str) -> None:
        self._begin_anew(self.driven.lose_index)

    def _begin_anew(self, how: Callable[[], None]) -> None:
        self._close_all()
        began = self.now()
        how()
        self.reference.mounted(began)

    def _close_all(self) -> None:
        for opened in self.reference.opened:
            self.driven.close(opened.file)
        self.reference.opened = []

    # --- reading ---------------------------------------------------------------------------------------------------

    def _check(self, condition: object, what: str) -> None:
        assert condition, what

    def _explain(self, error: OSError, found: Found, *, kinds: tuple[int, ...] = ()) -> None:
        """May a system call with a path fail like this?"""
        allowed = set(kinds)
        if found.is_missing:
            allowed.add(errno.ENOENT)
        if found.is_no_directory:
            allowed.add(errno.ENOTDIR)
        self._check(error.errno in allowed or not self.judges_errors, f"{error}, where there may be {_told(found)}")

    @rule(path=paths)
    def stat(self, path: str) -> None:
        now = self.now()
        found = self.reference.find(path, now)
        contents = self.reference.contents(found.files, now)
        self.reference.saw(found, now)
        try:
            mode, size = self.driven.stat(path)
        except OSError as error:
            self._explain(error, found)
            return
        if mode & 0o170000 == 0o040000:
            self._check(found.directories, f"{path} is no directory, but {_told(found)}")
        else:
            sizes = {len(content) for _, _, content in contents}
            self._check(size in sizes, f"{path} has {size} bytes and not {sizes}")

    @rule(path=st.sampled_from(["", "d", "e", "d/e"]))
    def list_directory(self, path: str) -> None:
        now = self.now()
        found = self.reference.find(path, now)
        self.reference.saw(found, now)
        windows = {each: self._names_in(each, now) for each in found.directories}
        for directory in found.directories:
            self.reference.listed(directory, now)
        try:
            names = self.driven.listdir(path)
        except OSError as error:
            self._explain(error, found, kinds=(errno.ENOTDIR,) if found.files else ())
            return
        self._check(len(names) == len(set(names)), f"a name is listed twice: {sorted(names)}")
        reasons = [self._misfit(set(names), *window) for window in windows.values()]
        self._check("" in reasons, f"{path or '/'} lists {sorted(names)}: {reasons}")

    def _names_in(self, directory: Id, now: float) -> tuple[set[str], set[str]]:
        """(names that must be listed, names that may be)"""
        must, may = set(), set()
        for name in self.source.names_in(directory):
            found = self.source.leads_to((directory, name), self.reference.name_since((directory, name), now))
            if None not in found:
                must.add(name)
            if found != {None}:
                may.add(name)
        return must, may

    @staticmethod
    def _misfit(names: set[str], must: set[str], may: set[str]) -> str:
        if must - names:
            return f"{sorted(must - names)} must be there"
        return f"{sorted(names - may)} cannot be there" if names - may else ""

    @rule(path=paths)
    def open_to_read(self, path: str) -> None:
        self._open_to_read(path)

    def _open_to_read(self, path: str) -> Opened | None:
        if len(self.reference.opened) >= MOST_OPEN:
            return None
        now = self.now()
        found = self.reference.find(path, now)
        contents = self.reference.contents(found.files, now)
        immutable = self.reference.is_immutable(found.files)
        self.reference.saw(found, now, read=True)
        try:
            file = self.driven.open(path, os.O_RDONLY)
        except OSError as error:
            self._explain(error, found, kinds=(errno.EISDIR,) if found.directories else ())
            return None
        self._check(found.files, f"{path} was opened, where there may be {_told(found)}")
        since = min(since for _, since, _ in contents)
        since = min((self.reference.file_since(each, now) for each in found.files), default=since)
        opened = Opened(file, found.files, False, immutable, since, [content for _, _, content in contents])
        self.reference.opened.append(opened)
        if immutable and found.one is not None and not self.reference.disturbed:
            self.reference.frozen.add(found.one)
        return opened

    @precondition(lambda self: self.reference.opened)
    @rule(which=numbers, start=numbers, size=sizes)
    def read(self, which: int, start: int, size: int) -> None:
        opened = self.reference.opened[which % len(self.reference.opened)]
        if not opened.writable:
            self._read(opened, start * 300, size)

    def _read(self, opened: Opened, offset: int, length: int) -> bool:
        """False if it failed."""
        try:
            data = self.driven.read(opened.file, offset, length)
        except OSError as error:
            self._check(
                (error.errno == errno.ESTALE and self.reference.disturbed) or not self.judges_errors,
                f"{error}, though nobody changed the file",
            )
            return False
        wrong = self.reference.check_read(opened, offset, length, data)
        self._check(not wrong, f"{length} bytes from {offset}: {wrong}: {_shown(data)}")
        return True

    @rule(path=paths, step=st.sampled_from([4096, 1 << 20]))
    def read_all(self, path: str, step: int) -> None:
        """Open, read from start to end, close. A file that has changed says so, and then is there anew."""
        for _ in range(ATTEMPTS):
            opened = self._open_to_read(path)
            if opened is None:
                return
            longest = max(
                [*map(len, opened.versions)]
                + [len(c) for f in opened.candidates for _, c in self.source.contents(f, opened.since)]
            )
            complete = all(self._read(opened, offset, step) for offset in range(0, longest + 1, step))
            self._close(opened)
            if complete:
                return
        self._check(not self.judges_errors, f"{path} cannot be read, however often it is opened")

    @rule(path=paths, start=numbers)
    def read_some(self, path: str, start: int) -> None:
        """Open, read somewhere, close."""
        opened = self._open_to_read(path)
        if opened is not None:
            self._read(opened, start * 300, 5000)
            self._close(opened)

    @precondition(lambda self: self.reference.opened)
    @rule(which=numbers)
    def close(self, which: int) -> None:
        self._close(self.reference.opened[which % len(self.reference.opened)])

    def _close(self, opened: Opened) -> None:
        self.reference.opened.remove(opened)
        self.driven.close(opened.file)

    # --- changing --------------------------------------------------------------------------------------------------

    def _change(self, call: Callable[[], Any], *found: Found, kinds: tuple[int, ...] = ()) -> tuple[Any, dict, set[Id]]:
        """Make a change through the mount. (what it returned, names that changed, files that changed); an error
        changes nothing."""
        began = self.now()
        error, result = None, None
        try:
            result = call()
        except OSError as caught:
            error = caught
        change = self.source.observe(began, self.now())
        if error is None:
            self.reference.changed_here(change, self.now())
            return result, change.names, change.files
        self._check(not change.names and not change.files, f"{error}, but {change} was made")
        allowed = {errno.ENOENT: "is_missing", errno.ENOTDIR: "is_no_directory"}
        explained = error.errno in kinds or any(
            getattr(each, allowed.get(error.errno or 0, ""), False) for each in found
        )
        explained = explained or (error.errno == errno.ESTALE and self.reference.disturbed)
        self._check(
            explained or not self.judges_errors, f"{error}, where there may be {' and '.join(map(_told, found))}"
        )
        return error, {}, set()

    @property
    def _read_only(self) -> bool:
        return self.options.read_only

    def _parent(self, path: str, now: float) -> Found:
        """The directory in which the last name of a path is."""
        found = self.reference.find(path.rpartition("/")[0], now)
        return found._replace(is_no_directory=found.is_no_directory or bool(found.files))

    @precondition(lambda self: not self._read_only and len(self.reference.opened) < MOST_OPEN)
    @rule(path=paths, exclusive=st.booleans(), truncate=st.booleans())
    def open_to_write(self, path: str, exclusive: bool, truncate: bool) -> None:
        now = self.now()
        found, parent = self.reference.find(path, now), self._parent(path, now)
        kinds = [errno.EISDIR] * bool(found.directories)
        kinds += [errno.EEXIST] * bool(exclusive and found.objects)
        kinds += [errno.EPERM] * any(map(self.reference.may_be_pinned, found.files))
        frozen = found.one is not None and found.one in self.reference.frozen
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL * exclusive | os.O_TRUNC * truncate
        result, names, files = self._change(lambda: self.driven.open(path, flags), found, parent, kinds=tuple(kinds))
        if isinstance(result, OSError):
            self._note_refusal(result, found)
            return
        self._check(not frozen, f"{path} is immutable, and was opened for writing")
        self._check(len(names) <= 1, f"{path} was opened, and {names} have changed")
        candidates = found.files | {after for _, after in names.values() if after is not None}
        if names:
            ((directory, name),) = names
            self._check(directory in parent.directories, f"{path} was created in another directory")
            self._check(name == path.rpartition("/")[2], f"{path} was created as {name}")
            candidates = {after for _, after in names.values() if after is not None}
        self._check(files <= candidates, f"{path} was opened, and {files} have changed")
        self.reference.written |= candidates
        self.reference.overwritten(candidates)
        since = self.now()
        self.reference.opened.append(Opened(result, candidates, True, False, since))

    @precondition(lambda self: any(each.writable for each in self.reference.opened))
    @rule(which=numbers, start=numbers, size=sizes)
    def write(self, which: int, start: int, size: int) -> None:
        writable = [each for each in self.reference.opened if each.writable]
        opened = writable[which % len(writable)]
        data = self.other_node.content(size)
        result, names, files = self._change(lambda: self.driven.write(opened.file, start * 10, data))
        self._check(not isinstance(result, OSError), f"a write failed: {result}")
        self.source.may_be_written(opened.candidates, start * 10, data, self.now())
        self._check(not names, f"a write changed {names}")
        self._check(files <= opened.candidates, f"a write changed {files} and not {opened.candidates}")

    @precondition(lambda self: not self._read_only)
    @rule(how=st.sampled_from(["rename", "link", "remove", "mkdir", "truncate"]), path=paths, other=paths, size=sizes)
    def change(self, how: str, path: str, other: str, size: int) -> None:
        """Through the mount."""
        if how == "truncate":
            self._truncate(path, size)
        elif how == "remove":
            self._remove(path, directory=(self.root / path).is_dir())
        elif how == "mkdir":
            self._mkdir(path)
        else:
            getattr(self, f"_{how}")(path, other)

    def _truncate(self, path: str, size: int) -> None:
        found = self.reference.find(path, self.now())
        kinds = [errno.EISDIR] * bool(found.directories)
        kinds += [errno.EPERM] * any(map(self.reference.may_be_pinned, found.files))
        frozen = found.one is not None and found.one in self.reference.frozen
        result, names, files = self._change(lambda: self.driven.truncate(path, size), found, kinds=tuple(kinds))
        if isinstance(result, OSError):
            self._note_refusal(result, found)
            return
        self._check(not frozen, f"{path} is immutable, and was truncated")
        self._check(not names and files <= found.files, f"truncating {path} changed {names} and {files}")
        self.reference.written |= found.files
        self.reference.overwritten(found.files)

    def _mkdir(self, path: str) -> None:
        now = self.now()
        found, parent = self.reference.find(path, now), self._parent(path, now)
        kinds = (errno.EEXIST,) if found.objects else ()
        result, names, _ = self._change(lambda: self.driven.mkdir(path), parent, kinds=kinds)
        if not isinstance(result, OSError):
            self._check_added(path, parent, names)

    def _check_added(self, path: str, parent: Found, names: dict) -> None:
        self._check(len(names) == 1, f"{path} was made, and {names} have changed")
        ((directory, name),) = names
        self._check(directory in parent.directories, f"{path} was made in another directory")
        self._check(name == path.rpartition("/")[2], f"{path} was made as {name}")

    def _remove(self, path: str, directory: bool) -> None:
        now = self.now()
        found, parent = self.reference.find(path, now), self._parent(path, now)
        kinds = (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY)
        kinds += (errno.EPERM,) * bool(found.files & self.reference.refused)
        remove = self.driven.rmdir if directory else self.driven.unlink
        result, names, _ = self._change(lambda: remove(path), found, kinds=kinds)
        if isinstance(result, OSError):
            self._check_refusal(result, found, directory=directory)
            return
        self._check(len(names) == 1, f"{path} was removed, and {names} have changed")
        ((above, name), (_, after)) = next(iter(names.items()))
        self._check(above in parent.directories and after is None, f"{path} was removed, and {names} have changed")
        self._check(name == path.rpartition("/")[2], f"{path} was removed as {name}")

    def _note_refusal(self, error: OSError, found: Found) -> None:
        """A process that was refused to write to a file is refused to unlink it, for a while."""
        if error.errno == errno.EPERM:
            self.reference.refused |= found.files

    def _check_refusal(self, error: OSError, found: Found, *, directory: bool) -> None:
        if error.errno == errno.EISDIR:
            self._check(not directory and found.directories, f"{error}: there is {_told(found)}")
        if error.errno == errno.ENOTDIR:
            self._check(found.is_no_directory or (directory and found.files), f"{error}: there is {_told(found)}")

    def _rename(self, old: str, new: str) -> None:
        now = self.now()
        found, above, target = self.reference.find(old, now), self._parent(old, now), self._parent(new, now)
        kinds = (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EINVAL, errno.EEXIST)
        result, names, files = self._change(lambda: self.driven.rename(old, new), found, above, target, kinds=kinds)
        if isinstance(result, OSError) or not names:
            return
        self._check(len(names) == 2 and not files, f"{old} was renamed to {new}, and {names} have changed")
        gone = {name: before for name, (before, after) in names.items() if after is None}
        came = {name: after for name, (_, after) in names.items() if after is not None}
        self._check(len(gone) == len(came) == 1, f"{old} was renamed to {new}, and {names} have changed")
        ((old_name, moved), (new_name, now_there)) = next(iter(gone.items())), next(iter(came.items()))
        self._check(moved == now_there, f"{old} was renamed to {new}, and {names} have changed")
        self._check(old_name[0] in above.directories and new_name[0] in target.directories, "in another directory")
        self._check((old_name[1], new_name[1]) == (old.rpartition("/")[2], new.rpartition("/")[2]), "another name")

        self.reference.renamed(old_name, new_name, now)
        self.reference.overwritten([moved])

    def _link(self, old: str, new: str) -> None:
        now = self.now()
        found, parent, there = self.reference.find(old, now), self._parent(new, now), self.reference.find(new, now)
        kinds = [errno.EPERM] * bool(found.directories) + [errno.EEXIST] * bool(there.objects)
        result, names, _ = self._change(lambda: self.driven.link(old, new), found, parent, kinds=tuple(kinds))
        if isinstance(result, OSError):
            return
        self._check_added(new, parent, names)
        ((_, (_, after)),) = names.items()
        self._check(after in found.files, f"{new} became a link to another file than {old}")

    # --- at the end of everything ----------------------------------------------------------------------------------

    @invariant()
    def the_mount_serves(self) -> None:
        self._check(self.driven.stat(""), "the root has gone")


def _told(found: Found) -> str:
    may_be = [f"{'directory' if each.is_directory else 'file'} {each.inode}" for each in sorted(found.objects)]
    may_be += ["nothing"] * found.is_missing + ["a file above it"] * found.is_no_directory
    return " or ".join(may_be) or "nothing at all"


def _shown(data: bytes) -> str:
    words = sorted({data[start : start + 8] for start in range(0, len(data), 8)})
    return f"{len(data)} bytes, with {words[:4]}{'…' if len(words) > 4 else ''}"
