"""An empty index for tests that need no mount."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.store.index.environment import Environment
from cachefs.store.index.index import Index


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = Index(Environment(tmp_path / "durable", sync=False), Environment(tmp_path / "session", sync=False))
    yield made
    made.close()
