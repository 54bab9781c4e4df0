"""LMDB environments with the tables of the index, and reading two of them as one.

`View` reads a snapshot of both: the session first, then the durable index. An empty value in the session is a
tombstone, and hides the value of the durable index. `Update` writes to the session. index.py explains what the two are
for, overflow.py what happens when the session cannot be written.
"""

import logging
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import lmdb

from cachefs.contract.index import MAP_BYTES, Table
from cachefs.errors import IndexDamaged, IndexUnavailable
from cachefs.store.index import damage, pages, unreadable
from cachefs.store.index.damage import Damage, LenientTransaction
from cachefs.store.index.extents import Extents
from cachefs.store.index.overflow import MISSING, Missing, Overflow, Value
from cachefs.store.index.records import PINNED
from cachefs.system import private_files
from cachefs.system.descriptors import closing

DATA = "data.mdb"
MAX_READERS = 1024
LOCK_BYTES = (MAX_READERS + 64) * 64  # of lock.mdb: one cache line for each reader, and a header
TOMBSTONE = b""
_NOT_DAMAGE = (lmdb.DiskError, lmdb.MemoryError, lmdb.LockError, lmdb.ReadonlyError)  # of opening an environment
_TRIED = b"tried"
_FLAGS = struct.Struct("<I")

log = logging.getLogger(__name__)

Key = tuple[Table, bytes]


def _reserve_readers(path: Path) -> None:
    """Allocate LMDB's table of readers before it is mapped. Raises IndexUnavailable.

    It is the only part of LMDB that is written through a mapping: if a full tmpfs could not allocate a page of it,
    SIGBUS would kill the process (hazard 34). Everything else is written with pwrite, and fails with ENOSPC.
    A disk that is almost full may have room for a part of the table only.
    """
    with closing(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)) as fd:
        size = os.fstat(fd).st_size or LOCK_BYTES  # LMDB uses the size that it finds: others may have mapped it
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if os.fstat(fd).st_blocks * 512 < size:
                raise IndexUnavailable(f"cannot make the index in {path.parent}: {error.strerror}") from error


