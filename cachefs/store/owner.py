"""cache.json: the source that a cache directory belongs to. Its checksum tells damage from another source."""

import json
import zlib
from pathlib import Path

from cachefs.errors import CacheFsError
from cachefs.system import private_files

FORMAT_VERSION = 1


class Damaged(ValueError):
    """cache.json does not say which source the cache belongs to."""


def _checksum(version: int, source: str) -> int:
    return zlib.crc32(json.dumps([version, source]).encode())


def check(path: Path, source: str) -> None:
    """Raises CacheFsError if the directory belongs to another source, FileNotFoundError without `cache.json`, and
    Damaged."""
    identity = path / "cache.json"
    try:
        found = json.loads(identity.read_text())
        version, owner = int(found["format"]), str(found["source"])
        is_whole = found.get("crc32", _checksum(version, owner)) == _checksum(version, owner)  # earlier versions: none
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise Damaged(f"{identity} is damaged")
    if version > FORMAT_VERSION:
        raise CacheFsError(f"a newer cachefs made {path} (format {version}): upgrade, or use another --cache-dir")
    if owner != source:
        raise CacheFsError(f"{path} was made for {owner}, not for {source}: remove it, or use another --cache-dir")


def write(path: Path, source: str) -> None:
    content = {"format": FORMAT_VERSION, "source": source, "crc32": _checksum(FORMAT_VERSION, source)}
    private_files.write_file(path / "cache.json", json.dumps(content).encode())
