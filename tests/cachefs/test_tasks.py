"""Slots, single flight, fetches and write-behind, with fakes for what cannot be made to happen on demand."""

import errno
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import outcome
import pytest
import trio
import trio.testing

from cachefs.contract.index import Table
from cachefs.data.data_cache import DataCache
from cachefs.data.fetcher import Fetcher, OpenFile
from cachefs.data.write_behind import PAUSE_S, WriteBehind
from cachefs.data.young_files import YoungFiles
from cachefs.options import Options
from cachefs.source.call_pool import CallPool
from cachefs.source.directories import ROOT
from cachefs.source.identity import Changed
from cachefs.source.single_flight import SingleFlight, unwrap
from cachefs.source.source import Object
from cachefs.stats.metrics import Metrics
from cachefs.store.blob import record
from cachefs.store.blob.blob import Blob
from cachefs.store.index.environment import Environment
from cachefs.store.index.index import Index
from cachefs.store.index.records import PINNED, Inode, inode_key

SEED = 99


class Clock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(function: Callable[..., Any], *arguments: Any) -> None:
    async def bounded() -> None:
        with trio.fail_after(20):
            await function(*arguments)

    trio.run(bounded)


def test_slots_give_results_and_errors() -> None:
    async def main() -> None:
        call_pool = CallPool(2, 10)
        assert await call_pool.run(lambda: 42) == 42
        with pytest.raises(FileNotFoundError):
            await call_pool.run(lambda: open("/does/not/exist"))
        results: list[int] = []
        async with trio.open_nursery() as nursery:
            for number in range(20):

                async def one(number: int = number) -> None:
                    results.append(await call_pool.run(lambda: number))

                nursery.start_soon(one)
        assert sorted(results) == list(range(20))
        call_pool.close()

    run(main)


def test_20_stuck_calls_keep_their_slots_and_when_all_are_stuck_new_ones_fail_at_once() -> None:
    async def main() -> None:
        clock = Clock()
        call_pool = CallPool(2, 5, clock=clock)
        gate = threading.Event()
        errors: list[int | None] = []
        discarded: list[str] = []

        def hang() -> str:
            gate.wait(15)
            return "too late"

        async def one(function: Callable[[], str] = hang) -> None:
            try:
                await call_pool.run(function, discard=discarded.append)
                errors.append(None)
            except OSError as error:
                errors.append(error.errno)

        async with trio.open_nursery() as nursery:
            for _ in range(3):  # two run, one waits
                nursery.start_soon(one)
            await trio.testing.wait_all_tasks_blocked()
            call_pool.abandon_overdue()
            assert call_pool.hanging.stuck == 0
            clock.now += 6
            call_pool.abandon_overdue()
        assert errors == [errno.ETIMEDOUT] * 3 and call_pool.hanging.stuck == 2 and call_pool.timeouts == 3
        await one(lambda: "a probe")  # one probe a second goes through
        await one(lambda: "refused")
        assert errors[3:] == [None, errno.ETIMEDOUT]
        clock.now += 1.1
        await one(lambda: "the next probe")
        assert errors[5:] == [None]
        gate.set()
        while call_pool.hanging.stuck:
            await trio.sleep(0.001)
        assert discarded == ["too late"] * 2  # a result that nobody waits for is given back
        await one(lambda: "normal again")
        await one(lambda: "and again")
        assert errors[6:] == [None, None]
        call_pool.close()

    run(main)


def test_a_cancelled_waiter_leaves_its_call_alone() -> None:
    async def main() -> None:
        call_pool = CallPool(1, 60)
        gate = threading.Event()
        discarded: list[int] = []
        with trio.move_on_after(0.01):
            await call_pool.run(lambda: (gate.wait(15), 7)[1], discard=discarded.append)
        gate.set()
        assert await call_pool.run(lambda: 8) == 8
        assert discarded == [7]
        call_pool.close()

    run(main)


def test_single_flight_answers_all_and_cancelling_one_poisons_nobody() -> None:
    async def main() -> None:
        flights: SingleFlight[str, int] = SingleFlight()
        started: list[Callable[[outcome.Outcome[int]], None]] = []
        results: list[Any] = []

        async def one() -> None:
            try:
                results.append(await flights.begin("key", started.append, unwrap).wait())
            except OSError as error:
                results.append(error)

        for answer in (outcome.Value(5), outcome.Error(OSError(errno.EIO, "x"))):
            started.clear()
            results.clear()
            async with trio.open_nursery() as nursery:
                with trio.CancelScope() as scope:
                    nursery.start_soon(one)
                    nursery.start_soon(one)
                    await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()

                async def gives_up() -> None:
                    with trio.move_on_after(0):
                        await one()

                nursery.start_soon(gives_up)
                await trio.testing.wait_all_tasks_blocked()
                assert len(started) == 1
                started[0](answer)
            assert len(results) == 2 and flights.flying("key") is None
            if isinstance(answer, outcome.Error):
                assert results[0] is not results[1] and {e.errno for e in results} == {errno.EIO}
            else:
                assert results == [5, 5]

    run(main)


