"""The cache directory: which source it belongs to, its lock, and which records of its index are valid.

cache.json   format version and source      secret   seed of all checksums
lock         flock of the daemon            blob     payload
index/       the durable index (LMDB)       daemon.log
"""

import logging
import os
import secrets
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from cachefs.contract.index import Table
from cachefs.errors import CacheFsError, IndexUnavailable
from cachefs.options import Revalidate
from cachefs.store import aliases, durable_index, mutable_patterns, owner, runs
from cachefs.store.blob.blob import Blob
from cachefs.store.filesystem import Filesystem
from cachefs.store.index import overflow, pages
from cachefs.store.index.environment import DATA, Environment
from cachefs.store.index.index import Index
from cachefs.store.index.records import PINNED
from cachefs.store.runs import RunState
from cachefs.store.secret import make_seed, read_seed
from cachefs.system import private_files
from cachefs.system.claims import Taken, is_locked, lock_for_good
from cachefs.system.descriptors import closing_on_error

log = logging.getLogger(__name__)

SESSION_RESERVE_BYTES = 1 << 20
"""Allocated when a run begins, so that a session of this size has room in a full runtime directory."""
FREE_SHARE = 0.9  # the default size of a cache, as a share of the free space of its disk
_SESSION_KEY = b"session"
_SESSION = struct.Struct("<2I2Q16s")  # flags, `forgot`, run, `takeovers`, identity of the durable index
_IDENTITY_KEY = b"identity"
_IDENTITY = struct.Struct("<I16s")  # flags of the value, the identity
_UNKNOWN = bytes(16)
_WRITTEN = {"cache.json", "secret"}
_OWN_NAMES = {"lock", "blob", "index", "index.new", "index.broken", "daemon.log", "daemon.log.1", "lost+found"}
_OWN_NAMES |= _WRITTEN | {"cache.json.broken"} | {private_files.temporary_of(Path(name)).name for name in _WRITTEN}


def boot_id() -> bytes:
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


def _check_contents(path: Path) -> None:
    names = {entry.name for entry in path.iterdir()}
    if names - _OWN_NAMES and "cache.json" not in names:
        raise CacheFsError(f"{path} is not empty and not a cache directory of cachefs: use an empty or a new directory")
    private_files.check_contents(path)
    if "index" in names:
        private_files.check_contents(path / "index")


def _unusable(path: Path, error: OSError) -> CacheFsError:
    named = error.filename
    what = f"{os.fsdecode(named)}: " if isinstance(named, str | bytes) and named != str(path) else ""
    return CacheFsError(f"cannot use the cache directory {path}: {what}{error.strerror or error}")


def check_usable(path: Path, source: str) -> None:
    """Check that this could be the cache directory of a mount. Nothing is changed. Raises as `check_inheritable`."""
    place = next(each for each in (path, *path.parents) if each.exists())
    try:
        if place == path:
            private_files.check_own(path)
            _check_contents(path)
            with suppress(FileNotFoundError, owner.Damaged):
                owner.check(path, source)
        if not os.access(place, os.W_OK | os.X_OK):
            raise CacheFsError(f"cannot use the cache directory {path}: {place} cannot be written to")
    except OSError as error:
        raise _unusable(path, error) from error