class Environment:
    """One LMDB environment with all tables."""

    def __init__(self, path: Path, *, sync: bool) -> None:
        self.path = path
        unreadable.survive()
        private_files.make_directory(path)
        if sync:  # a session is lost with the machine, so its file needs no check
            pages.check_length(path / DATA)
        _reserve_readers(path / "lock.mdb")
        try:
            self.lmdb = lmdb.open(
                os.fsencode(path),  # lmdb accepts a path that is not UTF-8 as bytes only
                map_size=MAP_BYTES,
                max_dbs=len(Table),
                max_readers=MAX_READERS,
                sync=sync,
                metasync=sync,
                readahead=False,
                mode=0o600,
            )
            self.lmdb.reader_check()
            self.tables = [self.lmdb.open_db(table.name.lower().encode()) for table in Table]
        except lmdb.Error as error:
            kind = IndexUnavailable if isinstance(error, _NOT_DAMAGE) else IndexDamaged
            raise kind(f"cannot open the index in {path}: {error}") from error
        data = os.stat(path / DATA)
        self.place = f"{data.st_dev}:{data.st_ino}:{path}"
        """For the fast path, which opens it too: device and number of the data file, and the path of the directory. It
        does not use another file that was put in its place."""
        self.damage = Damage(path)
        self.overflow = Overflow(path / DATA, len(Table))
        """Of a session: updates that could not be written to it."""

    def get(self, table: Table, key: bytes) -> bytes | None:
        """Raises IndexUnavailable."""
        with self.failing("read"), self.lmdb.begin() as txn:
            value: bytes | None = txn.get(key, db=self.tables[table])
            return value

    def reader(self) -> Any:
        """A read transaction. Raises IndexUnavailable."""
        try:  # each request begins one, and this is faster than `failing`
            return LenientTransaction(self.lmdb, self.tables) if self.damage.is_found else self.lmdb.begin()
        except (lmdb.Error, struct.error) as error:
            raise self.failed("read", error) from error

    @contextmanager
    def write(self) -> Iterator[Any]:
        """A transaction, committed at the end of the block. Raises IndexUnavailable; then nothing was written."""
        self.check()
        with self.failing("write to"):
            with self.lmdb.begin(write=True) as txn:
                yield txn
                self.damage.check_pages()
            pages.extend(self.path / DATA, self.lmdb)

    @contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Errors of LMDB become IndexUnavailable: "cannot `what` the index"."""
        try:
            yield
            self.damage.check_pages()
        except (lmdb.Error, struct.error) as error:
            raise self.failed(what, error) from error

    def failed(self, what: str, error: Exception) -> IndexUnavailable:
        """The same for an error that was caught."""
        if isinstance(error, damage.ERRORS):
            self.damage.found(error)
            return IndexDamaged(f"cannot {what} the index in {self.path}: {error}")
        return IndexUnavailable(f"cannot {what} the index in {self.path}: {error}")

    def check_is_whole(self, missing: str) -> None:
        """Something that every index has is missing. Raises IndexDamaged at the first time."""
        if not self.damage.is_found:
            raise self.failed("read", lmdb.CorruptedError(missing))

    def check(self) -> None:
        """Raises IndexDamaged if the index must not be written any more."""
        if self.damage.is_found:
            raise IndexDamaged(f"cannot write to the index in {self.path}: it is damaged")

    def try_to_write(self) -> None:
        """Raises IndexUnavailable."""
        with self.write() as txn:
            txn.put(_TRIED, struct.pack("<IQ", PINNED, time.time_ns()), db=self.tables[Table.META])

    def reserve(self, size: int) -> None:
        """Allocate the first bytes of the file, which LMDB uses as it grows."""
        with closing(os.open(self.path / DATA, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)) as fd:
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                log.warning("cannot reserve %d bytes for the index in %s: %s", size, self.path, error.strerror)

    def close(self) -> None:
        with suppress(lmdb.Error):
            pages.extend(self.path / DATA, self.lmdb)
        self.lmdb.close()

    def entries(self, table: Table) -> int:
        """Raises IndexUnavailable."""
        with self.failing("read"), self.lmdb.begin() as txn:
            return int(txn.stat(self.tables[table])["entries"])

    def oldest_reader(self) -> int | None:
        """The number of the transaction that the oldest reader sees; None: no reader is alive."""
        self.lmdb.reader_check()
        rows = map(str.split, self.lmdb.readers().splitlines()[1:])
        return min((int(row[2]) for row in rows if len(row) == 3 and row[2].isdigit()), default=None)


class View:
    """Reads a snapshot of both environments. Short-lived: nothing is awaited while a view is open."""

    __slots__ = ("_above", "_durable", "_durable_environment", "_durable_tables", "_session", "_session_tables")

    def __init__(self, session: Environment, durable: Environment, *, write: bool = False) -> None:
        self._above = session.overflow if session.overflow else None
        # The session first: a value is removed from it only after it is in the durable index.
        self._session: Any = session.lmdb.begin(write=write)
        try:
            self._durable: Any = durable.reader()
        except IndexUnavailable:
            self._session.abort()  # an open write transaction would block all others
            raise
        self._session_tables = session.tables
        self._durable_tables = durable.tables
        self._durable_environment = durable

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._session.abort()
        self._durable.abort()
        self._end()
        self._translate(error)

    def _translate(self, error: object) -> None:
        """Raises IndexDamaged. The session is in memory, so damage is in the durable index."""
        error = error or self._durable_environment.damage.unread_page()
        if isinstance(error, damage.ERRORS):
            raise self._durable_environment.failed("read", error) from error

    def _end(self) -> None:
        """LMDB frees the slot of a reader when the transaction object is deleted, not when it is aborted.

        A thousand requests may wait at the same time, each with a closed view in a local variable.
        """
        self._session = self._durable = None

    def _in_session(self, table: Table, key: bytes) -> bytes | None:
        if self._above is not None:
            above = self._above.find(table, key)
            if not isinstance(above, Missing):
                return above
        value: bytes | None = self._session.get(key, db=self._session_tables[table])
        return value

    def get(self, table: Table, key: bytes) -> bytes | None:
        if self._above is None:  # the usual case, without another call
            value = self._session.get(key, db=self._session_tables[table])
        else:
            value = self._in_session(table, key)
        if value is None:
            value = self._durable.get(key, db=self._durable_tables[table])
        return value or None

    def first_key(self, table: Table, prefix: bytes) -> bytes | None:
        """The first key that begins with `prefix`."""
        if self._above is not None:
            return next((key for key, _ in self.scan(table, prefix)), None)
        session: Any = self._session.cursor(db=self._session_tables[table])
        durable: Any = self._durable.cursor(db=self._durable_tables[table])
        in_session = session.set_range(prefix) and session.key().startswith(prefix)
        in_durable = durable.set_range(prefix) and durable.key().startswith(prefix)
        if in_session and (in_durable or session.value() == TOMBSTONE):  # rare, so use the merge
            return next((key for key, _ in self.scan(table, prefix)), None)
        cursor = session if in_session else durable
        return bytes(cursor.key()) if in_session or in_durable else None

    def last_key(self, table: Table, prefix: bytes) -> bytes | None:
        """The last key that begins with `prefix`. Deleted keys are included as long as they have a tombstone."""
        above = self._above.last_key(table, prefix) if self._above is not None else None
        found = [above] if above is not None else []
        for txn, tables in ((self._session, self._session_tables), (self._durable, self._durable_tables)):
            cursor = txn.cursor(db=tables[table])
            beyond = (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix) + 1, "big")[-len(prefix) :]
            at_end = beyond == bytes(len(prefix)) or not cursor.set_range(beyond)
            if (cursor.last() if at_end else cursor.prev()) and cursor.key().startswith(prefix):
                found.append(bytes(cursor.key()))
        return max(found, default=None)

    def scan(self, table: Table, prefix: bytes, start: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """All (key, value) whose key begins with `prefix`, in order, from the key `start` on."""
        session = _prefixed(self._session, self._session_tables[table], prefix, start)
        if self._above is not None:
            session = _merge(self._above.scan(table, prefix, start), session, hidden=None)
        durable = _prefixed(self._durable, self._durable_tables[table], prefix, start)
        if table is Table.LISTING and isinstance(self._durable, LenientTransaction):  # damage.py says why
            durable = iter(())
        return _merge(session, durable, hidden=TOMBSTONE)

    @property
    def extents(self) -> Extents:
        """To look up extents. To read their bytes a transaction must stay open: see `Index.extents`."""
        return Extents(self._durable, self._durable_tables[Table.EXTENTS])

    def last_extents(self) -> Iterator[tuple[bytes, bytes]]:
        """All extents from the last one backwards."""
        cursor = self._durable.cursor(db=self._durable_tables[Table.EXTENTS])
        if cursor.last():
            yield from cursor.iterprev()

    def in_durable(self, table: Table, key: bytes) -> bytes | None:
        value: bytes | None = self._durable.get(key, db=self._durable_tables[table])
        return value


class Update(View):
    """A View that writes to the session. It is committed, unsynced, when the block ends without an error.

    The commit never fails: what cannot be written to the session goes into its overflow.
    """

    __slots__ = ("_afterwards", "_changes", "_environment", "_in_flight", "_on_refused", "_on_written", "_written")

    def __init__(
        self,
        session: Environment,
        durable: Environment,
        in_flight: set[Key],
        on_written: Callable[[Sequence[Key]], None],
        on_refused: Callable[[lmdb.Error], None],
    ) -> None:
        """`on_written`: called with the keys that must be committed to the durable index. `in_flight`: keys that are
        being committed. `on_refused`: called with the reason if the session cannot be written.
        """
        super().__init__(session, durable, write=not session.overflow)
        self._environment = session
        self._in_flight = in_flight
        self._on_written = on_written
        self._on_refused = on_refused
        self._written: list[Key] = []
        self._changes: list[tuple[Table, bytes, Value | Missing]] = []
        """What was written to the session; or, while it overflows, the previous values of the overflow."""
        self._afterwards: list[Callable[[], object]] = []

    def afterwards(self, call: Callable[[], object]) -> None:
        """Call this after the commit."""
        self._afterwards.append(call)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._durable.abort()
        if error is None:
            self._commit()
            if self._written:
                self._on_written(self._written)
        else:
            self._abort()
        self._end()
        self._translate(error)
        if error is None:
            for call in self._afterwards:
                call()

    def _commit(self) -> None:
        overflow = self._environment.overflow
        if self._above is not None:
            self._session.abort()
            overflow.update_mark()
            return
        try:
            self._session.commit()
        except lmdb.Error as error:
            for change in self._changes:
                overflow.put(*change)
            overflow.update_mark()
            self._on_refused(error)

    def _abort(self) -> None:
        self._session.abort()
        if self._above is not None:
            for change in reversed(self._changes):
                self._above.put(*change)

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """Every value begins with its flags; pinned values will be committed to the durable index."""
        self._write(table, key, value)
        if value[0] & PINNED or self._reaches_durable(table, key):
            self._written.append((table, key))

    def _reaches_durable(self, table: Table, key: bytes) -> bool:
        """The durable index has the key, or a commit is writing it."""
        return (table, key) in self._in_flight or self.in_durable(table, key) is not None

    def delete(self, table: Table, key: bytes) -> None:
        if self._reaches_durable(table, key):
            self._write(table, key, TOMBSTONE)
            self._written.append((table, key))
        else:
            self.clear(table, key)

    def clear(self, table: Table, key: bytes) -> None:
        """Remove a key from the session, so that the value of the durable index is visible."""
        has = self._above is None or self._session.get(key, db=self._session_tables[table]) is not None
        self._write(table, key, None if has else MISSING)

    def _write(self, table: Table, key: bytes, value: Value | Missing) -> None:
        if self._above is not None:
            self._changes.append((table, key, self._above.find(table, key)))
            self._above.put(table, key, value)
            return
        self._changes.append((table, key, value))
        if isinstance(value, bytes):
            self._session.put(key, value, db=self._session_tables[table])
        else:
            self._session.delete(key, db=self._session_tables[table])


def _prefixed(txn: Any, table: Any, prefix: bytes, start: bytes | None) -> Iterator[tuple[bytes, bytes]]:
    cursor = txn.cursor(db=table)
    if cursor.set_range(start if start is not None else prefix):
        for key, value in cursor:
            if not key.startswith(prefix):
                break
            yield key, value


def _merge(
    upper: Iterator[tuple[bytes, Value]], lower: Iterator[tuple[bytes, Value]], *, hidden: Value
) -> Iterator[tuple[bytes, Any]]:
    """Both in key order; of a key in both, the upper value. Keys whose value is `hidden` are left out."""
    end: tuple[Any, Value] = (None, None)
    above, below = next(upper, end), next(lower, end)
    while above[0] is not None or below[0] is not None:
        if below[0] is None or (above[0] is not None and above[0] <= below[0]):
            if above[0] == below[0]:
                below = next(lower, end)
            if above[1] != hidden:
                yield above
            above = next(upper, end)
        else:
            yield below
            below = next(lower, end)
