"""Snapshots: the pinned metadata of a mount in one file, from which other nodes start instead of walking the tree.

A snapshot contains valid names, attributes, listings, symlinks and extended attributes. It does not contain data,
absences, objects of other devices than the root's (their numbers differ between nodes), or anything that must be
compared again. A node that starts with a snapshot treats its contents as validated when it starts. If its `--mutable`
differs, it compares them first, as a mount whose patterns have changed does.

The file (docs/FORMAT.md): magic, version, a header of JSON, one zstd frame with one column after the other, XXH3-64 of
all of this. Columns are 64-bit numbers, most of them differences to a neighbouring number. All first bytes come before
all second bytes and so on, so that bytes that hardly vary take no room (as in Blosc's shuffle filter).
"""

import gc
import json
import os
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from cachefs.contract.index import DENTRY_RECORD, INODE_RECORD, ROOT_INODE, Table
from cachefs.contract.structs import Struct
from cachefs.errors import CacheFsError
from cachefs.store import mutable_patterns
from cachefs.store.aliases import Given
from cachefs.store.index.environment import Environment
from cachefs.store.index.records import IMMUTABLE, LISTED, PINNED, STALE, UNLINKED, UNSETTLED, inode_of_key
from cachefs.store.runs import RUN_BITS, RunState, ended, run_of_inode
from cachefs.system.private_files import open_given, opener
from cachefs.system.stat import may_be_one_birth

MAGIC = b"CHFSNAP\n"
FORMAT_VERSION = 1
LEVEL = 6
_LENGTHS = struct.Struct("<II")  # format version, bytes of the header
_DIGEST = struct.Struct("<Q")
_KEPT_FLAGS = PINNED | IMMUTABLE | LISTED


def _dtype(layout: Struct) -> "np.dtype[np.void]":
    return np.dtype([(each.name, f"<{each.code}") for each in layout.fields.values()])


_INODE, _DENTRY = _dtype(INODE_RECORD), _dtype(DENTRY_RECORD)
_PLAIN = ("flags", "mode", "nlink", "uid", "gid", "rdev", "blksize", "size", "next_position")
Column = NDArray[np.int64]


# --- the file --------------------------------------------------------------------------------------------------------


class RootIdentity(NamedTuple):
    """Which tree: the roots of several filesystems have one number. Their birth times differ."""

    inode: int
    btime_ns: int
    """0 in either field: not known."""

    def may_be(self, other: "RootIdentity") -> bool:
        return self.inode in (0, other.inode) and may_be_one_birth(self.btime_ns, other.btime_ns)


class _Hashed:
    """A file that is being written, and its checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = xxhash.xxh3_64()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _shuffled(column: Column) -> bytes:
    return np.ascontiguousarray(column, "<i8").view(np.uint8).reshape(-1, 8).T.tobytes()


def _unshuffled(data: bytes) -> Column:
    return np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(8, -1).T).view("<i8").reshape(-1)


def _deltas(values: Any) -> Column:
    """The difference of each value to the one before. It wraps around, and so does the sum."""
    signed: Column = np.asarray(values).astype(np.uint64).view(np.int64)
    return np.diff(signed, prepend=np.int64(0))


def _sums(deltas: Column) -> Column:
    return np.cumsum(deltas, dtype=np.int64)


def _write(path: Path, header: dict[str, Any], columns: Iterable[tuple[str, bytes]]) -> None:
    """Adds the names and lengths of the columns to `header`. The file appears complete or not at all."""
    parts = list(columns)
    header["columns"] = [[name, len(data)] for name, data in parts]
    encoded = json.dumps(header).encode()
    temporary = path.with_name(path.name + ".new")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb", opener=opener) as file:
            hashed = _Hashed(file)
            hashed.write(MAGIC + _LENGTHS.pack(FORMAT_VERSION, len(encoded)) + encoded)
            compressor: Any = zstandard.ZstdCompressor(level=LEVEL, threads=-1)
            with compressor.stream_writer(hashed, closefd=False) as frame:
                for _, data in parts:
                    frame.write(data)
            file.write(_DIGEST.pack(hashed.digest.intdigest()))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CacheFsError(f"cannot write {path}: {error.strerror or error}") from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The header and the columns.

    Raises CacheFsError if a byte was changed, and if another user could have written the file, because the checksum is
    no signature.
    """
    try:
        with open(open_given(path), "rb") as file:
            data = file.read()
    except OSError as error:
        raise CacheFsError(f"cannot read the snapshot {path}: {error.strerror}") from error
    if not data.startswith(MAGIC):
        raise CacheFsError(f"{path} is no metadata snapshot of cachefs")
    whole = memoryview(data)
    start = len(MAGIC) + _LENGTHS.size
    digest = _DIGEST.pack(xxhash.xxh3_64_intdigest(whole[: -_DIGEST.size]))
    if len(data) < start + _DIGEST.size or whole[-_DIGEST.size :] != digest:
        raise CacheFsError(f"the snapshot {path} is damaged (wrong checksum): export it again")
    version, length = _LENGTHS.unpack_from(data, len(MAGIC))
    if version != FORMAT_VERSION:
        raise CacheFsError(
            f"the snapshot {path} has format {version}, this cachefs reads {FORMAT_VERSION}: export it again"
        )
    header: dict[str, Any] = json.loads(data[start : start + length])
    with zstandard.ZstdDecompressor().stream_reader(whole[start + length : -_DIGEST.size]) as frame:
        columns = {name: frame.read(size) for name, size in header["columns"]}
    return header, columns


