"""LMDB environments with the tables of the index, and reading two of them as one.

`View` reads one moment of both: the session first, then the durable index; an empty value in the session is a
tombstone, and hides what the durable index says. `Update` writes to the session. index.py says what the two are for,
overflow.py what happens when the session cannot be written.
"""

import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import lmdb

from cachefs.contract.index import MAP_BYTES, Table
from cachefs.errors import IndexUnavailable
from cachefs.store.index.extents import Extents
from cachefs.store.index.overflow import MISSING, Missing, Overflow, Value
from cachefs.store.index.records import PINNED
from cachefs.system import private_files

MAP_SIZE_BYTES = MAP_BYTES
MAX_READERS = 1024
LOCK_BYTES = (MAX_READERS + 64) * 64
"""Of lock.mdb: a cache line for each reader, and its header."""
TOMBSTONE = b""
_FLAGS = struct.Struct("<I")

log = logging.getLogger(__name__)

Key = tuple["Table", bytes]


def _reserve_readers(path: Path) -> None:
    """Allocate LMDB's table of readers before it is mapped. Raises IndexUnavailable.

    It is the one part of LMDB that is written through a mapping: a page that a full tmpfs cannot allocate would kill
    the process with SIGBUS (hazard 34). Everything else is written with pwrite, and fails with ENOSPC.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size or LOCK_BYTES  # LMDB has as many readers as fit: others may have mapped it
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if os.fstat(fd).st_blocks == 0:
            raise IndexUnavailable(f"cannot make the index in {path.parent}: {error.strerror}") from error
        log.warning("cannot reserve the table of readers in %s: %s", path, error.strerror)
    finally:
        os.close(fd)


class Environment:
    """One LMDB environment with all tables."""

    def __init__(self, path: Path, *, sync: bool) -> None:
        self.path = path
        private_files.make_directory(path)
        _reserve_readers(path / "lock.mdb")
        try:
            self.lmdb = lmdb.open(
                str(path),
                map_size=MAP_SIZE_BYTES,
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
            raise IndexUnavailable(f"cannot open the index in {path}: {error}") from error
        self.overflow = Overflow(path / "data.mdb", len(Table))
        """Of a session: what it could not take."""

    @contextmanager
    def write(self) -> Iterator[Any]:
        """A transaction, committed at the end of the block. Raises IndexUnavailable; then nothing was written."""
        try:
            with self.lmdb.begin(write=True) as txn:
                yield txn
        except lmdb.Error as error:
            raise IndexUnavailable(f"cannot write to the index in {self.path}: {error}") from error

    def reserve(self, size: int) -> None:
        """Allocate the first bytes of the file, which LMDB uses as it grows."""
        fd = os.open(self.path / "data.mdb", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            log.warning("cannot reserve %d bytes for the index in %s: %s", size, self.path, error.strerror)
        finally:
            os.close(fd)

    def close(self) -> None:
        self.lmdb.close()

    def entries(self, table: Table) -> int:
        with self.lmdb.begin() as txn:
            return int(txn.stat(self.tables[table])["entries"])

    def oldest_reader(self) -> int | None:
        """The transaction number that the oldest reader sees; None without readers. One that was killed is none."""
        self.lmdb.reader_check()
        numbers = []
        for line in self.lmdb.readers().splitlines()[1:]:
            fields = line.split()
            if len(fields) == 3 and fields[2].isdigit():
                numbers.append(int(fields[2]))
        return min(numbers, default=None)

    def last_transaction(self) -> int:
        return int(self.lmdb.info()["last_txnid"])


class View:
    """Reads of one moment, through both environments. Short: nothing is awaited while one is open."""

    __slots__ = ("_above", "_durable", "_durable_tables", "_session", "_session_tables")

    def __init__(self, session: Environment, durable: Environment, *, write: bool = False) -> None:
        self._above = session.overflow if session.overflow else None
        # The session first: what leaves it is in the durable index before it leaves.
        self._session: Any = session.lmdb.begin(write=write)
        try:
            self._durable: Any = durable.lmdb.begin()
        except lmdb.Error:
            self._session.abort()  # or no other could ever write
            raise
        self._session_tables = session.tables
        self._durable_tables = durable.tables

    def __enter__(self) -> "View":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.abort()
        self._durable.abort()
        self._end()

    def _end(self) -> None:
        """LMDB gets a reader's slot back when the transaction's object goes, not when it is aborted.

        Whoever awaits something may keep this view in a variable meanwhile, a thousand requests at a time.
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
        if self._above is None:
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
        if in_session and (in_durable or session.value() == TOMBSTONE):  # rare, so leave it to the merge
            return next((key for key, _ in self.scan(table, prefix)), None)
        cursor = session if in_session else durable
        return bytes(cursor.key()) if in_session or in_durable else None

    def last_key(self, table: Table, prefix: bytes) -> bytes | None:
        """The last key that begins with `prefix`, or did before it was deleted: a tombstone counts."""
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
            session = _over(self._above.scan(table, prefix, start), session)
        return _merge(session, _prefixed(self._durable, self._durable_tables[table], prefix, start))

    @property
    def extents(self) -> Extents:
        """For looking what there is. To read its bytes a transaction must be kept: see `Index.extents`."""
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
    """A View that writes to the session. Committed, unsynced, on leaving without an error. That never fails: what the
    session does not take goes into its overflow."""

    __slots__ = ("_afterwards", "_changes", "_environment", "_in_flight", "_on_refused", "_on_written", "_written")

    def __init__(
        self,
        session: Environment,
        durable: Environment,
        in_flight: set[Key],
        on_written: Callable[[Sequence[Key]], None],
        on_refused: Callable[[lmdb.Error], None],
    ) -> None:
        """`on_written`: given the keys that the durable index must hear of; `in_flight`: it is just hearing of them.

        `on_refused`: given the reason where the session could not be written.
        """
        super().__init__(session, durable, write=not session.overflow)
        self._environment = session
        self._in_flight = in_flight
        self._on_written = on_written
        self._on_refused = on_refused
        self._written: list[Key] = []
        self._changes: list[tuple[Table, bytes, Value | Missing]] = []
        """What was written to the session; or, while it overflows, what that had under the keys before."""
        self._afterwards: list[Callable[[], object]] = []

    def afterwards(self, call: Callable[[], object]) -> None:
        """Call this when it has been committed."""
        self._afterwards.append(call)

    def __enter__(self) -> "Update":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._durable.abort()
        if error is None:
            self._commit()
            if self._written:
                self._on_written(self._written)
        else:
            self._abort()
        self._end()
        if error is None:
            for call in self._afterwards:
                call()

    def _commit(self) -> None:
        overflow = self._environment.overflow
        if self._above is not None:
            self._session.abort()
            overflow.settle()
            return
        try:
            self._session.commit()
        except lmdb.Error as error:
            for change in self._changes:
                overflow.put(*change)
            overflow.settle()
            self._on_refused(error)

    def _abort(self) -> None:
        self._session.abort()
        if self._above is not None:
            for change in reversed(self._changes):
                self._above.put(*change)

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """Every value begins with its flags; the pinned ones are on their way to the durable index."""
        self._write(table, key, value)
        if value[0] & PINNED or self._reaches_durable(table, key):
            self._written.append((table, key))

    def _reaches_durable(self, table: Table, key: bytes) -> bool:
        """The durable index has the key, or is just about to get it."""
        return (table, key) in self._in_flight or self.in_durable(table, key) is not None

    def delete(self, table: Table, key: bytes) -> None:
        if self._reaches_durable(table, key):
            self._write(table, key, TOMBSTONE)
            self._written.append((table, key))
        else:
            self.clear(table, key)

    def clear(self, table: Table, key: bytes) -> None:
        """Take a key out of the session: what the durable index has of it is to be seen."""
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


