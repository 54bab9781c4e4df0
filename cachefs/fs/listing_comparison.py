"""Comparing a listing with the source: reads the directory once, and stats its names in parallel.

A listing is pinned if this mount pins the directory. Otherwise it is valid for `attr_timeout_s` and then made again, so
that changes by other nodes show up. Names with a valid entry are not compared again.

A name that the source does not answer for, such as the mountpoint of another user's FUSE filesystem, is *bare*: it is
listed without attributes. It delays a listing by one second, once: as long as its call hangs (call_pool.py), the name
is not asked for again. Either the name hangs, or the source does. So the directory itself is asked, and the name is
given up only if the directory answers.

Listings for background work are *polite*: they stat fewer names at a time, and pause while requests wait, until a
request wants the same listing.
"""

import errno
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import trio

from cachefs.errors import PermissionsChanged, failed
from cachefs.fs.names import FileSystem
from cachefs.metadata.listings import Listings
from cachefs.source.directories import NOT_KNOWN_NS, Directory
from cachefs.source.identity import Changed
from cachefs.source.single_flight import SingleFlight, in_task, unwrap
from cachefs.source.source import Look
from cachefs.store.index.records import LISTED, Inode
from cachefs.system.stat import Stat

BATCH_NAMES = 16
PARALLEL_BATCHES = 48
POLITE_BATCHES = 6
PAUSE_S = 0.001
CHUNK_NAMES = 64
"""How many names are looked at before other tasks may run."""
TURN_NAMES = 2
"""How many answers are recorded at once. Only one batch at a time does so: other requests wait for one turn only."""
PATIENCE_S = 1.0
"""How long a listing waits for one name before it asks whether the directory answers."""
REMEMBERED_LISTINGS = 4096
T = TypeVar("T")
ROOT_USER = 0


@dataclass(slots=True)
class _Comparison:
    """The comparison of one listing: what is known so far of the names that must be compared."""

    limiter: trio.CapacityLimiter
    looks: set[Look] = field(default_factory=set)
    """Calls that are under way."""
    errors: list[OSError] = field(default_factory=list)
    gone: set[bytes] = field(default_factory=set)
    """Names that were gone when they were looked at."""
    bare: dict[bytes, OSError] = field(default_factory=dict)
    """Names that cannot be looked at, and why. A look-up of such a name asks the source, and gets its error."""
    overtaken: set[bytes] = field(default_factory=set)
    """Names that this mount has changed meanwhile. The answers of the source are outdated."""

    def give_up(self, names: Iterable[bytes]) -> None:
        self.bare.update((name, failed(errno.ETIMEDOUT)) for name in names)