def check_inheritable(path: Path, source: str, session_path: Path) -> None:
    """Check that a successor of the daemon could open this cache directory, and its session. Nothing is changed.

    Raises CacheFsError with one line that says what is wrong.
    """
    try:
        private_files.check_own(path)
        for directory in (path, path / "index"):
            private_files.check_contents(directory)
        with suppress(FileNotFoundError, owner.Damaged):  # the successor writes it again
            owner.check(path, source)
        if read_seed(path) is None:
            raise CacheFsError(f"{path / 'secret'} cannot be read")
        for name in ("blob", f"index/{DATA}", "index/lock.mdb"):
            os.close(os.open(path / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
        if not is_locked(path / "lock"):
            raise CacheFsError(f"{path} is not the directory that the daemon has open")
        if not (session_path / DATA).exists():
            raise CacheFsError(_is_gone(session_path))
    except OSError as error:
        raise _unusable(path, error) from error


class CacheDirectory:
    """An opened and locked cache directory.

    `predecessors`: killed daemons that had it, and whose calls to the source may still be carried out.
    """

    emptied_because = ""  # why it starts empty, for the log

    def __init__(self, path: Path, source: str, on: Filesystem | None = None, *, same_mount: bool = False) -> None:
        """Create or open it, and lock it. Raises CacheFsError with one line that says what is wrong.

        `on`: the filesystem of the source; None: it is not compared. `same_mount`: a living mount has it open.
        """
        self.path = path
        self._same_mount = same_mount
        try:
            private_files.make_directory(path)
            self._claim(source, on, same_mount=same_mount)
        except OSError as error:
            raise _unusable(path, error) from error

    def _claim(self, source: str, filesystem: Filesystem | None, *, same_mount: bool) -> None:
        _check_contents(self.path)
        try:
            self._lock, self.predecessors = lock_for_good(self.path / "lock")
        except Taken as other:
            raise CacheFsError(
                f"the cache directory {self.path} is in use by another cachefs daemon (pid {other.pid})"
            ) from None
        with closing_on_error(self._lock):
            try:
                owner.check(self.path, source)
            except (FileNotFoundError, owner.Damaged) as error:
                if not same_mount:
                    self._set_aside(error)
                owner.write(self.path, source, (filesystem and filesystem.identity) or owner.unknown())
            if filesystem is not None:
                self._belong_to(source, filesystem)
            if not same_mount and not owner.cache_of(self.path):  # an earlier version made it
                owner.write(self.path, source, owner.filesystem_of(self.path))

    def _belong_to(self, source: str, filesystem: Filesystem) -> None:
        if (self.path / "blob").exists() and (reason := owner.other_filesystem(self.path, filesystem)):
            self.emptied_because = f"the source {reason}"
            self._empty()
        if not filesystem.identity or owner.filesystem_of(self.path) != filesystem.identity:
            owner.write(self.path, source, filesystem.identity or owner.unknown())

    def _set_aside(self, error: Exception) -> None:
        """Start with an empty cache. Its data may be those of another source."""
        if (self.path / "blob").exists() or (self.path / "index").exists():
            reason = error if isinstance(error, owner.Damaged) else f"{self.path / 'cache.json'} is missing"
            log.warning("%s: the cache starts empty, because its data may belong to another source", reason)
        if isinstance(error, owner.Damaged):
            os.replace(self.path / "cache.json", self.path / "cache.json.broken")
        self._empty()

    def default_size_bytes(self) -> int:
        stat = os.statvfs(self.path)
        blob = self.path / "blob"
        used = blob.stat().st_blocks * 512 if blob.exists() else 0
        return used + int(stat.f_bavail * stat.f_frsize * FREE_SHARE)

    def _seed(self) -> int:
        """The seed of all checksums. Without it the blob cannot be verified: if it is lost, the cache is emptied."""
        seed = read_seed(self.path)
        if seed is None:
            self._empty()
            seed = make_seed(self.path)
        return seed

    def _empty(self) -> None:
        (self.path / "blob").unlink(missing_ok=True)
        shutil.rmtree(self.path / "index", ignore_errors=True)

    def open_blob(self) -> Blob:
        try:
            return Blob(self.path / "blob", self._seed())
        except OSError as error:
            raise CacheFsError(f"cannot open the blob in {self.path}: {error.strerror or error}") from error

    def import_snapshot(self, file: Path, blob: Blob, root: tuple[int, int], mutable: Sequence[str]) -> None:
        """Make the index of a new cache from a metadata snapshot. Raises CacheFsError if that fails.

        `root`: inode number and birth time (ns; 0: not known) of the source. `mutable`: the patterns of `--mutable`.
        """
        index = self.path / "index"
        if (index / DATA).exists() or blob.size():
            log.info("the cache %s is not empty: the snapshot %s is not imported", self.path, file)
            return
        for place in (index, index.with_name("index.new")):
            shutil.rmtree(place, ignore_errors=True)
        command = [sys.executable, "-m", "cachefs.store.snapshot", str(file), str(index), *map(str, root), *mutable]
        package = Path(__file__).resolve().parents[2]  # the working directory of a daemon is /
        done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise CacheFsError(said[-1] if said else f"the snapshot {file} could not be imported")
        log.info("started from the snapshot %s: %s names", file, done.stdout.strip())

    def open_durable(self, blob: Blob) -> Environment:
        """The durable index, rebuilt from the blob if it is lost or damaged."""
        path = self.path / "index"
        try:
            return durable_index.opened(path, blob, b"" if self._same_mount else owner.cache_of(self.path))
        except IndexUnavailable as error:
            raise CacheFsError(str(error)) from error
        except OSError as error:
            raise CacheFsError(f"cannot open the index in {path}: {error.strerror or error}") from error

    def close(self) -> None:
        os.close(self._lock)


class _Survivor(NamedTuple):
    """The session of a daemon that crashed, in this boot of the machine."""

    takeovers: int
    forgot: bool
    is_complete: bool
    lost_records: bool
    """The durable index is not the one that the session belongs to: it was lost or damaged, and rebuilt, or it is
    another one's."""
    run: int
    given_aliases: aliases.Given


def _is_gone(session_path: Path) -> str:
    return f"cannot take over the mount: {session_path} is gone; unmount, then mount again"


def _identity(durable: Environment) -> bytes:
    """Random bytes that no other index has. An index of an earlier version gets them now, if there is room."""
    value = durable.get(Table.META, _IDENTITY_KEY)
    if value:
        return bytes(_IDENTITY.unpack(value)[1])
    identity = secrets.token_bytes(16)
    try:
        with durable.write() as txn:
            txn.put(_IDENTITY_KEY, _IDENTITY.pack(PINNED, identity), db=durable.tables[Table.META])
    except IndexUnavailable:
        return _UNKNOWN
    return identity


def _survivor(session_path: Path, before: RunState, identity: bytes, *, same_mount: bool) -> _Survivor | None:
    """`before`: the last run. `identity`: of the index. None: there is no session, or it is not of that run.

    `same_mount`: the session is of this mount, whatever the durable index says.
    """
    is_of_boot = not before.clean and before.boot_id == boot_id()
    if not (is_of_boot or same_mount) or not (session_path / DATA).exists():
        return None
    try:
        with closing(Environment(session_path, sync=False)) as session:
            value, given = session.get(Table.META, _SESSION_KEY), aliases.recorded(session)
    except IndexUnavailable as error:
        log.warning("the session of the last run cannot be opened: %s", error)
        return None
    # An earlier version has recorded no identity.
    _, forgot, run, takeovers, of_index = _SESSION.unpack((value or b"").ljust(_SESSION.size, b"\0"))
    is_same_run = run == before.run and (of_index == identity or _UNKNOWN in (of_index, identity))
    is_complete = overflow.is_complete(session_path / DATA)
    # After an incomplete session another run begins; a daemon may have died before it wrote the run to the session.
    lost_records = same_mount and is_complete and not (is_of_boot and is_same_run)
    if not (is_same_run or lost_records or not is_complete):
        return None
    return _Survivor(takeovers, bool(forgot), is_complete and not lost_records, lost_records, run, given)


def _next_run(before: RunState, rctime: bytes, *, trusted: bool, is_lax: bool) -> RunState:
    """`trusted`: the durable index has all that the last run recorded. `is_lax`: --revalidate=never."""
    run = before.run + 1
    floor = before.floor if trusted and is_lax else run
    is_unmoved = trusted and bool(rctime) and rctime == before.rctime
    # Imported records have the number of the run that begins now, and were not compared in it.
    unmoved_floor = before.unmoved_floor if is_unmoved else max(run, before.unmoved_floor)
    if floor < unmoved_floor:  # a file that is opened in this run gets its number without a comparison
        unmoved_floor = run + 1
    return RunState(run, floor, False, boot_id(), rctime, unmoved_floor)


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
        """Begins a new run. `rctime`: of the source's root (rctime.py), empty if it cannot be used.

        `mutable`: the patterns of `--mutable`. What was pinned with other patterns is compared, and may be mutable now.

        `same_mount`: continues the run of a daemon that died and whose mount did not (hazard 12). Raises CacheFsError
        if its session is gone. If the session is incomplete (overflow.py), or the durable index was rebuilt, another
        run begins for the same mount, which compares everything.
        """
        last = runs.last_run(durable)
        before = last or RunState()
        self._identity = _identity(durable)
        survivor = _survivor(session_path, before, self._identity, same_mount=same_mount)
        self.lost_records = survivor is not None and survivor.lost_records
        """The kernel may know names, too, of which no record is left."""
        if survivor is not None and survivor.lost_records:
            before = replace(before, run=max(before.run, survivor.run + 1))  # + 1: the run that began at the damage
        is_complete = survivor is not None and survivor.is_complete
        if survivor is None:
            if same_mount:
                raise CacheFsError(_is_gone(session_path))
            shutil.rmtree(session_path, ignore_errors=True)
        given = aliases.recorded_at_start(durable)
        if survivor is not None:
            given = given.and_those(survivor.given_aliases)
        if not is_complete and not (survivor is None and before.clean):
            given = given.and_lost_ones()
        self._given_aliases = given
        recorded = mutable_patterns.last(durable)
        same_patterns = mutable_patterns.only_loses_defaults(recorded, mutable)
        # After a crash of the machine the last changes may be lost.
        trusted = last is not None and (before.clean or is_complete) and same_patterns
        self._is_lax = revalidate is Revalidate.NEVER
        self.state = _next_run(before, rctime, trusted=trusted, is_lax=self._is_lax)
        if same_mount and is_complete:
            self.state = before
        self.forgot = same_mount and survivor is not None and (survivor.forgot or not is_complete)
        """The kernel may know inodes and versions that an earlier daemon knew, and this one does not."""
        is_known = same_patterns and (is_complete or survivor is None)
        self.names_floor = mutable_patterns.since(durable) if is_known else before.run + 1
        """The run since which the patterns are the same, and no name is missing: a directory that has not changed
        does not prove that names that were recorded earlier are valid."""
        self.takeovers = survivor.takeovers + 1 if same_mount and survivor is not None else 0
        """How many times a daemon has taken this run over."""
        self.index = Index(durable, Environment(session_path, sync=False))
        self.index.session.reserve(SESSION_RESERVE_BYTES)
        if survivor is not None:
            self._recover(rctime, same_mount=same_mount)
        self.count_takeovers(self.takeovers)
        if self.state != last or recorded != set(mutable):
            self._begin_run(mutable)
        with self.index.update() as update:
            aliases.record(update, self._given_aliases)

    def _recover(self, rctime: bytes, *, same_mount: bool) -> None:
        """Continue with the session of a daemon that died. If there is no room for that and no mount needs it, a new
        session begins: the old one contains nothing but what was to be committed to the durable index."""
        try:
            self.index.recover_session(same_mount=same_mount, lost_records=self.lost_records)
        except IndexUnavailable as error:
            if same_mount:
                raise
            log.warning("%s; everything is compared with the source", error)
            path = self.index.session.path
            self.index.session.close()
            shutil.rmtree(path, ignore_errors=True)
            self.index = Index(self.index.durable, Environment(path, sync=False))
            self.state = replace(self.state, floor=self.state.run, rctime=rctime, unmoved_floor=self.state.run)
            self.names_floor = self.state.run

    def _begin_run(self, mutable: Sequence[str]) -> None:
        durable = self.index.durable
        self.state.store(durable)
        self._given_aliases.store(durable)
        # After the floor: a crash in between only causes another comparison.
        mutable_patterns.store(durable, mutable, self.names_floor)
        self.index.note_run(self.state.run, time.time_ns())
        self.index.session.overflow.begin()

    @property
    def links_floor(self) -> int:
        """The floor of files with several names. rctime.py cannot vouch for them: earlier runs are valid only with
        --revalidate=never."""
        return self.state.floor if self._is_lax else self.state.run

    @property
    def may_be_unmoved(self) -> bool:
        """Would earlier runs be valid if the source's root had the same rctime for longer?"""
        return bool(self.state.rctime) and self.state.unmoved_floor < self.state.floor

    def revalidate_earlier_runs(self, rctime: bytes) -> bool:
        """`rctime`: a while after the run began. True if it is unchanged: earlier runs are valid from now on.

        Raises IndexUnavailable if that cannot be stored. In a thread: it waits for the disk and for other commits.
        """
        if not self.may_be_unmoved or rctime != self.state.rctime:
            return False
        state = replace(self.state, floor=self.state.unmoved_floor)
        state.store(self.index.durable)
        self.state = state
        return True

    def count_takeovers(self, takeovers: int) -> None:
        """Store the number of take-overs, so that the numbers of a successor begin after ours (runs.py)."""
        self.takeovers = takeovers
        with self.index.update() as update:
            value = _SESSION.pack(0, self.forgot, self.state.run, takeovers, self._identity)
            update.put(Table.META, _SESSION_KEY, value)

    def close(self, *, flushed: bool) -> None:
        """`flushed`: all pinned values are in the durable index, so that the next run may trust it."""
        self.index.durable.damage.close()
        if flushed:
            self.state = replace(self.state, clean=True)
            try:
                self.state.store(self.index.durable)
            except IndexUnavailable as error:
                log.warning("%s; the next mount compares with the source", error)
                flushed = False
        self.index.close()
        if flushed:
            pages.write_checksum(self.index.durable.path / DATA)
            shutil.rmtree(self.index.session.path, ignore_errors=True)
