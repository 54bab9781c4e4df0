"""Make a small parquet dataset of sequences of numbers: DIR/part-NNN.parquet, with a class for each sequence.

python examples/make_parquet.py /ceph/sequences --samples 20000
"""

import argparse
from pathlib import Path

import numpy
import pyarrow
import pyarrow.parquet

LENGTH, NUMBERS, CLASSES = 32, 256, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--samples", type=int, default=4000, help="of all files together [4000]")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--row-group", type=int, default=200, help="samples in a row group [200]")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = numpy.random.default_rng(arguments.seed)
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for part, numbers in enumerate(numpy.array_split(numpy.arange(arguments.samples), arguments.files)):
        labels = draw.integers(CLASSES, size=len(numbers))
        # Each class prefers numbers of its own.
        ids = draw.integers(NUMBERS, size=(len(numbers), LENGTH)) // 2 + (labels * NUMBERS // CLASSES // 2)[:, None]
        table = pyarrow.table(
            {
                "number": numbers,
                "ids": pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(ids.astype("int32").ravel()), LENGTH),
                "label": labels,
                "comment": [f"sample {number} of class {label}" for number, label in zip(numbers, labels, strict=True)],
            }
        )
        path = arguments.directory / f"part-{part:03}.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=arguments.row_group)
    print(f"{arguments.samples} samples in {arguments.directory}")


if __name__ == "__main__":
    main()