# --- export ----------------------------------------------------------------------------------------------------------


def export(index: Path, path: Path, source: str) -> int:
    """Write the snapshot of a durable index, which may be in use. Returns the number of names."""
    with closing(Environment(index, sync=True)) as environment:
        with environment.lmdb.begin() as txn:
            tables = {table: _Rows(txn.cursor(db=environment.tables[table])) for table in Table}
            floor, strict_floor = _floors(txn.get(b"run", db=environment.tables[Table.META]))
        mutable = sorted(mutable_patterns.last(environment))
    inodes, dentries, names = _valid(tables[Table.INODES], tables[Table.DENTRIES], floor, strict_floor)
    numbers = inodes["number"]
    header = {
        "source": source, "created_ns": time.time_ns(), "names": len(names), "inodes": len(numbers), "mutable": mutable,
    }  # fmt: skip
    known = dict(zip(numbers.tolist(), inodes["record"]["version"].tolist(), strict=True))
    texts = {table: list(_current(tables[table], known)) for table in (Table.SYMLINKS, Table.XATTRS)}
    aliases = [(k, v) for k, v in tables[Table.ALIASES] if inode_of_key(v[8:16]) in known]
    _write(path, header, _columns(numbers, inodes["record"], dentries, names, texts, aliases))
    return len(names)


class _Rows(list[tuple[bytes, bytes]]):
    """A whole table in memory."""

    def keys(self, start: int = 0, end: int | None = None) -> bytes:
        return b"".join(key[start:end] for key, _ in self)

    def values(self) -> bytes:
        return b"".join(value for _, value in self)


def _floors(value: bytes | None) -> tuple[int, int]:
    """The floor and the strict floor: records that were validated in that run or later are valid (validity.py)."""
    if value is None:
        return 0, 0
    state = RunState.unpack(value)
    return state.floor, state.run if state.floor == state.unmoved_floor else state.floor


def _valid(inodes: _Rows, dentries: _Rows, floor: int, strict_floor: int) -> tuple[Any, Any, list[bytes]]:
    """What needs no comparison with the source: (inodes with their numbers, dentries with their parents, names).

    Raises CacheFsError if the root is not valid: such a snapshot would be useless.
    """
    numbers = np.frombuffer(inodes.keys(), ">u8").astype(np.uint64)
    records = np.frombuffer(inodes.values(), _INODE)
    flags = records["flags"]
    good = (flags & PINNED != 0) & (flags & (STALE | UNLINKED | UNSETTLED) == 0)
    good &= (records["validated_run"] >= floor) & (records["device"] == 0)
    vouched = (records["nlink"] <= 1) | (records["mode"] & 0o170000 == stat.S_IFDIR)
    good &= (records["validated_run"] >= strict_floor) | vouched
    if not np.any(good & (numbers == ROOT_INODE)):
        raise CacheFsError("the root directory is not pinned: run cachefs warmup MOUNTPOINT --metadata-only first")

    parents = np.frombuffer(dentries.keys(0, 8), ">u8").astype(np.uint64)
    rows = np.frombuffer(dentries.values(), _DENTRY)
    parent_at, has_parent = _places(numbers, parents)
    child_at, has_child = _places(numbers, rows["inode"])
    kept = has_parent & has_child & (rows["flags"] & PINNED != 0)
    kept &= good[parent_at] & good[child_at] & (rows["validated_run"] >= records["entries_valid_from"][parent_at])

    # A listing with a row that is left out is not complete.
    torn = np.unique(parents[~kept & (rows["position"] != 0)])
    named = np.unique(child_at[kept])
    wanted = np.zeros(len(numbers), bool)
    wanted[named] = True
    wanted |= (numbers == ROOT_INODE) & good
    out = np.zeros(int(wanted.sum()), [("number", np.uint64), ("record", _INODE)])
    out["number"], out["record"] = numbers[wanted], records[wanted]
    out["record"]["flags"] &= np.uint32(_KEPT_FLAGS)
    out["record"]["flags"][np.isin(out["number"], torn)] &= np.uint32(~LISTED & 0xFFFFFFFF)

    edges = np.zeros(int(kept.sum()), [("parent", np.uint64), ("inode", np.uint64), ("position", np.uint64)])
    edges["parent"], edges["inode"], edges["position"] = parents[kept], rows["inode"][kept], rows["position"][kept]
    return out, edges, [dentries[place][0][8:] for place in np.flatnonzero(kept).tolist()]


