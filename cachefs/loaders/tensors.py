"""Columns of numbers as tensors."""

from typing import Any

import pyarrow
import pyarrow.compute
import torch


def to_tensors(table: Any) -> dict[str, Any]:
    """Columns by name. Numbers and booleans become a tensor, lists of fixed size a tensor of two dimensions, other
    lists of numbers a list of tensors, and everything else a list of Python objects.

    Raises ValueError for numbers that are missing: torch has no value for them.
    """
    return {name: _values(name, table.column(name)) for name in table.column_names}


def _values(name: str, column: Any) -> Any:
    kind = column.type
    if _is_number(kind):
        return _tensor(name, column)
    if pyarrow.types.is_fixed_size_list(kind) and _is_number(kind.value_type):
        _check(name, column)
        return _tensor(name, column.combine_chunks().flatten()).reshape(len(column), kind.list_size)
    if (pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)) and _is_number(kind.value_type):
        _check(name, column)
        lengths = pyarrow.compute.list_value_length(column).to_pylist()
        return list(torch.split(_tensor(name, column.combine_chunks().flatten()), lengths))
    return column.to_pylist()


def _is_number(kind: Any) -> bool:
    return bool(pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_boolean(kind))


def _tensor(name: str, values: Any) -> torch.Tensor:
    _check(name, values)
    array = values.to_numpy(zero_copy_only=False)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _check(name: str, values: Any) -> None:
    if values.null_count:
        raise ValueError(f"column {name!r} has missing values: convert them with a function of your own (convert=…)")
