"""Opening the durable index, and rebuilding it from the blob where it is lost or damaged.

LMDB has no checksums: damage shows when a page that is needed contradicts itself. Then the index is *damaged*, and
`Environment.failed` marks it in a file beside it (damage.py says how the mount goes on). The next daemon sets the
index aside as `index.broken`, and rebuilds it. A run that ends cleanly leaves a checksum of the whole index (pages.py).
So a flipped bit in a page that stays consistent is noticed if it flips between two mounts, and not while one serves.
"""

import logging
import os
import shutil
import struct
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from cachefs.contract.index import Table
from cachefs.errors import IndexDamaged, IndexUnavailable
from cachefs.store import recovery, runs
from cachefs.store.blob.blob import Blob
from cachefs.store.index import pages
from cachefs.store.index.environment import DATA, Environment
from cachefs.store.index.index import TOTALS, Totals
from cachefs.store.index.records import PINNED

log = logging.getLogger(__name__)


_CACHE_KEY = b"cache"
_CACHE = struct.Struct("<I16s")  # flags of the value, `owner.cache_of`


def opened(path: Path, blob: Blob, cache: bytes = b"") -> Environment:
    """Raises IndexUnavailable or OSError if there is no room for it.

    `cache`: as of `owner.cache_of`. Index and blob of another cache are not used. Empty: they are not compared.
    """
    durable = _opened(path, blob)
    if not cache:
        return durable
    value = durable.get(Table.META, _CACHE_KEY)
    if value and _CACHE.unpack(value)[1] != cache:
        log.warning("the index in %s is of another cache: the cache starts empty", path)
        durable.close()
        shutil.rmtree(path)
        os.ftruncate(blob.fd, 0)
        durable, value = Environment(path, sync=True), None
    if not value:
        with suppress(IndexUnavailable), durable.write() as txn:  # no room: the next mount does it
            txn.put(_CACHE_KEY, _CACHE.pack(PINNED, cache), db=durable.tables[Table.META])
    return durable


def _opened(path: Path, blob: Blob) -> Environment:
    if (path / DATA).exists():
        try:
            return _checked(path)
        except IndexDamaged as error:
            aside = path.with_name("index.broken")
            log.warning("%s; moving the index to %s, and rebuilding it from the blob", error, aside)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    if blob.size():
        _rebuild(path, blob)
    return Environment(path, sync=True)


def begin_blob_again(durable: Environment, blob: Blob, size_bytes: int) -> None:
    """On a disk that cannot punch holes, at a new mount: empty the blob if half of the cache is lost to dropped data.

    `size_bytes`: of the cache. The index forgets the data first, so that a crash in between leaves only lost space.
    Raises IndexUnavailable, OSError.
    """
    if blob.punches:
        return
    log.warning("the disk of the cache cannot punch holes: nothing is evicted, and dropped data keep their space")
    value = durable.get(Table.META, TOTALS)
    with durable.failing("read"):
        used_bytes = Totals.unpack(value).blob_bytes if value else 0
    lost_bytes = blob.allocated_bytes() - used_bytes
    if lost_bytes <= size_bytes // 2:
        return
    with durable.write() as txn:
        txn.drop(durable.tables[Table.EXTENTS], delete=False)
        txn.put(TOTALS, Totals().pack(), db=durable.tables[Table.META])
    os.ftruncate(blob.fd, 0)
    log.warning("%d MB of the cache were lost to dropped data: its data are cached again", lost_bytes // 1_000_000)


def _checked(path: Path) -> Environment:
    """Raises IndexDamaged if an earlier daemon met damage, or if the pages that each run uses first are damaged."""
    pages.check_length(path / DATA)
    pages.check_checksum(path / DATA)
    pages.check_pages(path / DATA)
    with ExitStack() as stack:
        environment = stack.enter_context(closing(Environment(path, sync=True)))
        if environment.damage.is_marked:
            raise IndexDamaged(f"the index in {path} is damaged")
        with environment.failing("read"):
            runs.last_run(environment)
        try:
            environment.try_to_write()
        except IndexDamaged:
            raise
        except IndexUnavailable:
            pass  # a full disk is another matter
        stack.pop_all()
    return environment


def _rebuild(path: Path, blob: Blob) -> None:
    """Make the index from the blob. It is renamed to `path` when it is complete: a crash before leaves no index."""
    temporary = path.with_name("index.new")
    for place in (path, temporary):
        shutil.rmtree(place, ignore_errors=True)
    with closing(Environment(temporary, sync=True)) as durable:
        totals = recovery.rebuild(blob, durable)
    temporary.rename(path)
    log.warning("index rebuilt from the blob: %d files, %d bytes", totals.cached_files, totals.cached_bytes)