def _places(numbers: NDArray[np.uint64], wanted: Any) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """The place of each wanted number in the sorted numbers, and whether it is there."""
    if not len(numbers):
        return np.zeros(len(wanted), np.intp), np.zeros(len(wanted), bool)
    at = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    return at, numbers[at] == wanted


def _current(rows: _Rows, versions: dict[int, int]) -> Iterator[tuple[bytes, bytes]]:
    """(key, value without its head) of the present version of the inode."""
    for key, value in rows:
        if versions.get(inode_of_key(key)) == struct.unpack_from("<Q", value, 8)[0]:
            yield key, value[16:]


def _columns(
    numbers: Any, records: Any, dentries: Any, names: list[bytes], texts: dict[Table, Any], aliases: Any
) -> Iterator[tuple[str, bytes]]:
    yield "number", _shuffled(_deltas(numbers))
    for name in _PLAIN:
        yield name, _shuffled(records[name].astype(np.int64))
    yield "blocks", _shuffled(records["blocks"].view("<i8") - _usual_blocks(records["size"]))
    yield "mtime", _shuffled(_deltas(records["mtime_ns"]))
    for name in ("atime", "ctime", "btime"):
        yield name, _shuffled(records[f"{name}_ns"] - records["mtime_ns"])
    yield "source_inode", _shuffled((records["source_inode"] - numbers).view(np.int64))
    yield "parent", _shuffled(_deltas(dentries["parent"]))
    yield "child", _shuffled(_deltas(dentries["inode"]))
    yield "position", _shuffled(_deltas(dentries["position"]))
    yield from _strings("names", names)
    for table, rows in texts.items():
        yield from _strings(f"{table.name}_key", [key for key, _ in rows])
        yield from _strings(f"{table.name}_value", [value for _, value in rows])
    yield "aliases", b"".join(key + value[8:16] for key, value in aliases)


def _strings(name: str, strings: list[bytes]) -> Iterator[tuple[str, bytes]]:
    yield f"{name}_lengths", np.array([len(each) for each in strings], "<u4").tobytes()
    yield name, b"".join(strings)


def _usual_blocks(size: Any) -> Column:
    """Blocks of 512 bytes of a file without holes, on a filesystem with blocks of 4 KiB."""
    blocks: Column = (size.view("<i8") + 4095) // 4096 * 8
    return blocks


# --- import ----------------------------------------------------------------------------------------------------------


