"""An empty index and a stand-in for /dev/fuse, for tests that need no mount."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.fuse import notifier
from cachefs.store.index.environment import Environment
from cachefs.store.index.index import Index


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = Index(Environment(tmp_path / "durable", sync=False), Environment(tmp_path / "session", sync=False))
    yield made
    made.close()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """(what reads, what the notifications are written to): a pipe, which when full is a kernel that waits."""
    monkeypatch.setattr(notifier, "_clone", os.dup)
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)
