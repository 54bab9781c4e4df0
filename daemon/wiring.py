"""The filesystem's objects and what each of them is given."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
from cachefs.fuse.notifier import KernelNotifier
from cachefs.fuse.operations import Operations
from cachefs.metadata.inode_cache import InodeCache
from cachefs.metadata.limit import InodeLimit
from cachefs.metadata.validity import Run
from cachefs.options import CacheLevel, Options
from cachefs.prefetch.engine import PrefetchEngine
from cachefs.prefetch.prefetcher import Prefetcher
from cachefs.source.call_pool import CallPool
from cachefs.source.source import Source
from cachefs.stats.metrics import Metrics
from cachefs.store.blob.blob import Blob
from cachefs.store.cache_directory import OpenedIndex
from cachefs.store.index.index import Index
from cachefs.store.runs import Numbers
from cachefs.system.clock import Clock, boot_time_ns
from policies import prefetch
from policies.prefetch.base import Prefetch
from policies.prefetch.dependency_graph import DependencyGraph, parse_graph

SOURCE_SLOTS = 64
"""Of one user."""
RESERVED_SOURCE_SLOTS = 64
_FIRST_HANDLE = 1 << 62
"""Handles of earlier versions are below. Each daemon's begin at the time of its start: that needs no record of them."""


@dataclass(frozen=True, slots=True)
class Components:
    """One mount's filesystem."""

    options: Options
    source: Source
    call_pool: CallPool
    opened: OpenedIndex
    blob: Blob
    metrics: Metrics
    metadata: InodeCache
    writes: WriteBehind
    data: DataCache
    invalidation: Invalidation
    filesystem: FileSystem
    notifier: KernelNotifier
    young: YoungFiles
    descriptors: Descriptors
    files: OpenFiles
    directories: Directories
    mutations: Mutations
    attributes: Attributes
    operations: Operations
    prefetch: Prefetch
    limit: InodeLimit | None
    """None where as much metadata is pinned as there are."""


def wire(
    source: Source,
    opened: OpenedIndex,
    blob: Blob,
    options: Options,
    nursery: trio.Nursery,
    device: int,
    shared: Shared | None,
    notifier: KernelNotifier | None = None,
    statfs: os.statvfs_result | None = None,
) -> Components:
    """Makes each object and gives it what it needs. Longer than other functions, because it is one flat list.

    `device`: /dev/fuse. `shared`: the memory that a fast path shares, which answers OPEN. None: there is none.

    `notifier`: of another kernel than the one behind `device`. `statfs`: of the source; None: it is to be asked.
    """
    has_fastpath, clock = shared is not None, source.clock
    index, metrics = opened.index, Metrics()
    limit = None
    if options.metadata_limit is not None:
        limit = InodeLimit(index, options.metadata_limit, options.metadata_retention)
    notifier = notifier or KernelNotifier(device, None if shared is None else shared.fd)
    metadata = _metadata(opened, options, notifier, limit, clock)
    policy = prefetch.make(options.prefetch, parse_graph(options.graph) if options.graph else ())
    eviction = _eviction(index, options, metadata, policy)
    writes = WriteBehind(index, blob, metrics, options.cache_size_bytes, eviction=eviction)
    data = DataCache(
        index,
        blob,
        options,
        metrics,
        writes,
        appends=not options.fastpath,
        eviction=eviction,
        unreported_bytes=lambda: 0 if shared is None else shared["buffered_bytes"],
    )
    if not options.fastpath or options.cache is not CacheLevel.FULL:  # else it says when it is through with old slabs
        writes.writer_has_gone(blob.frontier)
    call_pool = CallPool(SOURCE_SLOTS, options.source_timeout_s, reserve=RESERVED_SOURCE_SLOTS)
    young = YoungFiles(notifier, index if has_fastpath else None, settle_ns=options.settle_ns, clock=clock)
    invalidation = Invalidation(metadata, data, notifier, options)
    filesystem = FileSystem(source, call_pool, metadata, options, notifier, invalidation)
    fetcher = Fetcher(
        source,
        call_pool,
        data,
        metrics,
        object_of=filesystem.object_of,
        changed=invalidation.modified_externally,
        own_change=filesystem.own_change_of,
        young=young,
        reads_ahead=options.prefetch != "none",
    )
    descriptors = Descriptors(
        filesystem,
        fetcher,
        SharedFiles(call_pool),
        data,
        has_fastpath=has_fastpath,
        first_handle=_FIRST_HANDLE | boot_time_ns(),
    )
    request_at = no_request if shared is None else shared.request_at
    files = OpenFiles(filesystem, descriptors, data, metrics, young, request_at)
    comparisons = ListingComparisons(filesystem, nursery)
    directories = Directories(filesystem, comparisons, request_at)
    mutations = Mutations(filesystem, descriptors, comparisons)
    attributes = Attributes(filesystem, descriptors, data, statfs)
    return Components(
        options=options,
        source=source,
        call_pool=call_pool,
        opened=opened,
        blob=blob,
        metrics=metrics,
        metadata=metadata,
        writes=writes,
        data=data,
        invalidation=invalidation,
        filesystem=filesystem,
        notifier=notifier,
        young=young,
        descriptors=descriptors,
        files=files,
        directories=directories,
        mutations=mutations,
        attributes=attributes,
        operations=Operations(filesystem, descriptors, files, directories, mutations, attributes, metrics.latencies),
        prefetch=policy,
        limit=limit,
    )


def _metadata(
    opened: OpenedIndex, options: Options, notifier: KernelNotifier, limit: InodeLimit | None, clock: Clock
) -> InodeCache:
    # Later: a number is wanted in the middle of an update of the session, which would wait for itself.
    later = trio.lowlevel.current_trio_token().run_sync_soon
    state = opened.state
    return InodeCache(
        opened.index,
        options,
        Run(state.run, state.floor, opened.strict_floor, opened.names_floor, opened.forgot),
        Numbers(state.run, opened.takeovers, lambda takeovers: later(opened.count_takeovers, takeovers)),
        notifier,
        partial(may_become_immutable_on_open, options),
        retention=limit,
        clock=clock,
    )


def _eviction(index: Index, options: Options, metadata: InodeCache, policy: Prefetch) -> Eviction | None:
    if not options.evicts:
        return None
    part_of: Callable[[int], object] = metadata.directory_of
    if isinstance(policy, DependencyGraph):
        part_of = partial(_partition_of, policy, metadata)
    return Eviction(index, options.retention, part_of)


def make_prefetcher(components: Components, engine: PrefetchEngine) -> Prefetcher | None:
    """None: the policy fetches nothing but parts of files that are open."""
    options = components.options
    if options.prefetch not in prefetch.BEYOND_FILES:
        return None
    prefetcher = Prefetcher(components.prefetch, engine, evicts=options.evicts_ahead)
    if options.prefetch in prefetch.LISTENING:
        components.data.on_accessed.add(prefetcher.read)
    return prefetcher


def _partition_of(graph: DependencyGraph, metadata: InodeCache, number: int) -> str | None:
    try:
        with metadata.index.view() as view:
            return graph.partition_of(metadata.paths.path(view, number))
    except OSError:  # it has no name any more
        return None
