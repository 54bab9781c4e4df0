"""C structs, by their fields. Little-endian, naturally aligned, as a C compiler for x86-64 and arm64 lays them out.

The compiler checks that: the generated header asserts the offset of each field and the size of the whole.
"""

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

C_TYPES = {
    "u8": ("B", "uint8_t"),
    "u16": ("H", "uint16_t"),
    "u32": ("I", "uint32_t"),
    "u64": ("Q", "uint64_t"),
    "i64": ("q", "int64_t"),
    "atomic_u32": ("I", "_Atomic uint32_t"),
    "atomic_u64": ("Q", "_Atomic uint64_t"),
}
"""Type of a field → (format of the struct module, type in C)."""
_NAME = re.compile(r"(\w+)(?:\[(\d+)\])?")


class Field(NamedTuple):
    name: str
    type: "str | Struct"
    elements: int
    """Elements of an array; 0: the field is no array."""
    offset: int

    @property
    def code(self) -> str:
        """The format for the struct module; of an array, of one element."""
        assert isinstance(self.type, str)
        return C_TYPES[self.type][0]


Declaration: TypeAlias = "tuple[str | Struct, str]"
"""(type, names): ("u32", "flags mode data[8]"). Several fields of one type are one declaration."""


class Struct:
    def __init__(
        self, name: str, *declarations: Declaration, size: int = 0, aligned: dict[str, int] | None = None
    ) -> None:
        """`size`: the expected size in bytes. `aligned`: field → its alignment, where that is not the natural one.

        Raises AssertionError if the size differs.
        """
        self.name = name
        self.fields: dict[str, Field] = {}
        self.aligned = aligned or {}
        self.alignment: int = 1
        self.size: int
        end = 0
        for kind, names in declarations:
            width = kind.size if isinstance(kind, Struct) else struct.calcsize(C_TYPES[kind][0])
            natural = kind.alignment if isinstance(kind, Struct) else width
            for field, count in _NAME.findall(names):
                alignment = self.aligned.get(field, natural)
                self.alignment = max(self.alignment, alignment)
                offset = _up(end, alignment)
                self.fields[field] = Field(field, kind, int(count or 0), offset)
                end = offset + width * int(count or 1)
        self.size = _up(end, self.alignment)
        assert size in (0, self.size), f"{name} has {self.size} bytes and not {size}"

    def offset(self, field: str) -> int:
        return self.fields[field].offset

    def codec(self) -> struct.Struct:
        """All fields, of a struct without gaps or structs in it. Fields named `reserved…` are not packed."""
        codes = [
            f"{struct.calcsize(each.code) * (each.elements or 1)}x"
            if each.name.startswith("reserved")
            else f"{each.elements or ''}{each.code}"
            for each in self.fields.values()
        ]
        made = struct.Struct("<" + "".join(codes))
        assert made.size == self.size
        return made

    def in_c(self) -> Iterator[str]:
        yield f"struct {self.name} {{"
        for each in self.fields.values():
            kind = f"struct {each.type.name}" if isinstance(each.type, Struct) else C_TYPES[each.type][1]
            alignment = f"_Alignas({self.aligned[each.name]}) " if each.name in self.aligned else ""
            yield f"    {alignment}{kind} {each.name}{f'[{each.elements}]' if each.elements else ''};"
        yield "};"
        for each in self.fields.values():
            place = f"{self.name}, {each.name}"
            yield f'static_assert(offsetof(struct {place}) == {each.offset}, "{place}");'
        yield f'static_assert(sizeof(struct {self.name}) == {self.size}, "{self.name}");'


def _up(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