def load(path: Path, index: Path, root: RootIdentity, mutable: Iterable[str]) -> int:
    """Make a durable index from a snapshot. Returns the number of names.

    `root`: of the source. `mutable`: the patterns of `--mutable` of the mount that starts with it.
    Raises CacheFsError if the snapshot is damaged or of another tree.
    """
    header, columns = _read(path)
    numbers = _sums(_unshuffled(columns["number"])).view(np.uint64)
    records = np.zeros(len(numbers), _INODE)
    for name in _PLAIN:
        records[name] = _unshuffled(columns[name])
    records["blocks"] = _unshuffled(columns["blocks"]) + _usual_blocks(records["size"])
    records["mtime_ns"] = _sums(_unshuffled(columns["mtime"]))
    for name in ("atime", "ctime", "btime"):
        records[f"{name}_ns"] = _unshuffled(columns[name]) + records["mtime_ns"]
    records["source_inode"] = _unshuffled(columns["source_inode"]).view(np.uint64) + numbers
    aliases = columns["aliases"]
    given = _aliases(numbers, records["source_inode"], aliases)
    last = ended(max(map(run_of_inode, given), default=0))
    run = last.run + 1
    """The first run of the new index; imported records count as validated in it."""
    version = run << RUN_BITS
    """The run itself never gives this number out: its first is one higher."""
    records["version"] = version
    validated_run = run if mutable_patterns.only_loses_defaults(header.get("mutable", ()), mutable) else last.run
    """With other patterns below the floor of the new index, so that everything is compared."""
    records["validated_run"] = records["entries_valid_from"] = validated_run
    found = [RootIdentity(int(row["source_inode"]), int(row["btime_ns"])) for row in records[numbers == ROOT_INODE]]
    if len(found) != 1 or not found[0].may_be(root):
        raise CacheFsError(f"{path} is a snapshot of another tree ({header['source']}): export one of this source")
    parents = _sums(_unshuffled(columns["parent"])).view(np.uint64)
    children = _sums(_unshuffled(columns["child"])).view(np.uint64)
    positions = _sums(_unshuffled(columns["position"])).view(np.uint64)
    names = list(_parts(columns, "names"))

    temporary = index.with_name("index.new")
    with closing(Environment(temporary, sync=False)) as environment:
        with environment.lmdb.begin(write=True) as txn:

            def put(table: Table, rows: Iterable[tuple[bytes, bytes]]) -> None:
                """`rows`: in the order of the keys, so that pages are filled one after the other."""
                txn.cursor(db=environment.tables[table]).putmulti(rows, append=True)

            _put_all(put, numbers, records, parents, children, positions, names, validated_run)
            pinned = PINNED.to_bytes(4, "little")
            head = struct.pack("<I4xQ", PINNED, version)
            for table in (Table.SYMLINKS, Table.XATTRS):
                keys, values = _parts(columns, f"{table.name}_key"), _parts(columns, f"{table.name}_value")
                put(table, ((key, head + value) for key, value in zip(keys, values, strict=True)))
            rows = (aliases[start : start + 24] for start in range(0, len(aliases), 24))
            put(Table.ALIASES, ((row[:16], pinned + bytes(4) + row[16:]) for row in rows))
        replace(last, unmoved_floor=run + 1).store(environment)  # our rctime does not cover what others have compared
        Given().and_numbers(given).store(environment)
        environment.lmdb.sync(True)
    temporary.rename(index)
    return len(names)


def _aliases(numbers: NDArray[np.uint64], source_inodes: Any, aliases: bytes) -> list[int]:
    """All numbers in the snapshot that are not the source's."""
    return [*numbers[numbers != source_inodes].tolist(), *np.frombuffer(aliases, ">u8")[2::3].tolist()]


def _put_all(
    put: Callable[[Table, Iterable[tuple[bytes, bytes]]], None],
    numbers: Any, records: Any, parents: Any, children: Any, positions: Any, names: list[bytes],
    validated_run: int,
) -> None:  # fmt: skip
    pinned = PINNED.to_bytes(4, "little")
    put(Table.INODES, zip(_cut(numbers.astype(">u8"), 8), _cut(records, _INODE.itemsize), strict=True))
    dentries = np.zeros(len(names), _DENTRY)
    dentries["flags"], dentries["inode"], dentries["validated_run"] = PINNED, children, validated_run
    dentries["position"] = positions
    parent_keys = list(_cut(parents.astype(">u8"), 8))
    keys = list(map(bytes.__add__, parent_keys, names))
    put(Table.DENTRIES, zip(keys, _cut(dentries, _DENTRY.itemsize), strict=True))
    child_keys = list(_cut(children.astype(">u8"), 8))
    # Stable: the names of one child stay in the order of their keys.
    order = np.argsort(children, kind="stable").tolist()
    put(Table.LINKS, ((child_keys[place] + keys[place], pinned) for place in order))
    listed = np.flatnonzero(positions)
    order = listed[np.lexsort((positions[listed], parents[listed]))].tolist()
    position_keys = list(_cut(positions.astype(">u8"), 8))
    put(Table.LISTING, ((parent_keys[place] + position_keys[place], pinned + names[place]) for place in order))


def _cut(array: Any, size: int) -> Iterator[bytes]:
    data = array.tobytes()
    return (data[start : start + size] for start in range(0, len(data), size))


def _parts(columns: dict[str, bytes], name: str) -> Iterator[bytes]:
    lengths = np.frombuffer(columns[f"{name}_lengths"], "<u4")
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    data = columns[name]
    return (data[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True))


def main() -> None:
    """`python -m cachefs.store.snapshot FILE INDEX ROOT_INODE ROOT_BTIME_NS [PATTERN…]`: a process, so that its memory
    is freed."""
    path, index, root_inode, root_btime_ns, *mutable = sys.argv[1:]
    root = RootIdentity(int(root_inode), int(root_btime_ns))
    gc.disable()  # millions of small objects without cycles
    try:
        print(load(Path(path), Path(index), root, mutable))
    except CacheFsError as error:
        sys.exit(str(error))
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:  # its checksum is right
        sys.exit(f"the snapshot {path} is malformed ({type(error).__name__}: {error}): export it again")


if __name__ == "__main__":
    main()
