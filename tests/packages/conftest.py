from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


def built(pattern: str) -> Path:
    found = sorted((REPOSITORY / "dist").glob(pattern))
    assert len(found) == 1, f"run make deb: {found}"
    return found[0]


@pytest.fixture
def package() -> Path:
    return built("cachefs_*.deb")
