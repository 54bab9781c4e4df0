"""The cache directory: whose it is, that nobody else has it open, and how far its index can be trusted.

cache.json   format version and source      secret   seed of all checksums
lock         flock of the daemon            blob     payload
index/       the durable index (LMDB)       daemon.log
"""

import json
import logging
import os
import secrets
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cachefs.contract.index import Table
from cachefs.errors import CacheFsError, IndexUnavailable
from cachefs.options import Revalidate
from cachefs.store import recovery, runs
from cachefs.store.blob.blob import Blob
from cachefs.store.index import overflow
from cachefs.store.index.environment import Environment
from cachefs.store.index.index import Index
from cachefs.store.index.records import FLAGS_PINNED, PINNED
from cachefs.store.runs import RunState
from cachefs.system import private_files
from cachefs.system.claims import Taken, is_locked, lock_for_good

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
SESSION_RESERVE_BYTES = 1 << 20
"""Allocated when a run begins: so many bytes of the session have room, whatever else fills the runtime directory."""
FREE_SHARE = 0.9
"""Of the free space of the cache's disk: the default size."""
_DATA = "data.mdb"
_SESSION_KEY = b"session"
_MUTABLE_KEY = b"mutable"
_MUTABLE_SINCE_KEY = b"mutable-since"
_SINCE = struct.Struct("<I4xQ")
_SESSION = struct.Struct("<2I2Q")  # flags, was something forgotten, run, how often it was taken over
_WRITTEN = {"cache.json", "secret"}
_OWN_NAMES = {"lock", "blob", "index", "index.new", "index.broken", "daemon.log", "lost+found"} | _WRITTEN
_OWN_NAMES |= {private_files.temporary_of(Path(name)).name for name in _WRITTEN}


def boot_id() -> bytes:
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


def read_seed(directory: Path) -> int | None:
    """What all checksums of a cache begin with. None: it is lost, or never was."""
    try:
        secret = bytes.fromhex((directory / "secret").read_text().strip())
    except (OSError, ValueError):
        return None
    return int.from_bytes(secret[:8], "little") if len(secret) == 16 else None


def _check_identity(path: Path, source: str) -> None:
    """Raises FileNotFoundError where nobody has written down whose it is."""
    identity = path / "cache.json"
    try:
        found = json.loads(identity.read_text())
        version, owner = int(found["format"]), str(found["source"])
    except (ValueError, KeyError, TypeError):
        raise CacheFsError(f"{identity} cannot be read: remove {path} to start with an empty cache") from None
    if version > FORMAT_VERSION:
        raise CacheFsError(f"{path} has format {version}, this cachefs knows {FORMAT_VERSION}: it is too old")
    if owner != source:
        raise CacheFsError(f"the cache directory {path} was made for {owner}, not for {source}")


