"""cache.json: the source that a cache directory belongs to, its filesystem (filesystem.py), and what its index and blob
are known by.

Its checksum tells damage from another source.
"""

import json
import secrets
import zlib
from contextlib import suppress
from pathlib import Path

from cachefs.errors import CacheFsError
from cachefs.store.filesystem import Filesystem
from cachefs.system import private_files

FORMAT_VERSION = 1


class Damaged(ValueError):
    """cache.json does not say which source the cache belongs to."""


def _checksum(version: int, source: str, filesystem: str) -> int:
    return zlib.crc32(json.dumps([version, source, filesystem]).encode())


def check(path: Path, source: str) -> None:
    """Raises CacheFsError if the directory belongs to another source, FileNotFoundError without `cache.json`, and
    Damaged."""
    identity = path / "cache.json"
    try:
        found = json.loads(identity.read_text())
        version, owner = int(found["format"]), str(found["source"])
        checksum = _checksum(version, owner, str(found.get("filesystem", "")))
        is_whole = found.get("crc32", checksum) == checksum  # earlier versions: none
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise Damaged(f"{identity} is damaged")
    if version > FORMAT_VERSION:
        raise CacheFsError(f"a newer cachefs made {path} (format {version}): upgrade, or use another --cache-dir")
    if owner != source:
        raise CacheFsError(f"{path} was made for {owner}, not for {source}: remove it, or use another --cache-dir")


def write(path: Path, source: str, filesystem: bytes = b"") -> None:
    """`filesystem`: what identifies the filesystem of the source. Empty: any filesystem that can be recognized may be
    it, as in a cache of an earlier version."""
    cache = cache_of(path) or secrets.token_bytes(16)
    content = {"format": FORMAT_VERSION, "source": source, "filesystem": filesystem.hex(), "cache": cache.hex()}
    content["crc32"] = _checksum(FORMAT_VERSION, source, filesystem.hex())
    private_files.write_file(path / "cache.json", json.dumps(content).encode())


def cache_of(path: Path) -> bytes:
    """16 random bytes that the index has, too (durable_index.py). Empty: an earlier version made the cache."""
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        return bytes.fromhex(json.loads((path / "cache.json").read_text()).get("cache", ""))
    return b""


def unknown() -> bytes:
    """An identity that no filesystem has. It stands for one that cannot be recognized: a new mount does not use what
    is cached of it."""
    return secrets.token_bytes(16)


def filesystem_of(path: Path) -> bytes:
    """As it was written; empty where an earlier version recorded none. The file must be whole."""
    return bytes.fromhex(json.loads((path / "cache.json").read_text()).get("filesystem", ""))


def other_filesystem(path: Path, filesystem: Filesystem) -> str:
    """Why a cache may not be of this filesystem, on which the source lies now; empty: it is.

    A cache of an earlier version, which recorded none, is kept if the filesystem can be recognized.
    """
    recorded, fstype = filesystem_of(path), filesystem.fstype or "detached"
    if not filesystem.identity:
        return f"({fstype}) cannot be told from another one that is mounted in its place"
    return "" if recorded in (b"", filesystem.identity) else f"({fstype}) is another filesystem than before"
