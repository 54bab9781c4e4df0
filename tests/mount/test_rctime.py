"""A source that says when anything beneath a directory was changed last, as CephFS does: cachefs/rctime.py.

A real one is in tests/ceph; here it is a file.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, contents, wait_for

MakeMount = Callable[..., Mount]
LONG_AGO, LATER = "1000000000.5", "1000000007.25"
BELIEVED, CHANGED = "the source has not changed", "the source has changed"

pytestmark = pytest.mark.promise("CH-18")


def read_all(m: Mount, source: Path) -> dict[str, int]:
    """What the source was asked for meanwhile."""
    before = m.ops()
    assert contents(m.path) == contents(source)
    after = m.ops()
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}


def restarted(m: Mount, *arguments: str) -> None:
    m.flush()
    m.remount(*arguments)


@pytest.fixture(params=[[], ["--read-only"]], ids=["read-write", "read-only"])
def cached(
    request: pytest.FixtureRequest, mount: MakeMount, faulty: tuple[Path, Path], source: Path
) -> tuple[Mount, Path]:
    """A mount that has read everything, and has been restarted; where its source's rctime is."""
    root, faults = faulty
    (faults / "rctime").write_text(LONG_AGO)
    m = mount(root, *request.param)  # whatever --revalidate says, the number is recorded
    read_all(m, source)
    restarted(m, *request.param, "--revalidate", "auto")
    return m, faults / "rctime"


def test_what_has_not_changed_is_not_compared(cached: tuple[Mount, Path], source: Path) -> None:
    m, _ = cached
    wait_for(m.log, lambda log: BELIEVED in log)
    asked = read_all(m, source)
    assert asked.get("lstat", 0) <= 1 and "read" not in asked  # a symbolic link is not pinned on a read-write mount
    restarted(m, *map(str, m.arguments))
    wait_for(m.log, lambda log: log.count(BELIEVED) == 2)
    assert read_all(m, source).get("lstat", 0) <= 1


def test_until_it_is_certain_everything_is_compared(cached: tuple[Mount, Path], source: Path) -> None:
    """The number may follow a change by seconds: this change was made before the restart."""
    m, rctime = cached
    m.umount()
    (source / "d0/f00000").write_bytes(b"changed")
    m.start()
    assert (m.path / "d0/f00000").read_bytes() == b"changed"
    rctime.write_text(LATER)
    wait_for(m.log, lambda log: CHANGED in log)
    assert BELIEVED not in m.log()
    assert read_all(m, source)["lstat"] >= 40


def test_a_change_that_was_made_meanwhile_is_seen(cached: tuple[Mount, Path], source: Path) -> None:
    m, rctime = cached
    m.umount()
    (source / "d0/f00000").write_bytes(b"changed")
    rctime.write_text(LATER)
    m.start()
    assert contents(m.path) == contents(source)
    assert BELIEVED not in m.log()


def test_lazy_compares_whatever_the_number_says(cached: tuple[Mount, Path], source: Path) -> None:
    m, _ = cached
    restarted(m, *map(str, m.arguments[:-2]), "--revalidate", "lazy")
    assert read_all(m, source)["lstat"] >= 40
    assert BELIEVED not in m.log()


def test_a_source_that_does_not_answer_is_asked_again(
    cached: tuple[Mount, Path], source: Path, faulty: tuple[Path, Path]
) -> None:
    m, _ = cached
    arguments = [*map(str, m.arguments), "--source-timeout", "0.5"]
    restarted(m, *arguments)
    hang = faulty[1] / "hang-all"
    hang.touch()
    wait_for(m.log, lambda log: "asking again" in log)
    hang.unlink()
    wait_for(m.log, lambda log: BELIEVED in log)
    assert contents(m.path) == contents(source)