def _over(
    above: Iterator[tuple[bytes, Value]], session: Iterator[tuple[bytes, bytes]]
) -> Iterator[tuple[bytes, bytes]]:
    """The session with what it could not take, in key order; tombstones are values."""
    end: tuple[Any, Value] = (None, None)
    upper, lower = next(above, end), next(session, end)
    while upper[0] is not None or lower[0] is not None:
        if upper[0] is None or (lower[0] is not None and lower[0] < upper[0]):
            yield lower[0], lower[1] or TOMBSTONE
            lower = next(session, end)
            continue
        if upper[0] == lower[0]:
            lower = next(session, end)
        if upper[1] is not None:
            yield upper[0], upper[1]
        upper = next(above, end)


def _merge(upper: Iterator[tuple[bytes, bytes]], lower: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Both in key order; where both have a key the upper one counts, and its tombstones are left out."""
    end: tuple[Any, bytes] = (None, b"")
    above, below = next(upper, end), next(lower, end)
    while above[0] is not None or below[0] is not None:
        if below[0] is None or (above[0] is not None and above[0] <= below[0]):
            if above[0] == below[0]:
                below = next(lower, end)
            if above[1] != TOMBSTONE:
                yield above
            above = next(upper, end)
        else:
            yield below
            below = next(lower, end)
