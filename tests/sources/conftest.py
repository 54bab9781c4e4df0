"""Fixtures: a source of each kind, and each kind of mount."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.ceph.cluster import CephFs
from tests.sources.kinds import IN_EACH_RUN, KINDS, CephFuse, Source

MODES = {"read-only": ["--read-only"], "read-write": [], "no-fastpath": ["--no-fastpath"]}
MORE_MODES = {"read-only-no-fastpath": ["--read-only", "--no-fastpath"]}
_CEPH = [
    pytest.mark.ceph,
    pytest.mark.skipif(
        not all(map(shutil.which, ("ceph-mon", "ceph-osd", "ceph-mds", "ceph-fuse"))),
        reason="needs Ceph: scripts/system-packages --ceph",
    ),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_long = metafunc.config.getoption("--all-sources")
    if "source" in metafunc.fixturenames:
        names = KINDS if is_long else IN_EACH_RUN
        kinds = [pytest.param(name, marks=_CEPH if name == "ceph-fuse" else []) for name in names]
        metafunc.parametrize("source", kinds, indirect=True)
    if "mode" in metafunc.fixturenames:
        modes = MODES | MORE_MODES if is_long else MODES
        metafunc.parametrize("mode", list(modes.values()), ids=list(modes))


@pytest.fixture(scope="session")
def cephfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephFs]:
    made = CephFs(tmp_path_factory.mktemp("ceph"))
    yield made
    made.close()


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path, beneath: ExitStack) -> Source:
    """Not made yet. It ends after the mounts over it."""
    kind = KINDS[request.param]
    if issubclass(kind, CephFuse):
        return kind(tmp_path, beneath, request.getfixturevalue("cephfs"))
    return kind(tmp_path, beneath)
