"""The library, built once."""

import ctypes
from collections.abc import Iterator

import pytest

from cachefs.fastpath.shared_memory import Shared
from tests.agreement.library import FastPath, build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def fast_path(library: ctypes.CDLL) -> Iterator[FastPath]:
    shared = Shared.create()
    yield FastPath(library, shared)
    shared.close()
