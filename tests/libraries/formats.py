"""One small dataset for each library: `make` writes it, `read` reads all of it and returns what was read.

    python -m tests.libraries.formats (make | read) FORMAT DIRECTORY

`read` prints a digest of it. A reader is what a job would write: it knows nothing of cachefs.
"""

import hashlib
import io
import sqlite3
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 2000
Read = Callable[[Path], Iterator[Any]]
FORMATS: dict[str, tuple[Callable[[Path], None], Read]] = {}


def dataset(make: Callable[[Path], None]) -> Callable[[Read], Read]:
    """The reader of what `make` writes is a format, by the name of the function."""

    def register(read: Read) -> Read:
        FORMATS[read.__name__] = make, read
        return read

    return register


def numbers(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, 16))


def table() -> dict[str, Any]:
    return {"number": list(range(ROWS)), "value": list(numbers()[:, 0]), "text": [f"row {n}" for n in range(ROWS)]}


def make_parquet(root: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for part in range(4):
        pq.write_table(pa.table(table()), root / f"part-{part}.parquet", row_group_size=500)


@dataset(make_parquet)
def pyarrow(root: Path) -> Iterator[Any]:
    import pyarrow.dataset as ds

    for batch in ds.dataset(root).to_batches(columns=["number", "text"]):
        yield batch.to_pydict()


@dataset(make_parquet)
def pyarrow_memory_mapped(root: Path) -> Iterator[Any]:
    import pyarrow.parquet as pq

    for path in sorted(root.iterdir()):
        yield pq.read_table(path, memory_map=True, columns=["value"]).to_pydict()


@dataset(make_parquet)
def duckdb(root: Path) -> Iterator[Any]:
    import duckdb

    query = f"select number, min(value), max(text) from '{root}/*.parquet' group by number order by number"
    yield duckdb.sql(query).fetchall()


@dataset(make_parquet)
def huggingface(root: Path) -> Iterator[Any]:
    import datasets

    files = sorted(map(str, root.glob("*.parquet")))
    yield from datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)


def make_arrow(root: Path) -> None:
    import datasets

    datasets.Dataset.from_dict(table()).save_to_disk(str(root / "saved"), num_shards=2)


@dataset(make_arrow)
def huggingface_from_disk(root: Path) -> Iterator[Any]:
    import datasets

    yield from datasets.load_from_disk(str(root / "saved"))


def make_tars(root: Path) -> None:
    for shard in range(3):
        with tarfile.open(root / f"shard-{shard:06}.tar", "w") as tar:
            for number in range(100):
                for suffix, data in (("txt", b"sample %d" % number), ("bin", numbers(number)[:4].tobytes())):
                    member = tarfile.TarInfo(f"{shard}-{number:05}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


@dataset(make_tars)
def webdataset(root: Path) -> Iterator[Any]:
    import webdataset

    for sample in webdataset.WebDataset(sorted(map(str, root.glob("*.tar"))), shardshuffle=False):
        yield sample["__key__"], sample["txt"], sample["bin"]


def make_hdf5(root: Path) -> None:
    import h5py

    with h5py.File(root / "data.h5", "w") as file:
        file.create_dataset("chunked", data=numbers(), chunks=(100, 16), compression="gzip")
        file.create_dataset("plain", data=numbers(1))


@dataset(make_hdf5)
def h5py(root: Path) -> Iterator[Any]:
    import h5py

    with h5py.File(root / "data.h5", "r") as file:
        yield file["chunked"][::3].tobytes()
        yield file["plain"][:].tobytes()


def make_zarr(root: Path) -> None:
    import zarr

    array = zarr.create_array(store=str(root / "data.zarr"), shape=(ROWS, 16), chunks=(250, 16), dtype="f8")
    array[:] = numbers()


@dataset(make_zarr)
def zarr(root: Path) -> Iterator[Any]:
    import zarr

    yield zarr.open_array(str(root / "data.zarr"), mode="r")[:].tobytes()


def make_safetensors(root: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a": numbers(), "b": numbers(1)}, str(root / "model.safetensors"))


@dataset(make_safetensors)
def safetensors(root: Path) -> Iterator[Any]:
    from safetensors import safe_open

    with safe_open(str(root / "model.safetensors"), "numpy") as file:
        for name in ("a", "b"):
            yield file.get_tensor(name).tobytes()


def make_memmap(root: Path) -> None:
    np.save(root / "data.npy", numbers())


@dataset(make_memmap)
def numpy_memmap(root: Path) -> Iterator[Any]:
    mapped = np.load(root / "data.npy", mmap_mode="r")
    order = np.random.default_rng(1).permutation(ROWS)
    yield from (mapped[row].tobytes() for row in order)


def make_lmdb(root: Path) -> None:
    import lmdb

    with lmdb.open(str(root / "data"), map_size=1 << 26) as environment, environment.begin(write=True) as txn:
        for number, row in enumerate(numbers()):
            txn.put(b"%08d" % number, row.tobytes())


@dataset(make_lmdb)
def lmdb(root: Path) -> Iterator[Any]:
    import lmdb

    path = str(root / "data")
    with lmdb.open(path, readonly=True, lock=False, readahead=False) as environment, environment.begin() as txn:
        yield from ((bytes(key), bytes(value)) for key, value in txn.cursor())


def make_sqlite(root: Path) -> None:
    with sqlite3.connect(root / "data.sqlite") as database:
        database.execute("create table rows (number integer primary key, value real, text text)")
        database.executemany("insert into rows values (?, ?, ?)", zip(*table().values(), strict=True))
    database.close()


@dataset(make_sqlite)
def sqlite(root: Path) -> Iterator[Any]:
    database = sqlite3.connect(f"file:{root}/data.sqlite?mode=ro", uri=True)
    yield from database.execute("select * from rows order by text")
    database.close()


def make_zip(root: Path) -> None:
    with zipfile.ZipFile(root / "data.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(300):
            archive.writestr(f"{number % 7}/{number}.bin", numbers(number)[:8].tobytes())


@dataset(make_zip)
def zip_file(root: Path) -> Iterator[Any]:
    with zipfile.ZipFile(root / "data.zip") as archive:
        for name in archive.namelist():
            yield name, archive.read(name)


def make_tfrecord(root: Path) -> None:
    from tfrecord import TFRecordWriter

    for shard in range(2):
        writer = TFRecordWriter(str(root / f"{shard}.tfrecord"))
        for number in range(300):
            writer.write({"number": (number, "int"), "data": (numbers(number)[:2].tobytes(), "byte")})
        writer.close()


@dataset(make_tfrecord)
def tfrecord(root: Path) -> Iterator[Any]:
    from tfrecord.reader import tfrecord_loader

    for path in sorted(root.glob("*.tfrecord")):
        for record in tfrecord_loader(str(path), None, {"number": "int", "data": "byte"}):
            yield int(record["number"][0]), bytes(record["data"])


def digest(name: str, root: Path) -> str:
    """Of everything that a reader returns, and how many items that was."""
    found = hashlib.sha256()
    count = 0
    for each in FORMATS[name][1](root):
        found.update(repr(each).encode())
        count += 1
    return f"{count} {found.hexdigest()}"


if __name__ == "__main__":
    action, name, directory = sys.argv[1:]
    if action == "make":
        FORMATS[name][0](Path(directory))
    else:
        print(digest(name, Path(directory)))
