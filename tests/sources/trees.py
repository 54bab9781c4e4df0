"""Trees of two versions. `make_first` makes one, `change` is what another node does to it.

The bytes of each file are its own, so that those of another file, or of another version, are noticed.
"""

import os
import random
import zlib
from pathlib import Path

from tests.sources.kinds import Source

SIZES = {"empty": 0, "one": 1, "small": 100, "medium": 40_000}
LARGE = 3 << 20
PARTLY = 5 << 20
"""Reading its beginning does not fetch all of it."""
LONG_AGO = 1_577_836_800
ODD = b"odd \xff\x01\n'name"
_FIRST, _SECOND = "first", "second"
_DIRECTORIES = ("kept", "rewritten", "replaced", "renamed", "left", "right", "same")
Contents = dict[Path, bytes]


def make_first(source: Source) -> None:
    root = source.behind
    for name in _DIRECTORIES:
        (root / name).mkdir()
        _fill(root / name)
    source.make_directory("rolled")
    _fill(root / "rolled")
    source.save("rolled")
    _rewrite(root / "rolled")
    (root / "kept/nested").mkdir()
    (root / "kept/nested" / os.fsdecode(ODD)).write_bytes(b"of an odd name")
    for path in (*_files(root / "rolled"), *_files(root / "kept/nested")):
        os.utime(path, (LONG_AGO, LONG_AGO))
    (root / "kept/link").symlink_to("read-small")
    os.link(root / "kept/read-medium", root / "kept/read-second-name")


def _fill(directory: Path) -> None:
    """Two directories have files of the same names and sizes, and of other times."""
    lengths = {f"{kind}-{size}": length for size, length in SIZES.items() for kind in ("read", "unread")}
    seconds = LONG_AGO + zlib.crc32(directory.name.encode()) % 10_000
    if directory.name == "kept":
        lengths["read-large"] = LARGE
    else:
        lengths["partly"] = PARTLY
    for name, length in lengths.items():
        path = directory / name
        path.write_bytes(_bytes(path, _FIRST, length))
        os.utime(path, (seconds, seconds))


def _bytes(path: Path, version: str, length: int) -> bytes:
    return random.Random(f"{path.parent.name}/{path.name} {version}").randbytes(length)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_file())


def _rewrite(directory: Path) -> None:
    """In place, to another size."""
    for path in _files(directory):
        path.write_bytes(_bytes(path, _SECOND, path.stat().st_size + 7))


def _replace(path: Path, content: bytes, times_ns: tuple[int, int] | None = None) -> None:
    new = path.with_name("new")
    new.write_bytes(content)
    if times_ns is not None:
        os.utime(new, ns=times_ns)
    new.rename(path)


def change(source: Source) -> None:
    root = source.behind
    _rewrite(root / "rewritten")
    for path in _files(root / "replaced"):
        _replace(path, _bytes(path, _SECOND, path.stat().st_size + 11))
    for path in _files(root / "renamed"):
        path.rename(path.with_name(f"was-{path.name}"))
    (root / "left").rename(root / "third")
    (root / "right").rename(root / "left")
    (root / "third").rename(root / "right")
    source.roll_back("rolled")
    for path in _files(root / "same"):
        now = path.stat()
        _replace(path, _bytes(path, _SECOND, now.st_size), (now.st_atime_ns, now.st_mtime_ns))
    (root / "added").mkdir()
    (root / "added/file").write_bytes(b"added")