class FakeSource:
    generation = 0

    """Answers reads from memory, when it is allowed to."""

    def __init__(self) -> None:
        self.payload = bytes(range(256)) * 400
        self.reads: list[tuple[int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.changed = False

    def read_version(self, at: Object, expected: Inode, offset: int, length: int, fd: Any, *, keep: bool) -> bytes:
        self.reads.append((offset, length))
        assert self.gate.wait(15)
        if self.changed:
            raise Changed
        return self.payload[offset : offset + length]


def inode(number: int = 7, size: int = 100_000, version: int = 1) -> Inode:
    return Inode(number, PINNED, *(0,) * 21)._replace(mode=0o100644, size=size, version=version, validated_run=1)


class NoPages:
    async def pages(self, numbers: Iterable[int]) -> None:
        raise AssertionError("no file is young here")


class Parts:
    """A data cache and a fetcher on a real index and a real blob."""

    def __init__(self, path: Path, *, capacity: int = 1 << 30, queue_bytes: int = 1 << 26) -> None:
        self.index = Index(Environment(path / "durable", sync=True), Environment(path / "session", sync=False))
        self.blob = Blob(path / "blob", SEED)
        self.metrics = Metrics()
        self.clock = Clock()
        writes = WriteBehind(self.index, self.blob, self.metrics, capacity, clock=self.clock, queue_bytes=queue_bytes)
        self.data = DataCache(self.index, self.blob, Options(cache_size_bytes=capacity), self.metrics, writes)
        self.source = FakeSource()
        self.call_pool = CallPool(8, 60)
        self.dropped: list[int] = []
        self.fetcher = Fetcher(
            self.source,  # type: ignore[arg-type]
            self.call_pool,
            self.data,
            self.metrics,
            object_of=lambda number, view: Object(ROOT, b"name"),
            other_name=lambda number, error: None,
            changed=lambda changed, error: self.dropped.append(changed.number),
            own_change=lambda number: None,
            young=YoungFiles(NoPages()),
            record=lambda number: None,
        )

    def pin(self, record_: Inode) -> None:
        with self.index.update() as update:
            update.put(Table.INODES, inode_key(record_.number), record_.pack())

    def close(self) -> None:
        self.call_pool.close()
        self.index.close()
        self.blob.close()


def test_a_miss_is_fetched_once_answered_before_the_append_and_a_hit_from_then_on(tmp_path: Path) -> None:
    async def main() -> None:
        parts = Parts(tmp_path)
        parts.pin(inode())
        parts.source.gate.clear()
        results: list[bytes] = []

        async def reader(offset: int) -> None:
            results.append(bytes(await parts.fetcher.read(OpenFile(inode()), offset, 1000)))

        async with trio.open_nursery() as readers:
            for offset in (0, 5000, 99_500, 0):
                readers.start_soon(reader, offset)
            await trio.testing.wait_all_tasks_blocked()
            parts.source.gate.set()
        # Answered, though nothing writes behind yet.
        assert sorted(map(len, results)) == [500, 1000, 1000, 1000]
        assert parts.source.reads == [(0, 100_000)]
        assert (parts.metrics.misses, parts.metrics.hits, parts.index.totals.cached_files) == (4, 0, 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.data.writes.run)
            assert await parts.data.writes.flush(10)
            nursery.cancel_scope.cancel()
        assert parts.index.totals.cached_files == 1 and parts.data.writes.queued_bytes == 0
        assert await parts.fetcher.read(OpenFile(inode()), 5, 10) == parts.source.payload[5:15]
        assert parts.metrics.hits == 1 and len(parts.source.reads) == 1
        parts.close()

    run(main)


def test_11_a_change_is_estale_for_all_who_wait_and_drops_the_entry_once(tmp_path: Path) -> None:
    async def main() -> None:
        parts = Parts(tmp_path)
        parts.source.changed = True
        errors: list[int | None] = []

        async def reader() -> None:
            try:
                await parts.fetcher.read(OpenFile(inode()), 0, 10)
            except OSError as error:
                errors.append(error.errno)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(reader)
        assert errors == [errno.ESTALE] * 3
        assert set(parts.dropped) == {7} and parts.data.writes.queued_bytes == 0
        parts.close()

    run(main)


def test_a_full_queue_skips_admission_and_not_the_reader(tmp_path: Path) -> None:
    async def main() -> None:
        parts = Parts(tmp_path, queue_bytes=150_000)
        for number in (7, 8, 9):
            file = OpenFile(inode(number))
            assert await parts.fetcher.read(file, 10, 20) == parts.source.payload[10:30]
        assert parts.data.writes.queued_bytes == 100_000
        assert parts.metrics.skipped_admissions == 2
        assert parts.source.reads == [(0, 100_000), (10, 20), (10, 20)]  # what is not cached is not fetched whole
        parts.close()

    run(main)


def test_capacity_is_never_exceeded_not_even_by_what_is_queued(tmp_path: Path) -> None:
    async def main() -> None:
        one = record.record_bytes(100_000)
        parts = Parts(tmp_path, capacity=3 * one - 1)
        for number in range(2, 7):
            parts.pin(inode(number))
            await parts.fetcher.read(OpenFile(inode(number)), 0, 100_000)
        assert parts.data.used_bytes == 2 * one
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.data.writes.run)
            assert await parts.data.writes.flush(10)
            nursery.cancel_scope.cancel()
        assert parts.index.totals.blob_bytes == 2 * one == parts.data.used_bytes
        parts.close()

    run(main)


def test_a_disk_that_refuses_is_left_alone_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        parts = Parts(tmp_path)

        def refuse(_: Any) -> None:
            raise OSError(errno.ENOSPC, "injected")

        parts.pin(inode())
        with monkeypatch.context() as patch:
            patch.setattr(parts.blob, "append", refuse)
            await parts.fetcher.read(OpenFile(inode()), 0, 10)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(parts.data.writes.run)
                assert await parts.data.writes.flush(10)
                nursery.cancel_scope.cancel()
        assert (parts.metrics.errors, parts.index.totals.cached_files) == (1, 0)
        assert not parts.data.admits(inode(), 10)
        parts.clock.now += PAUSE_S
        assert parts.data.admits(inode(), 10)
        assert bytes(await parts.fetcher.read(OpenFile(inode()), 0, 10)) == parts.source.payload[:10]
        parts.close()

    run(main)


@pytest.mark.promise("TE-2")
def test_whatever_fails_behind_the_readers_costs_hits_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        parts = Parts(tmp_path)
        parts.pin(inode())
        real = parts.index.commit

        def broken(*_: Any) -> None:
            raise RuntimeError("a bug")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.data.writes.run)
            parts.index.commit = broken  # type: ignore[method-assign, assignment]
            assert bytes(await parts.fetcher.read(OpenFile(inode()), 0, 10)) == parts.source.payload[:10]
            assert not await parts.data.writes.flush(10)
            assert parts.data.writes.queued_bytes == 0 and parts.metrics.errors >= 1 and parts.index.dirty
            parts.index.commit = real  # type: ignore[method-assign]
            while not parts.index.available:
                await trio.sleep(0.05)
            assert await parts.data.writes.flush(10)
            assert bytes(await parts.fetcher.read(OpenFile(inode()), 0, 10)) == parts.source.payload[:10]
            assert await parts.data.writes.flush(10)
            nursery.cancel_scope.cancel()
        assert parts.index.totals.cached_files == 1
        parts.close()

    run(main)


