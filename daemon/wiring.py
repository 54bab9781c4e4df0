"""The filesystem's objects and what each of them is given."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import trio

from cachefs.blob import Blob
from cachefs.cache_directory import OpenedIndex
from cachefs.clock import boot_time_ns
from cachefs.contents import Contents
from cachefs.data_cache import DataCache
from cachefs.directories import Directories
from cachefs.eviction import Eviction
from cachefs.filesystem import FileSystem
from cachefs.metadata_cache import MetadataCache
from cachefs.metadata_retention import MetadataRetention
from cachefs.metrics import Metrics
from cachefs.mutations import Mutations
from cachefs.notifier import KernelNotifier
from cachefs.open_files import OpenFiles
from cachefs.operations import Operations
from cachefs.options import CacheLevel, Options
from cachefs.slots import SourceSlots
from cachefs.source import Source
from cachefs.write_behind import WriteBehind
from cachefs.young_files import YoungFiles
from policies import prefetch
from policies.prefetch.base import Prefetch
from policies.prefetch.dependency_graph import DependencyGraph, parse_graph

SOURCE_SLOTS = 64
"""Of one user."""
RESERVED_SOURCE_SLOTS = 64
_FIRST_HANDLE = 1 << 62
"""Handles of earlier versions are below. Each daemon's begin at the time of its start: that needs no record of them."""


@dataclass(frozen=True, slots=True)
class Parts:
    """One mount's filesystem."""

    options: Options
    source: Source
    slots: SourceSlots
    opened: OpenedIndex
    blob: Blob
    metrics: Metrics
    metadata: MetadataCache
    writes: WriteBehind
    data: DataCache
    filesystem: FileSystem
    notifier: KernelNotifier
    young: YoungFiles
    files: OpenFiles
    directories: Directories
    mutations: Mutations
    contents: Contents
    operations: Operations
    prefetch: Prefetch
    limit: MetadataRetention | None
    """None where as much metadata is pinned as there are."""


def wire(
    source: Source,
    opened: OpenedIndex,
    blob: Blob,
    options: Options,
    nursery: trio.Nursery,
    device: int,
    shared: int | None,
    notifier: KernelNotifier | None = None,
) -> Parts:
    """`device`: /dev/fuse. `shared`: the memory that a fast path shares, which answers OPEN. None: there is none.

    `notifier`: of another kernel than the one behind `device`.
    """
    unseen_handles, clock = shared is not None, source.clock
    index, metrics = opened.index, Metrics()
    limit = None
    if options.metadata_limit is not None:
        limit = MetadataRetention(index, options.metadata_limit, options.metadata_retention)
    metadata = MetadataCache(
        index,
        options,
        run=opened.state.run,
        floor=opened.state.floor,
        takeovers=opened.takeovers,
        forgot=opened.forgot,
        names_floor=opened.names_floor,
        strict_floor=opened.strict_floor,
        retention=limit,
        monotonic_ns=clock.monotonic_ns,
        realtime_ns=clock.realtime_ns,
    )
    # Later: a number is wanted in the middle of an update of the session, which would wait for itself.
    later = trio.lowlevel.current_trio_token().run_sync_soon
    metadata.numbers.on_range = lambda takeovers: later(opened.count_takeovers, takeovers)
    policy = prefetch.make(options.prefetch, parse_graph(options.graph) if options.graph else ())
    eviction = None
    if options.evicts:
        part_of: Callable[[int], object] = metadata.directory_of
        if isinstance(policy, DependencyGraph):
            part_of = partial(_partition_of, policy, metadata)
        eviction = Eviction(index, options.retention, part_of)
    writes = WriteBehind(index, blob, metrics, options.cache_size_bytes, eviction=eviction)
    data = DataCache(index, blob, options, metrics, writes, appends=not options.fastpath, eviction=eviction)
    if not options.fastpath or options.cache is not CacheLevel.FULL:  # else it says when it is through with old slabs
        writes.writer_has_gone(blob.frontier)
    slots = SourceSlots(SOURCE_SLOTS, options.source_timeout_s, reserve=RESERVED_SOURCE_SLOTS)
    notifier = notifier or KernelNotifier(device, shared)
    young = YoungFiles(
        notifier,
        index if unseen_handles else None,
        settle_ns=options.settle_ns,
        realtime_ns=clock.realtime_ns,
        monotonic_ns=clock.monotonic_ns,
    )
    filesystem = FileSystem(source, slots, metadata, options, notifier)
    files = OpenFiles(
        filesystem, data, metrics, young, unseen_handles=unseen_handles, first_handle=_FIRST_HANDLE | boot_time_ns()
    )
    directories = Directories(filesystem, nursery)
    mutations = Mutations(filesystem, files, directories)
    contents = Contents(filesystem, data)
    return Parts(
        options=options,
        source=source,
        slots=slots,
        opened=opened,
        blob=blob,
        metrics=metrics,
        metadata=metadata,
        writes=writes,
        data=data,
        filesystem=filesystem,
        notifier=notifier,
        young=young,
        files=files,
        directories=directories,
        mutations=mutations,
        contents=contents,
        operations=Operations(filesystem, files, directories, mutations, contents, metrics.latencies),
        prefetch=policy,
        limit=limit,
    )


def _partition_of(graph: DependencyGraph, metadata: MetadataCache, number: int) -> str | None:
    try:
        with metadata.index.view() as view:
            return graph.partition_of(metadata.paths.path(view, number))
    except OSError:  # it has no name any more
        return None
