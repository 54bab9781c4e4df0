"""A durable index that contradicts itself, while it is in use.

LMDB has no checksums: damage shows when a page that is needed is no page, or has records that are none. From then on

- the daemon reads through a `LenientTransaction`: what cannot be read is not known, as if it had never been cached;
- nothing is written to the index, nothing new is pinned, and the fast path passes all requests on;
- a new run begins within the mount: everything is compared with the source before it is used, and no listing counts as
  complete, because names may be missing (`Validity.doubt_everything`). The next listing goes to the session. It
  does not use rows of the index, because more of them may be lost while it is valid.

- the names of an inode whose links are lost are found in the dentries (`names_of`): the kernel does not look up the
  name of a directory again that it lists by its number.

So requests are served from the source, slower. The index is rebuilt from the blob by the next daemon, with or without
an unmount.
"""

import logging
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lmdb

from cachefs.contract.index import DENTRY_RECORD, EXTENT_RECORD, INODE_RECORD, Table
from cachefs.store.index import unreadable
from cachefs.store.index.records import Dentry, inode_of_key
from cachefs.system import private_files
from cachefs.system.listeners import Listeners

ERRORS = (
    lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.BadDbiError,
    lmdb.BadTxnError, lmdb.IncompatibleError, lmdb.CursorFullError, lmdb.PageFullError, lmdb.BadValsizeError,
    lmdb.MapResizedError, lmdb.BadRslotError, struct.error,
)  # fmt: skip
"""LMDB raises them for a damaged file, and not for a full disk. MapResizedError: a meta page names a page beyond the
map, whose size is always the same. struct.error: a value has another one's place."""
MARK = "damaged"
_SIZES = {Table.INODES: INODE_RECORD.codec().size, Table.DENTRIES: DENTRY_RECORD.codec().size}
_LEAST = {Table.EXTENTS: EXTENT_RECORD.codec().size}
_FLAGS_BYTES = 4

log = logging.getLogger(__name__)


def _here(call: Callable[[], None]) -> None:
    call()


class Damage:
    """What is known about the damage of one environment."""

    def __init__(self, path: Path) -> None:
        """`path`: the directory of the environment."""
        self._path = path
        self._faults_before = unreadable.faults
        self.is_found = False
        self.on_found: Listeners[[]] = Listeners()
        """Called once, in the thread of `run`."""
        self.run: Callable[[Callable[[], None]], object] = _here
        """Runs a function in the thread that serves requests. No request must see that rows are gone and listings still
        count as complete: such a listing has no names."""

    @property
    def is_marked(self) -> bool:
        """Did this daemon or an earlier one meet damage?"""
        return (self._path / MARK).exists()

    @property
    def problem(self) -> str:
        """One line for the user; empty: there is none."""
        if not self.is_found:
            return ""
        return (
            "the index is damaged: requests are served from the source; to rebuild it, run `cachefs restart`, or "
            "unmount and mount again"
        )

    def unread_page(self) -> lmdb.Error | None:
        """Something was read while a page of the file was replaced (unreadable.py): use none of it.

        None if there is no such page, or if everybody knows by now.
        """
        if unreadable.faults == self._faults_before or self.is_found:
            return None
        return lmdb.CorruptedError("the disk does not read a page of it, or does not write its table of readers")

    def check_pages(self) -> None:
        """Raises the error of `unread_page`."""
        if error := self.unread_page():
            raise error

    def close(self) -> None:
        """Nobody listens any more."""
        self.on_found.clear()
        self.run = _here

    def found(self, error: BaseException) -> None:
        """From any thread."""
        self.run(partial(self._found, error))

    def found_by_fastpath(self) -> None:
        """It has replaced a page, as this process does (unreadable.py)."""
        self.found(lmdb.CorruptedError("the fast path cannot read it"))

    def _found(self, error: BaseException) -> None:
        if self.is_found:
            return
        self.is_found = True
        log.error("%s (%s: %s)", self.problem, self._path, error)
        with suppress(OSError):
            private_files.write_file(self._path / MARK, b"")
        self.on_found()


def is_plausible(table: Table, value: bytes) -> bool:
    """Can this be a value of the table? It is not if a page of another table has taken the place of its page."""
    size = _SIZES.get(table)
    if size is not None:
        return len(value) == size
    return len(value) >= _LEAST.get(table, _FLAGS_BYTES)


class LenientTransaction:
    """A read transaction of a damaged environment: what cannot be read is not there."""

    def __init__(self, environment: Any, tables: list[Any]) -> None:
        self._environment = environment
        self._names = {id(handle): table for handle, table in zip(tables, Table, strict=True)}
        self._txn: Any = None
        self._begin()

    def _begin(self) -> None:
        """After an error LMDB refuses everything else in a transaction."""
        self.abort()
        if unreadable.faults > unreadable.MOST_FAULTS:
            return
        with suppress(lmdb.Error):
            self._txn = self._environment.begin()

    def get(self, key: bytes, *, db: Any) -> bytes | None:
        if self._txn is None or self._names[id(db)] is Table.LISTING:
            return None
        try:
            value: bytes | None = self._txn.get(key, db=db)
        except lmdb.Error:
            self._begin()
            return None
        return value if value is not None and is_plausible(self._names[id(db)], value) else None

    def cursor(self, *, db: Any) -> "_LenientCursor":
        cursor = None
        if self._txn is not None:
            try:
                cursor = self._txn.cursor(db=db)
            except lmdb.Error:
                self._begin()
        return _LenientCursor(cursor, self._names[id(db)], self._begin)

    def abort(self) -> None:
        if self._txn is not None:
            self._txn.abort()
        self._txn = None


class _LenientCursor:
    """A cursor that stops where the table cannot be read any more."""

    def __init__(self, cursor: Any, table: Table, failed: Any) -> None:
        self._cursor = cursor
        self._table = table
        self._failed = failed

    def _move(self, name: str, *arguments: bytes) -> bool:
        if self._cursor is None:
            return False
        try:
            moved: bool = getattr(self._cursor, name)(*arguments)
            while moved and not is_plausible(self._table, self._cursor.value()):
                moved = self._cursor.prev() if name in ("prev", "last") else self._cursor.next()
        except lmdb.Error:
            self._cursor = None
            self._failed()
            return False
        return moved

    def set_range(self, key: bytes) -> bool:
        return self._move("set_range", key)

    def first(self) -> bool:
        return self._move("first")

    def last(self) -> bool:
        return self._move("last")

    def next(self) -> bool:
        return self._move("next")

    def prev(self) -> bool:
        return self._move("prev")

    def key(self) -> bytes:
        return b"" if self._cursor is None else self._cursor.key()

    def value(self) -> bytes:
        return b"" if self._cursor is None else self._cursor.value()

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        more = bool(self.key()) or self.first()
        while more:
            yield self.key(), self.value()
            more = self.next()

    def iterprev(self) -> Iterator[tuple[bytes, bytes]]:
        more = bool(self.key()) or self.last()
        while more:
            yield self.key(), self.value()
            more = self.prev()


def names_of(environment: Any, number: int) -> list[tuple[int, bytes]]:
    """The names that lead to an inode, as (parent, name), by the dentries alone. Reads all of them; from any thread."""
    txn = LenientTransaction(environment.lmdb, environment.tables)
    try:
        rows = txn.cursor(db=environment.tables[Table.DENTRIES])
        return [(inode_of_key(key), bytes(key[8:])) for key, value in rows if Dentry.unpack(value).inode == number]
    finally:
        txn.abort()