def check_inheritable(path: Path, source: str) -> None:
    """Could a successor of the daemon that has this cache directory open it? Nothing is changed.

    Raises CacheFsError with one line that says what is wrong.
    """
    try:
        private_files.check_own(path)
        for directory in (path, path / "index"):
            private_files.check_contents(directory)
        _check_identity(path, source)
        if read_seed(path) is None:
            raise CacheFsError(f"{path / 'secret'} cannot be read")
        for name in ("blob", f"index/{_DATA}", "index/lock.mdb"):
            os.close(os.open(path / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
        if not is_locked(path / "lock"):
            raise CacheFsError(f"{path} is not the directory that the daemon has open")
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        raise CacheFsError(f"cannot use the cache directory {path}: {what}{error.strerror or error}") from error


class CacheDirectory:
    """An opened and locked cache directory."""

    def __init__(self, path: Path, source: str) -> None:
        """Create or open, lock. Raises CacheFsError with one line that says what is wrong."""
        self.path = path
        try:
            private_files.make_directory(path)
            self._claim(source)
        except OSError as error:
            raise CacheFsError(f"cannot use the cache directory {path}: {error.strerror or error}") from error

    def _claim(self, source: str) -> None:
        names = {entry.name for entry in self.path.iterdir()}
        if names - _OWN_NAMES and "cache.json" not in names:
            raise CacheFsError(f"{self.path} is not empty and not a cache directory of cachefs")
        private_files.check_contents(self.path)
        if "index" in names:
            private_files.check_contents(self.path / "index")
        try:
            self._lock = lock_for_good(self.path / "lock")
        except Taken as other:
            raise CacheFsError(
                f"the cache directory {self.path} is in use by another cachefs daemon (pid {other.pid})"
            ) from None
        try:
            self._check_identity(source)
        except BaseException:
            os.close(self._lock)
            raise

    def _check_identity(self, source: str) -> None:
        try:
            _check_identity(self.path, source)
        except FileNotFoundError:
            content = json.dumps({"format": FORMAT_VERSION, "source": source}).encode()
            private_files.write_file(self.path / "cache.json", content)

    def default_size_bytes(self) -> int:
        stat = os.statvfs(self.path)
        blob = self.path / "blob"
        used = blob.stat().st_blocks * 512 if blob.exists() else 0
        return used + int(stat.f_bavail * stat.f_frsize * FREE_SHARE)

    def _seed(self) -> int:
        """The secret of this cache. Without it the blob cannot be checked, so a lost one empties the cache."""
        seed = read_seed(self.path)
        if seed is None:
            (self.path / "blob").unlink(missing_ok=True)
            shutil.rmtree(self.path / "index", ignore_errors=True)
            private_files.write_file(self.path / "secret", secrets.token_bytes(16).hex().encode())
            seed = read_seed(self.path)
        if seed is None:
            raise CacheFsError(f"cannot read {self.path}/secret")
        return seed

    def open_blob(self) -> Blob:
        try:
            return Blob(self.path / "blob", self._seed())
        except OSError as error:
            raise CacheFsError(f"cannot open the blob in {self.path}: {error.strerror or error}") from error

    def import_snapshot(self, file: Path, blob: Blob, root_inode: int, mutable: Sequence[str]) -> None:
        """Make the index of a new cache from a metadata snapshot. Raises CacheFsError where that cannot be done.

        `root_inode`: of the source's root. `mutable`: the patterns of `--mutable`.
        """
        index = self.path / "index"
        if (index / "data.mdb").exists() or blob.size():
            log.info("%s is not new: the snapshot %s is left alone", self.path, file)
            return
        for place in (index, index.with_name("index.new")):
            shutil.rmtree(place, ignore_errors=True)
        command = [sys.executable, "-m", "cachefs.store.snapshot", str(file), str(index), str(root_inode), *mutable]
        # Our own package, wherever that is: a daemon's directory is the root.
        package = Path(__file__).resolve().parents[2]
        done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise CacheFsError(said[-1] if said else f"the snapshot {file} could not be imported")
        log.info("started from the snapshot %s: %s names", file, done.stdout.strip())

    def open_durable(self, blob: Blob) -> Environment:
        """The durable index; rebuilt from the blob if it is lost or cannot be read."""
        path = self.path / "index"
        is_lost = not (path / _DATA).exists()
        try:
            return self._open_or_rebuild(path, blob)
        except IndexUnavailable as error:
            if is_lost:
                raise CacheFsError(str(error)) from error
            aside = path.with_name("index.broken")
            log.warning("%s; kept as %s, rebuilding it from the blob", error, aside)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            return self._open_or_rebuild(path, blob)
        except OSError as error:
            raise CacheFsError(f"cannot open the index in {path}: {error.strerror or error}") from error

    def _open_or_rebuild(self, path: Path, blob: Blob) -> Environment:
        if not (path / _DATA).exists() and blob.size():
            self._rebuild(path, blob)
        return Environment(path, sync=True)

    @staticmethod
    def _rebuild(path: Path, blob: Blob) -> None:
        """Make the index from the blob. It gets its name when it is complete: a crash before leaves no index."""
        temporary = path.with_name("index.new")
        for place in (path, temporary):
            shutil.rmtree(place, ignore_errors=True)
        durable = Environment(temporary, sync=True)
        try:
            totals = recovery.rebuild(blob, durable)
        finally:
            durable.close()
        temporary.rename(path)
        log.warning("index rebuilt from the blob: %d files, %d bytes", totals.cached_files, totals.cached_bytes)

    def close(self) -> None:
        os.close(self._lock)


def mutable_patterns(durable: Environment) -> set[str]:
    """`--mutable` of the last run."""
    with durable.lmdb.begin() as txn:
        value: bytes = txn.get(_MUTABLE_KEY, default=FLAGS_PINNED, db=durable.tables[Table.META])
    patterns = value[len(FLAGS_PINNED) :]
    return set(map(os.fsdecode, patterns.split(b"\0"))) if patterns else set()


def _mutable_since(durable: Environment) -> int:
    """The run in which the patterns were other ones than before for the last time."""
    with durable.lmdb.begin() as txn:
        value: bytes = txn.get(_MUTABLE_SINCE_KEY, default=_SINCE.pack(0, 0), db=durable.tables[Table.META])
    return int(_SINCE.unpack(value)[1])


class OpenedIndex:
    """The index of one run: durable and session environments, run number and floor."""

    def __init__(
        self,
        durable: Environment,
        session_path: Path,
        revalidate: Revalidate,
        rctime: bytes,
        *,
        mutable: Sequence[str] = (),
        same_mount: bool = False,
    ) -> None:
        """Begins a new run. `rctime`: of the source's root (rctime.py), empty where it says nothing.

        `mutable`: the patterns of `--mutable`. What was pinned with others is compared, and may be mutable now.

        `same_mount`: goes on with the run of a daemon that died and whose mount did not (hazard 12). Raises
        CacheFsError where its session is not there. Where the session could not take all that this daemon knew
        (overflow.py) another run begins for the same mount, which compares everything.
        """
        self.session_path = session_path
        self._forgot = 0
        """As the session says of itself."""
        self.durable_path = durable.path
        last = runs.last_run(durable)
        before = last or RunState()
        now = boot_id()
        takeovers = self._takeovers(session_path, before, now)
        survived = takeovers is not None
        is_complete = survived and overflow.is_complete(session_path / _DATA)
        if same_mount and not survived:
            raise CacheFsError(f"cannot take the mount over: its session {session_path} is gone")
        if not survived:
            shutil.rmtree(session_path, ignore_errors=True)
        # After a crash of the machine the last changes may be lost: nothing is taken on trust.
        trusted = last is not None and (before.clean or is_complete)
        same_patterns = mutable_patterns(durable) == set(mutable)
        run = before.run + 1
        is_lax = revalidate is Revalidate.NEVER
        floor = before.floor if trusted and same_patterns and is_lax else run
        stands_still = trusted and same_patterns and bool(rctime) and rctime == before.rctime
        # What was imported has the number of the run that begins, and was not compared in it.
        unmoved_floor = before.unmoved_floor if stands_still else max(run, before.unmoved_floor)
        if floor < unmoved_floor:  # what is opened in this run gets its number, and need not be compared
            unmoved_floor = run + 1
        self.state = RunState(run, floor, False, now, rctime, unmoved_floor)
        if same_mount and is_complete:
            self.state = before
        self._is_lax = is_lax
        self.forgot = same_mount and (not is_complete or bool(self._forgot))
        """The kernel may know of inodes and versions that a daemon before us knew, and we do not."""
        is_known = same_patterns and (is_complete or not survived)
        self.names_floor = _mutable_since(durable) if is_known else run
        """The run since which the patterns are what they are, and no name is missing: a directory that has not changed
        does not vouch for names that were recorded before."""
        self.takeovers = takeovers + 1 if same_mount and takeovers is not None else 0
        """How many daemons went on with this run after another one had died."""
        self._durable = durable
        self.index = Index(durable, Environment(session_path, sync=False))
        self.index.session.reserve(SESSION_RESERVE_BYTES)
        if survived:
            self._recover(rctime, same_mount=same_mount)
        self.count_takeovers(self.takeovers)
        if self.state == last and same_patterns:
            return  # what a full disk might not take is there
        self._store()
        with durable.write() as txn:  # after the floor: a crash in between makes everything doubtful once more
            patterns = b"\0".join(os.fsencode(pattern) for pattern in sorted(set(mutable)))
            txn.put(_MUTABLE_KEY, FLAGS_PINNED + patterns, db=durable.tables[Table.META])
            since = _SINCE.pack(PINNED, self.names_floor)
            txn.put(_MUTABLE_SINCE_KEY, since, db=durable.tables[Table.META])
        self.index.note_run(self.state.run, time.time_ns())
        self.index.session.overflow.begin()

    def _recover(self, rctime: bytes, *, same_mount: bool) -> None:
        """Go on with the session of a daemon that died. Where there is no room for that, and no mount needs it, a new
        one begins: it is no more than what was on its way to the durable index."""
        try:
            self.index.recover_session(same_mount=same_mount)
        except IndexUnavailable as error:
            if same_mount:
                raise
            log.warning("%s; everything is compared with the source", error)
            self.index.session.close()
            shutil.rmtree(self.session_path, ignore_errors=True)
            self.index = Index(self._durable, Environment(self.session_path, sync=False))
            self.state = replace(self.state, floor=self.state.run, rctime=rctime, unmoved_floor=self.state.run)
            self.names_floor = self.state.run

    @property
    def strict_floor(self) -> int:
        """Of what rctime.py cannot know of: only `never` believes earlier runs."""
        return self.state.floor if self._is_lax else self.state.run

    @property
    def may_be_unmoved(self) -> bool:
        """Would earlier runs be believed if the source's root had the same rctime for longer?"""
        return bool(self.state.rctime) and self.state.unmoved_floor < self.state.floor

    def revalidate_earlier_runs(self, rctime: bytes) -> bool:
        """`rctime`: a while after the run began. True if nothing has moved: the floor is that of then from now on.

        Raises IndexUnavailable where that cannot be stored.
        """
        if not self.may_be_unmoved or rctime != self.state.rctime:
            return False
        state = replace(self.state, floor=self.state.unmoved_floor)
        state.store(self._durable)
        self.state = state
        return True

    def count_takeovers(self, takeovers: int) -> None:
        """Store how many take-overs there were, so that the successor's numbers begin behind ours (runs.py)."""
        self.takeovers = takeovers
        with self.index.update() as update:
            update.put(Table.META, _SESSION_KEY, _SESSION.pack(0, self.forgot, self.state.run, takeovers))

    def _takeovers(self, path: Path, before: RunState, now: bytes) -> int | None:
        """How often the session changed hands; None unless its daemon crashed, in this boot, and left it behind."""
        if before.clean or before.boot_id != now or not (path / "data.mdb").exists():
            return None
        try:
            session = Environment(path, sync=False)
        except IndexUnavailable as error:
            log.warning("the session of the last run cannot be opened: %s", error)
            return None
        with session.lmdb.begin() as txn:
            value = txn.get(_SESSION_KEY, db=OpenedIndex._meta(session))
        session.close()
        _, self._forgot, run, takeovers = _SESSION.unpack(value) if value else (0, 0, 0, 0)
        # The daemon that found this mark may have died in the middle of beginning another run.
        is_complete = overflow.is_complete(path / _DATA)
        return int(takeovers) if run == before.run or not is_complete else None

    @staticmethod
    def _meta(environment: Environment) -> Any:
        return environment.tables[Table.META]

    def _store(self) -> None:
        self.state.store(self._durable)

    def close(self, *, flushed: bool) -> None:
        """`flushed`: everything that is pinned is in the durable index, so that the next run may trust it."""
        if flushed:
            self.state = replace(self.state, clean=True)
            try:
                self._store()
            except IndexUnavailable as error:
                log.warning("%s; the next mount compares with the source", error)
                flushed = False
        self.index.close()
        if flushed:
            shutil.rmtree(self.session_path, ignore_errors=True)
