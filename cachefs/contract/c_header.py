"""The contract as a C header."""

import enum
from collections.abc import Iterator
from pathlib import Path

from cachefs.contract import blob, fuse, index, messages, shared
from cachefs.contract.structs import Struct
from policies.prefetch import sequential

_MODULES = (index, blob, shared, messages)
_COUNTS = {"SLOT_COUNT": shared.SLOT_COUNT, "PARKED_COUNT": shared.PARKED_COUNT}
"""A test of the relay needs fewer, and defines both itself."""


_NOT_FOR_C = {*_COUNTS, "PAGE", "HEAD_BYTES", "VOLUMES_OFFSET", "SHARED_BYTES"}


def _constants() -> dict[str, int]:
    """All integer constants of the contract, and those of the readahead rule (fastpath/c/misses/window.c)."""
    found = {}
    for module in (*_MODULES, sequential):
        found.update({name: value for name, value in vars(module).items() if name.isupper() and type(value) is int})
    return {name: value for name, value in found.items() if name not in _NOT_FOR_C}


def _structs() -> Iterator[Struct]:
    """In the order of their definitions. SHARED is written separately, because it contains _COUNTS."""
    found = (value for module in _MODULES for value in vars(module).values() if isinstance(value, Struct))
    return (each for each in found if each is not shared.SHARED)


def _suffix(name: str, value: int) -> str:
    """Sizes and magic numbers are unsigned; a value that is added to offsets in the blob has 64 bits."""
    if value >= 1 << 32 or name == "SLAB_BYTES":
        return "ull"
    return "u" if name.endswith(("_BYTES", "_MAGIC")) else ""


def _enum(
    name: str, members: type[enum.IntEnum] | type[enum.IntFlag], prefix: str = "", last: str = ""
) -> Iterator[str]:
    yield f"enum {name} {{"
    yield from (f"    {prefix}{each.name} = {int(each)}," for each in members)
    if last:
        yield f"    {last},"
    yield "};"


def _lines() -> Iterator[str]:
    yield "/* Written by `python -m cachefs.contract`. The definitions are in cachefs/contract. */"
    yield "#pragma once"
    yield from (f"#include <{name}.h>" for name in ("assert", "stdatomic", "stddef", "stdint"))
    for name, value in _constants().items():
        yield f"#define {name} {value}{_suffix(name, value)}"
    yield from _enum("flag", index.Flag)
    yield from _enum("table", index.Table, last="TABLES")
    names = ", ".join(f'"{table.name.lower()}"' for table in index.Table)
    yield f"#define TABLE_NAMES {names}"
    yield from _enum("shared_flag", shared.SharedFlag)
    yield from _enum("source_flag", shared.SourceFlag)
    yield from _enum("slot_state", shared.SlotState)
    yield from _enum("control_type", messages.Message, prefix="CONTROL_")
    yield "enum latency_kind {"
    yield from (f"    LATENCY_{kind.upper()}," for kind in (*shared.LATENCY_KINDS, "kinds"))
    yield "};"
    yield from _fuse()
    for each in _structs():
        yield from each.in_c()
    yield "#ifndef SLOT_COUNT"
    yield from (f"#define {name} {value}" for name, value in _COUNTS.items())
    yield from _shared(shared.SHARED)
    yield "#else"
    yield from (line for line in _shared(shared.SHARED) if not line.startswith("static_assert"))
    yield "#endif"


def _fuse() -> Iterator[str]:
    """Macros that call their argument for each operation and struct: protocol.c makes a table and checks of them."""
    yield from _enum("request_kind", fuse.RequestKind)
    yield "#define FUSE_OPERATIONS(X) \\"
    for each in fuse.FUSE_OPERATIONS:
        yield f"    X(FUSE_{each.name}, {each.number}, {each.body_bytes}, {each.names}, {int(each.kind)}) \\"
    yield ""
    sizes = {each.struct: each.body_bytes for each in fuse.FUSE_OPERATIONS if each.struct}
    yield "#define FUSE_STRUCTS(X) \\"
    yield from (
        f"    X({name}, {size}) \\" for name, size in ((fuse.IN_HEADER.name, fuse.IN_HEADER.size), *sizes.items())
    )
    yield ""


def _shared(whole: Struct) -> Iterator[str]:
    for line in whole.in_c():
        for name, value in _COUNTS.items():
            line = line.replace(f"[{value}]", f"[{name}]")
        yield line


def text() -> str:
    return "\n".join(_lines()) + "\n"


def write(includes: Path) -> None:
    """`includes`: a directory of includes, in which `#include "common/contract.h"` finds the header."""
    (includes / "common").mkdir(exist_ok=True)
    (includes / "common" / "contract.h").write_text(text())
