"""The contract between Python and C: written once, in cachefs/contract, and followed by both."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cachefs.contract import c_header
from cachefs.contract.blob import RECORD_HEADER
from cachefs.contract.index import DENTRY_RECORD, EXTENT_RECORD, INODE_RECORD
from cachefs.contract.structs import Struct
from cachefs.store.blob.record import Header
from cachefs.store.index.records import Dentry, Extent, Inode
from tests.conftest import REPOSITORY

PROGRAM = """
#include <stdio.h>
#include "contract.h"
int main(void)
{
    printf("%zu %zu %d %u", offsetof(struct inode_record, mode), offsetof(struct shared, floor), STALE, BLOCK_BYTES);
#define SHAPE(operation, number, body, names, kind) printf(" %d %d %d %d", number, body, names, kind);
    FUSE_OPERATIONS(SHAPE)
    return 0;
}
"""
SAYS_THE_SAME = """
from cachefs.contract import blob, fuse, index, shared
print(index.INODE_RECORD.offset("mode"), shared.SHARED.offset("floor"), int(index.Flag.STALE), blob.BLOCK_BYTES, end="")
for each in fuse.FUSE_OPERATIONS:
    print("", each.number, each.body_bytes, each.names, int(each.kind), end="")
"""


def names(layout: Struct) -> tuple[str, ...]:
    return tuple(name for name in layout.fields if not name.startswith("reserved"))


def compiled(directory: Path, header: str) -> subprocess.CompletedProcess[str]:
    (directory / "contract.h").write_text(header)
    (directory / "main.c").write_text(PROGRAM)
    command = ["cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "main.c", "-o", "main"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def in_c(directory: Path) -> str:
    return subprocess.run([directory / "main"], capture_output=True, text=True, check=True).stdout


def test_the_tuples_of_records_have_the_fields_of_the_structs() -> None:
    assert Inode._fields[1:] == names(INODE_RECORD)
    assert Dentry._fields == names(DENTRY_RECORD)
    assert Extent._fields[:-1] == names(EXTENT_RECORD)
    header = names(RECORD_HEADER)
    first = header.index("length")
    assert Header._fields == header[first : first + len(Header._fields)]


def test_a_codec_packs_each_field_where_the_struct_has_it() -> None:
    for layout in (INODE_RECORD, DENTRY_RECORD, EXTENT_RECORD, RECORD_HEADER):
        zeros = [0] * len(names(layout))
        for number, name in enumerate(names(layout)):
            packed = layout.codec().pack(*zeros[:number], 1, *zeros[number + 1 :])
            assert packed.index(1) == layout.offset(name), (layout.name, name)


def test_the_compiler_agrees_with_every_offset(tmp_path: Path) -> None:
    assert compiled(tmp_path, c_header.text()).returncode == 0


@pytest.mark.parametrize("what", ["offset", "size", "field"])
def test_a_mismatch_fails_the_build(tmp_path: Path, what: str) -> None:
    header = c_header.text()
    floor = "offsetof(struct shared, floor) == "
    changed = {
        "offset": header.replace(floor, f"{floor}8 + "),
        "size": header.replace(
            "static_assert(sizeof(struct filled) == 56", "static_assert(sizeof(struct filled) == 64"
        ),
        "field": header.replace("    uint32_t mode;\n", "    uint64_t mode;\n", 1),
    }[what]
    assert changed != header
    done = compiled(tmp_path, changed)
    assert done.returncode != 0 and "static assertion failed" in done.stderr


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("index.py", '"flags mode nlink', '"flags nlink mode'),
        ("index.py", "STALE = 32", "STALE = 256"),
        ("shared.py", '"run floor serving', '"run serving floor'),
        ("blob.py", "BLOCK_BYTES = 128 << 10", "BLOCK_BYTES = 64 << 10"),
        ("fuse.py", '"fuse_mknod_in", 16, names=1', '"fuse_mknod_in", 16, names=2'),
    ],
)
def test_what_is_changed_in_one_place_changes_in_both_languages(tmp_path: Path, file: str, old: str, new: str) -> None:
    for room in ("cachefs", "policies"):
        shutil.copytree(REPOSITORY / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__", "*.c", "*.h"))
    definition = tmp_path / "cachefs" / "contract" / file
    text = definition.read_text()
    assert text.count(old) == 1
    compiled(tmp_path, c_header.text())
    before = in_c(tmp_path)
    definition.write_text(text.replace(old, new))
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    python("-m", "cachefs.contract", ".")
    assert compiled(tmp_path, (tmp_path / "common" / "contract.h").read_text()).returncode == 0
    assert in_c(tmp_path) == python("-c", SAYS_THE_SAME) != before


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("X(FUSE_MKNOD, 8, 16,", "X(FUSE_MKNOD, 7, 16,", "FUSE_MKNOD"),
        ("X(fuse_rename2_in, 16)", "X(fuse_rename2_in, 8)", "fuse_rename2_in"),
    ],
)
def test_an_operation_that_linux_has_otherwise_fails_the_build(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    def build(header: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "common").mkdir(exist_ok=True)
        (tmp_path / "common" / "contract.h").write_text(header)
        sources = REPOSITORY / "cachefs" / "fastpath" / "c"
        command = [
            "cc",
            "-std=gnu11",
            "-fsyntax-only",
            f"-I{tmp_path}",
            f"-I{sources}",
            sources / "kernel" / "protocol.c",
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    header = c_header.text()
    assert header.count(old) == 1 and build(header).returncode == 0
    done = build(header.replace(old, new))
    assert done.returncode != 0 and complaint in done.stderr