class ListingComparisons:
    def __init__(self, filesystem: FileSystem, nursery: trio.Nursery) -> None:
        # dependencies
        self._fs = filesystem
        self._metadata = filesystem.metadata
        self._listings = Listings(filesystem.metadata)
        self._nursery = nursery
        self._clock = filesystem.source.clock
        # state
        self._flights: SingleFlight[int, None] = SingleFlight()
        self._fresh: dict[int, tuple[tuple[int, int], float]] = {}
        """Directory → (version and mtime, until when its listing is valid). A FORGET deletes the record and its names;
        the next record has another version. The listing of before an mtime must not be shown with that mtime."""
        self._bare: dict[int, dict[bytes, OSError]] = {}
        """Directory → its bare names, and why they are bare."""
        self._under_way: dict[int, _Comparison] = {}
        """Directory → the comparison that is under way."""
        filesystem.metadata.index.durable.damage.on_found.add(self._fresh.clear)  # rows may be lost
        self._turn = trio.Lock()
        self._polite: set[int] = set()
        """Directories whose listings only background work waits for."""
        self._lookups_seen = 0

    def bare(self, number: int) -> dict[bytes, OSError]:
        """The bare names of a directory, and why they are bare."""
        return self._bare.get(number, {})

    def is_valid(self, inode: Inode) -> bool:
        """Is the listing of a directory complete and valid?"""
        complete = self._metadata.is_pinned(inode) and inode.flags & LISTED and inode.number not in self._bare
        if self._fs.options.pins_everything and complete:
            return True
        state, until = self._fresh.get(inode.number, (None, 0.0))
        return state == (inode.version, inode.mtime_ns) and self._clock.monotonic_s() < until

    def changed(self, number: int) -> None:
        """This mount has changed the directory: the next listing reads it again."""
        self._fresh.pop(number, None)

    def overtake(self, number: int, name: bytes) -> None:
        """This mount has changed what a name leads to."""
        if number in self._under_way:
            self._under_way[number].overtaken.add(name)

    async def ask_bare(self, number: int) -> None:
        """Ask again, and wait, for names that hang: a listing does not wait for them for long."""

        async def ask(name: bytes) -> None:
            with suppress(OSError):
                await self._fs.compare(number, name)
                bare.pop(name, None)

        bare = self.bare(number)
        async with trio.open_nursery() as nursery:
            for name, error in list(bare.items()):
                if error.errno == errno.ETIMEDOUT and self._fs.call_pool.hanging.may_risk():
                    nursery.start_soon(ask, name)

    async def make(self, number: int, owner: int = ROOT_USER) -> None:
        """Make the listing of a directory, for a request. `owner`: the user who requests it."""
        self._polite.discard(number)
        await self._make(number, owner)

    async def make_politely(self, number: int) -> None:
        """The same for background work."""
        self._polite.add(number)
        try:
            await self._make(number)
        finally:
            self._polite.discard(number)

    async def _make(self, number: int, owner: int = ROOT_USER) -> None:
        """Raises `PermissionsChanged` if the user may no longer list the directory. For other changes it does not: the
        kernel does not walk the path again for a listing."""
        start = in_task(self._nursery, partial(self._list_once, number))
        if number in self._under_way and self._under_way[number].overtaken:
            with suppress(OSError):  # it began before a change that this request must see
                await self._flights.ask(number, start, unwrap)
        try:
            await self._flights.ask(number, start, unwrap)
        except PermissionsChanged as error:
            if not error.admits(owner):
                raise
            await self._flights.ask(number, start, unwrap)

    async def _step_aside(self, number: int) -> None:
        """If only background work waits for this listing, pause for a moment where requests have arrived."""
        if number in self._polite and self._fs.lookups != self._lookups_seen:
            self._lookups_seen = self._fs.lookups
            await trio.sleep(PAUSE_S)

    async def _list_once(self, number: int) -> None:
        batches = POLITE_BATCHES if number in self._polite else PARALLEL_BATCHES
        found = _Comparison(trio.CapacityLimiter(batches))
        self._under_way[number] = found
        try:
            await self._list(number, found)
        finally:
            del self._under_way[number]

    async def _list(self, number: int, found: _Comparison) -> None:
        """Make the listing in the index complete, and each of its entries valid."""
        directory = await self._fs.revalidated(number)
        at = self._fs.directory(number)
        pin = at.path is not None and self._fs.pins(at.path)
        known = pin and bool(directory.flags & LISTED)
        if known:
            with self._metadata.index.view() as view:
                names = [name for _, name in self._listings.rows(view, number, 0)]
        else:
            try:
                names, now = await self._fs.ask(number, partial(self._fs.source.listing, at))
                directory = self._adopt(directory, now)
            except Changed:
                if directory.nlink:
                    raise
                names = []  # this mount has removed it, and it is still open
        started = self._clock.monotonic_s()
        doubtful, is_current = await self._doubtful(directory, names)
        asked = [name for name in doubtful if self._fs.call_pool.may_ask((number, name))]
        if len(asked) < len(doubtful):
            found.give_up(set(doubtful).difference(asked))
        async with trio.open_nursery() as watching:
            if asked:
                watching.start_soon(self._watch, at, found.looks)
            async with trio.open_nursery() as nursery:
                for start in range(0, len(asked), BATCH_NAMES):
                    await found.limiter.acquire_on_behalf_of(start)
                    batch = asked[start : start + BATCH_NAMES]
                    release = partial(found.limiter.release_on_behalf_of, start)
                    nursery.start_soon(self._stat_batch, at, batch, found, nursery, release)
            watching.cancel_scope.cancel()
        if found.errors:
            raise found.errors[0]
        if found.bare and not known:
            await self._fs.learnt_in(at, NOT_KNOWN_NS)  # nothing says when these names came
        for name in found.overtaken:
            found.bare.pop(name, None)
        before = self._bare.pop(number, {})
        if found.bare:
            self._remember(self._bare, number, found.bare)
        if is_current and not pin and not before:
            listed = False
        elif not known:
            shown = [name for name in names if name not in found.gone]
            listed = await self._write_rows(directory, at.path, shown, pin, found.bare, {*before, *found.bare})
        else:
            listed = not found.bare
            if found.gone:  # a row may be left of a name that has no dentry
                with self._metadata.index.update() as update:
                    self._listings.remove_rows(update, number, set(names) - found.gone)
        if not listed and not found.overtaken:
            state = directory.version, directory.mtime_ns
            self._remember(self._fresh, number, (state, started + self._fs.options.unpinned_timeout_s))

    def _adopt(self, before: Inode, now: Stat) -> Inode:
        """The record of a directory with the attributes that it had when its names were read."""
        with self._metadata.index.update() as update:
            inode = self._metadata.inode(update, before.number)
            if inode is None or inode.version != before.version:
                return before
            return self._fs.permissions.adopt(update, inode, now, has_listed=True)

    def _remember(self, table: dict[int, T], number: int, value: T) -> None:
        if len(table) >= REMEMBERED_LISTINGS:
            table.clear()
        table[number] = value

    async def _doubtful(self, directory: Inode, names: list[bytes]) -> tuple[list[bytes], bool]:
        """The names that must be compared, and whether none must be and the rows are exactly those of these names."""
        doubtful = []
        with self._metadata.index.view() as view:
            rows = {name: position for position, name in self._listings.rows(view, directory.number, 0)}
        in_place = 0
        for start in range(0, len(names), CHUNK_NAMES):
            with self._metadata.index.view() as view:
                for name in names[start : start + CHUNK_NAMES]:
                    dentry = self._metadata.dentry(view, directory.number, name)
                    if dentry is None or self._metadata.valid_entry(view, directory, dentry) is None:
                        doubtful.append(name)
                    else:
                        in_place += dentry.position == rows.get(name)
            await trio.lowlevel.checkpoint()
        return doubtful, in_place == len(names) == len(rows)

    async def _stat_batch(
        self,
        at: Directory,
        names: list[bytes],
        found: _Comparison,
        nursery: trio.Nursery,
        release: Callable[[], object] | None = None,
    ) -> None:
        try:
            if not self._fs.call_pool.hanging.may_risk():  # too many calls hang: the names will do
                found.give_up(names)
                return
            began_ns = self._clock.realtime_ns()
            look = Look(self._fs.source, at, names)
            found.looks.add(look)
            try:
                stats = await self._fs.ask(at.number, look)
            except OSError as error:
                if error.errno != errno.ETIMEDOUT:
                    raise
                stats = look.results[: len(names) if look.given_up_at is None else look.given_up_at]
                found.give_up(names[len(stats) :])
            finally:
                found.looks.discard(look)
            if look.given_up_at is not None:
                for name in names[look.given_up_at + 1 :]:  # one by one: others may hang as well
                    del found.bare[name]
                    nursery.start_soon(self._stat_batch, at, [name], found, nursery)
            await self._take_stats(at, names[: len(stats)], stats, found, began_ns)
        except OSError as error:
            found.errors.append(error)
        finally:
            if release is not None:
                release()

    async def _take_stats(
        self, at: Directory, names: list[bytes], stats: list[Stat | OSError | None], found: _Comparison, began_ns: int
    ) -> None:
        changed = [NOT_KNOWN_NS if isinstance(now, OSError) else at.changed_ns(now) for now in stats if now is not None]
        if changed:
            await self._fs.learnt_in(at, max(changed))
        answers: list[tuple[bytes, Stat | None]] = []
        for name, now in zip(names, stats, strict=True):
            if isinstance(now, OSError):
                found.bare[name] = now
            else:
                answers.append((name, now))
        found.gone.update(name for name, now in answers if now is None)
        for start in range(0, len(answers), TURN_NAMES):
            async with self._turn:
                part = answers[start : start + TURN_NAMES]
                self._write_stats(at, [answer for answer in part if answer[0] not in found.overtaken], began_ns)
            await self._step_aside(at.number)

    async def _watch(self, at: Directory, looks: set[Look]) -> None:
        """Give up names that the source does not answer for while it answers for their directory."""
        while True:
            await trio.sleep(PATIENCE_S / 4)
            late = [(look, len(look.results)) for look in looks if look.waits_s() >= PATIENCE_S]
            if not late:
                continue
            try:
                await self._fs.ask(at.number, partial(self._fs.source.ask_directory, at))
            except OSError:
                continue  # the source hangs, not the name
            for look, index in late:
                if look in looks and len(look.results) == index < len(look.names):
                    question = at.number, look.names[index]
                    if look.waits_s() >= PATIENCE_S and self._fs.call_pool.give_up(look, question):
                        look.given_up_at = index

    def _write_stats(self, at: Directory, found: Sequence[tuple[bytes, Stat | None]], began_ns: int) -> None:
        prefix = at.path + b"/" if at.path else b""
        with self._metadata.index.update() as update:
            for name, now in found:
                if now is None:
                    self._metadata.apply_absence(update, at.number, name, pin=False)
                else:
                    pin = self._fs.pins(prefix + name)
                    inode = self._metadata.apply_stat(update, at.number, name, now, pin=pin, counted=False)
                    self._fs.permissions.recorded(update, inode, now, began_ns)

    async def _write_rows(
        self,
        before: Inode,
        path: bytes | None,
        names: list[bytes],
        pin: bool,
        bare: Collection[bytes],
        was_bare: set[bytes],
    ) -> bool:
        """Record a listing that was read when the directory was as in `before`. Returns whether it is LISTED now.

        It is, if all its names are pinned, no mutable name may appear, and the directory was not dropped or changed
        meanwhile, nor shortly before. It says nothing about names that the directory does not list (validity.py).
        """
        number = before.number
        with self._metadata.index.update() as update:
            places = self._listings.remove_rows(update, number, set(names), was_bare)
        wanting: list[bytes] = []
        for start in range(0, len(names), CHUNK_NAMES):
            with self._metadata.index.update() as update:
                directory = self._metadata.inode(update, number)
                if directory is None:
                    return False
                part = names[start : start + CHUNK_NAMES]
                _, without = self._listings.add_rows(update, directory, part, pin=pin, bare=bare, placed=places)
            wanting += without
            await trio.lowlevel.checkpoint()
        if not pin or wanting or bare or self._metadata.mutable_names.may_come(path):
            return False
        with self._metadata.index.update() as update:
            directory = self._metadata.inode(update, number)
            if directory is None or not self._metadata.shows_changes(before, directory):
                return False
            self._metadata.put_inode(update, directory._replace(flags=directory.flags | LISTED))
        return True
