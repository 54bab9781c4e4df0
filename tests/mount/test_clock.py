"""A node whose clock is set forward or back by a day: that costs speed, causes no wrong byte and discloses nothing."""

import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Mount, contents, make_files, settle, wait_for
from tests.users import as_user, open_to_all

MakeMount = Callable[..., Mount]
DAY_S = 86_400
USER = 12345
FAST = pytest.mark.parametrize("arguments", [[], ["--no-fastpath"]], ids=["fastpath", "no-fastpath"])


class NodeClock:
    """Set the time of day for processes that are started from now on."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file = place / "shift"
        self.set(0)
        library = place / "set_clock.so"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-o", library, REPOSITORY / "tests" / "set_clock.c"], check=True
        )
        monkeypatch.setenv("CLOCK_SHIFT", str(self._file))
        monkeypatch.setenv("LD_PRELOAD", str(library))

    def set(self, shift_s: int) -> None:
        fd = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(fd, struct.pack("q", shift_s))
        os.close(fd)

    def set_forward(self, m: Mount) -> None:
        """Returns when the daemon has noticed."""
        said = m.log().count("the clock was set forward by 86400 s")
        self.set(DAY_S)
        wait_for(lambda: m.log().count("the clock was set forward by 86400 s"), lambda count: count > said)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeClock:
    return NodeClock(tmp_path, monkeypatch)


@pytest.mark.promise("CH-23")
@FAST
def test_a_file_that_is_being_written_is_no_older_for_a_clock_that_is_set_forward(
    mount: MakeMount, source: Path, clock: NodeClock, arguments: list[str]
) -> None:
    """Regression: it was cached, perhaps half old and half new."""
    settle()
    m = mount(source, "--read-only", *arguments)
    clock.set_forward(m)
    (source / "written").write_bytes(b"x" * 5000)
    assert (m.path / "written").read_bytes() == b"x" * 5000
    status = m.flush()
    assert (status["cached_files"], status["young_reads"]) == (0, 1)
    assert contents(m.path) == contents(source)


@pytest.mark.promise("CH-23")
@FAST
def test_caching_goes_on_when_the_clock_is_right_again(
    mount: MakeMount, tmp_path: Path, clock: NodeClock, arguments: list[str]
) -> None:
    """If the clock is set back, files changed on the day before are young when they are first read."""
    source = tmp_path / "source"
    paths = make_files(source, 20)
    settle()
    m = mount(source, *arguments)

    def cached_after_reading(some: list[Path]) -> int:
        for path in some:
            assert (m.path / path).read_bytes() == (source / path).read_bytes()
        return int(m.flush()["cached_files"])

    steps = [(0, 5), (DAY_S, 10), (-DAY_S, 10), (0, 15)]
    for number, (shift_s, cached) in enumerate(steps):
        clock.set(shift_s)
        assert cached_after_reading(paths[5 * number : 5 * number + 5]) == cached
    wait_for(lambda: (m.drop_caches(), cached_after_reading(paths))[1], lambda count: count == 20)
    assert contents(m.path) == contents(source)


@pytest.mark.promise("CH-23")
@FAST
def test_permissions_of_before_are_not_believed_for_a_clock_that_is_set_forward(
    mount: MakeMount, tmp_path: Path, clock: NodeClock, arguments: list[str]
) -> None:
    """Regression: for a day, names created in a closed directory were shown to users who had access before."""
    source = tmp_path / "source"
    (source / "room").mkdir(parents=True)
    (source / "room" / "old").write_text("old")
    (source / "room").chmod(0o755)
    open_to_all(source / "room" / "old")
    settle()
    m = mount(source, *arguments)
    open_to_all(m.path / "room")
    clock.set_forward(m)
    assert as_user(USER, USER, [], lambda: (m.path / "room" / "old").read_text()) == "old"
    (source / "room").chmod(0o700)
    (source / "room" / "new").write_text("new")
    assert as_user(USER, USER, [], lambda: (m.path / "room" / "new").read_text()) == 13  # EACCES
