"""Closing descriptors at the end of a block."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def closing_on_error(fd: int) -> Iterator[int]:
    """The caller keeps the descriptor if the block raises nothing."""
    try:
        yield fd
    except BaseException:
        os.close(fd)
        raise
