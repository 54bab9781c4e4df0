"""Makes the objects of a mount's filesystem and connects them."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import get_ident

import trio

from cachefs.data.data_cache import DataCache
from cachefs.data.eviction import Eviction
from cachefs.data.fetcher import Fetcher
from cachefs.data.shared_files import SharedFiles
from cachefs.data.write_behind import WriteBehind
from cachefs.data.young_files import YoungFiles
from cachefs.fastpath.shared_memory import Shared
from cachefs.fs.attributes import Attributes
from cachefs.fs.descriptors import Descriptors
from cachefs.fs.directories import Directories
from cachefs.fs.handles import OpenFiles, no_request
from cachefs.fs.immutability import may_become_immutable_on_open
from cachefs.fs.invalidation import Invalidation
from cachefs.fs.listing_comparison import ListingComparisons
from cachefs.fs.mutations import Mutations
from cachefs.fs.names import FileSystem
from cachefs.fs.refusals import Refusals
from cachefs.fuse.notifier import KernelNotifier
from cachefs.fuse.operations import Operations
from cachefs.metadata.inode_cache import InodeCache
from cachefs.metadata.limit import InodeLimit
from cachefs.metadata.validity import Run
from cachefs.options import CacheLevel, Options
from cachefs.prefetch.engine import PrefetchEngine
from cachefs.prefetch.partition_check import PartitionCheck
from cachefs.prefetch.prefetcher import Prefetcher
from cachefs.source.call_pool import CallPool
from cachefs.source.directories import ROOT
from cachefs.source.source import Source
from cachefs.stats.metrics import Metrics
from cachefs.store.blob.blob import Blob
from cachefs.store.cache_directory import OpenedIndex
from cachefs.store.runs import Numbers
from cachefs.system.clock import boot_time_ns
from policies import prefetch
from policies.prefetch.dependency_graph import DependencyGraph, parse_graph

SOURCE_SLOTS = 64
"""How many calls of one user run at once."""
RESERVED_SOURCE_SLOTS = 64
_FIRST_HANDLE = 1 << 62
"""Handles of earlier versions are smaller. Those of a daemon begin at the time of its start, which
needs no record of them."""


class Components:
    """The objects of one mount's filesystem."""

    def __init__(
        self,
        source: Source,
        opened: OpenedIndex,
        blob: Blob,
        options: Options,
        nursery: trio.Nursery,
        device: int,
        shared: Shared | None,
        notifier: KernelNotifier | None = None,
        statfs: os.statvfs_result | None = None,
    ) -> None:
        """Makes each object and gives it what it needs. Longer than other functions, because it is one flat list.

        `device`: /dev/fuse. `shared`: the memory shared with a fast path, which answers OPEN; None: there is none.
        `notifier`: of another kernel than the one behind `device`. `statfs`: of the source; None: ask the source.
        """
        self._nursery = nursery
        index, state, clock = opened.index, opened.state, source.clock
        has_fastpath = shared is not None
        self.source, self.opened, self.blob, self.options = source, opened, blob, options
        metrics = self.metrics = Metrics()
        self.limit: InodeLimit | None = None
        """None: no limit on pinned inodes."""
        if options.metadata_limit is not None:
            self.limit = InodeLimit(index, options.metadata_limit, options.metadata_retention)
        notifier = self.notifier = notifier or KernelNotifier(device, None if shared is None else shared.fd)
        # Later, because a number may be needed in the middle of an update of the session, which would wait for itself.
        later = trio.lowlevel.current_trio_token().run_sync_soon
        words = {"pass_names_until_ns": 0} if shared is None else shared
        metadata = self.metadata = InodeCache(
            index,
            options,
            Run(
                state.run,
                state.floor,
                opened.state.run,
                opened.links_floor,
                opened.names_floor,
                opened.forgot,
                source.has_change_times or bool(state.rctime),  # only CephFS has one
                source.has_own_clock,
                source.sets_no_time_back,
                source.connection.volumes.trusted,
                source.connection.volumes.other_clocks,
            ),
            Numbers(state.run, opened.takeovers, lambda takeovers: later(opened.count_takeovers, takeovers)),
            notifier,
            partial(may_become_immutable_on_open, options),
            retention=self.limit,
            clock=clock,
            words=words,
        )
        self.policy = prefetch.make(options.prefetch, parse_graph(options.graph) if options.graph else ())
        eviction = None
        if options.evicts and blob.punches:
            part_of: Callable[[int], object] = metadata.directory_of
            if isinstance(self.policy, DependencyGraph):
                part_of = partial(_partition_of, self.policy, metadata)
            eviction = Eviction(index, options.retention, part_of)
        writes = self.writes = WriteBehind(
            index,
            blob,
            metrics,
            options.cache_size_bytes,
            eviction=eviction,
            beside_fastpath=options.fastpath and options.cache is CacheLevel.FULL,
        )
        appends = not options.fastpath
        data = self.data = DataCache(
            index,
            blob,
            options,
            metrics,
            writes,
            appends=appends,
            eviction=eviction,
            unreported_bytes=lambda: 0 if shared is None else shared["buffered_bytes"],
            is_left=lambda device: source.connection.volumes.is_left_to_daemon(device),
        )
        if appends or options.cache is not CacheLevel.FULL:  # else the fast path reports its old slabs
            writes.writer_has_gone(blob.frontier)
        call_pool = self.call_pool = CallPool(SOURCE_SLOTS, options.source_timeout_s, reserve=RESERVED_SOURCE_SLOTS)
        young = self.young = YoungFiles(
            notifier, index if has_fastpath else None, settle_ns=options.settle_ns, clock=clock
        )
        refusals = Refusals(metadata, metrics)
        invalidation = self.invalidation = Invalidation(metadata, data, notifier, refusals, options)
        filesystem = self.filesystem = FileSystem(source, call_pool, metadata, options, notifier, invalidation, words)

        # At once where requests are served; the thread that commits may find damage, too.
        serving, damage = get_ident(), index.durable.damage
        damage.run = lambda call: call() if get_ident() == serving else later(call)
        damage.on_found.add(self._records_lost)
        fetcher = Fetcher(
            source,
            call_pool,
            data,
            metrics,
            object_of=filesystem.object_of,
            changed=invalidation.modified_externally,
            other_name=invalidation.other_name,
            own_change=metadata.changes.end_of,
            young=young,
            record=metadata.current,
            reads_ahead=options.prefetch != "none",
        )
        descriptors = self.descriptors = Descriptors(
            filesystem,
            fetcher,
            SharedFiles(call_pool),
            data,
            has_fastpath=has_fastpath,
            next_handle=_FIRST_HANDLE | boot_time_ns(),
        )
        request_at = no_request if shared is None else shared.request_at
        files = self.files = OpenFiles(filesystem, descriptors, data, metrics, young, request_at)
        comparisons = ListingComparisons(filesystem, nursery)
        directories = self.directories = Directories(filesystem, comparisons, young, request_at)
        mutations = self.mutations = Mutations(filesystem, descriptors, comparisons, refusals)
        attributes = self.attributes = Attributes(filesystem, descriptors, data, young, statfs)
        self.operations = Operations(
            filesystem, descriptors, files, directories, mutations, attributes, metrics.latencies
        )

    def _records_lost(self) -> None:
        """The index is damaged (damage.py)."""
        if self.operations.recovering is None:
            self.metadata.doubt_everything()
            self.operations.recovering = trio.Event()
            self._nursery.start_soon(self._recover)

    async def _recover(self) -> None:
        """Requests wait until there is a root, which is known without a look-up."""
        assert self.operations.recovering is not None
        with suppress(OSError):  # the source is gone
            await self.filesystem.compare_root()
        self.operations.recovering.set()
        await self.drop_names()

    async def drop_names(self) -> None:
        await self.invalidation.records_lost(self.call_pool.run(partial(self.source.readdir, ROOT)))


def make_prefetcher(components: Components, engine: PrefetchEngine) -> Prefetcher | None:
    """None: the policy only fetches parts of open files."""
    options = components.options
    if options.prefetch not in prefetch.BEYOND_FILES:
        return None
    check = None
    if isinstance(components.policy, DependencyGraph):
        check = PartitionCheck(components.policy.partitions, components.filesystem)
    prefetcher = Prefetcher(components.policy, engine, evicts=options.evicts_ahead, check=check)
    if options.prefetch in prefetch.LISTENING:
        components.data.on_accessed.add(prefetcher.read)
    return prefetcher


def _partition_of(graph: DependencyGraph, metadata: InodeCache, number: int) -> str | None:
    try:
        with metadata.index.view() as view:
            return graph.partition_of(metadata.paths.path(view, number))
    except OSError:  # it has lost its name
        return None