def test_14_a_hole_is_punched_only_when_no_reader_can_see_the_extent(tmp_path: Path) -> None:
    async def main() -> None:
        parts = Parts(tmp_path)
        parts.pin(inode())
        await parts.fetcher.read(OpenFile(inode()), 0, 10)
        punched: list[Any] = []
        real = parts.data.writes.space.free
        parts.data.writes.space.free = lambda extent: (punched.append(extent), real(extent))[1]  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.data.writes.run)
            assert await parts.data.writes.flush(10)
            reader = parts.index.extent_reader()
            found = parts.index.extents(reader).at(7, 0)
            assert found is not None
            extent = found[1]
            parts.pin(inode(version=2))
            assert await parts.data.writes.flush(10)  # but for the hole: the reader holds it back
            assert parts.index.totals.cached_files == 0 and punched == []
            assert parts.blob.read(extent, 0, 10) == parts.source.payload[:10]
            reader.abort()
            with trio.fail_after(10):
                while not punched:
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        assert punched == [extent]
        parts.close()

    run(main)


def test_opening_begins_the_fetch(tmp_path: Path) -> None:
    async def main() -> None:
        parts = Parts(tmp_path)
        file = OpenFile(inode())
        with parts.index.view() as view:
            parts.fetcher.begin(view, file)
            parts.fetcher.begin(view, file)
        assert await parts.fetcher.read(file, 0, 10) == parts.source.payload[:10]
        assert (parts.metrics.misses, parts.metrics.hits) == (1, 0)
        with parts.index.view() as view:
            parts.fetcher.begin(view, file)
        assert await parts.fetcher.read(file, 0, 10) == parts.source.payload[:10]
        assert parts.metrics.hits == 1 and len(parts.source.reads) == 1
        parts.close()

    run(main)


def test_what_there_is_gets_settled_while_more_keeps_coming(tmp_path: Path) -> None:
    async def main() -> None:
        parts = Parts(tmp_path)
        done: list[bool] = []

        async def feed() -> None:
            number = 1000
            while True:
                number += 1
                parts.pin(inode()._replace(number=number))
                await trio.sleep(0.001)

        async def settle() -> None:
            done.append(await parts.data.writes.flush_queued(15))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed)
            nursery.start_soon(parts.data.writes.run)
            await trio.sleep(0.05)
            parts.pin(inode())
            async with trio.open_nursery() as waiting:  # and neither keeps the other from hearing of it
                waiting.start_soon(settle)
                waiting.start_soon(settle)
            assert done == [True, True]
            with parts.index.view() as view:
                assert view.in_durable(Table.INODES, inode_key(inode().number)) is not None
            nursery.cancel_scope.cancel()
        parts.close()

    run(main)
