from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.packages.machine import Machine


def built(pattern: str) -> Path:
    found = sorted((REPOSITORY / "dist").glob(pattern))
    assert len(found) == 1, f"run make deb: {found}"
    return found[0]


@pytest.fixture
def package() -> Path:
    return built("cachefs_*_*.deb")


@pytest.fixture
def wheel() -> Path:
    return built("cachefs_ml-*.whl")


@pytest.fixture
def client_wheel() -> Path:
    return built("cachefs_ml_client-*.whl")


@pytest.fixture
def sdist() -> Path:
    return built("cachefs_ml-*.tar.gz")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    try:
        yield made
    finally:
        made.close()
