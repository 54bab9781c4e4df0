"""Answers that overtake each other on their way to the kernel.

The kernel ignores the attributes in an answer if its request began before the last attributes arrived. It goes on with
those, although they may be older.
"""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import CLI, REPOSITORY, Mount, read_after_change, stuck_threads, wait_for

MakeMount = Callable[..., Mount]
MODES = {
    "read-write": [],
    "metadata": ["--cache", "metadata"],
    "none": ["--cache", "none"],
    "mutable": ["--mutable", "*"],
}
OLD, NEW = b"old" * 1000, b"the new one" * 2000


@pytest.mark.promise("TE-1")
@pytest.mark.parametrize("serving", [[], ["--no-fastpath"]], ids=["fast path", "Python alone"])
@pytest.mark.parametrize("first, second", [(OLD, NEW), (NEW, OLD)], ids=["grown", "cut off"])
@pytest.mark.parametrize("mode", MODES)
def test_a_file_is_read_whole_though_the_kernel_ignored_its_size(
    mount: MakeMount,
    faulty: tuple[Path, Path],
    source: Path,
    mode: str,
    first: bytes,
    second: bytes,
    serving: list[str],
) -> None:
    """The source has no birth times. So the look-up of the link does not show that the file has changed: the link may
    be of a new file with its number (CH-40)."""
    place, faults = faulty
    (source / "d0/file").write_bytes(first)
    os.link(source / "d0/file", source / "d1/link")
    m = mount(place, "--attr-timeout", 30, *MODES[mode], *serving)
    os.stat(m.path / "d0"), os.stat(m.path / "d1")
    (faults / "hang").write_text("d1")
    waiting = threading.Thread(target=lambda: os.stat(m.path / "d1/link"))
    waiting.start()
    wait_for(lambda: stuck_threads(m.pid), bool)
    assert os.stat(m.path / "d0/file").st_size == len(first)
    (source / "d0/file").write_bytes(second)
    (faults / "hang").unlink()
    waiting.join()
    for name in ("d1/link", "d0/file"):
        assert read_after_change(m.path / name) == second
        assert os.stat(m.path / name).st_size == len(second)


# --- what this mount changes while the source is asked about it ------------------------------------------------------


class Asked:
    """A mount on which `cachefs warmup` asks for names in d1; the kernel asks for none while it changes the directory.

    The source answers when this ends, with its earlier state.
    """

    def __init__(self, faults: Path, what: Path, late: str) -> None:
        self._late = faults / "late"
        self._late.write_text(late)
        self._warm_up = subprocess.Popen([*CLI, "warmup", str(what)], cwd=REPOSITORY, stderr=subprocess.DEVNULL)
        wait_for((faults / "has-late").exists, bool)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._late.unlink()
        self._warm_up.wait(60)


@pytest.fixture
def unpinned(mount: MakeMount, faulty: tuple[Path, Path], source: Path) -> Iterator[Mount]:
    """The kernel knows the names in d1, here and at the source: it changes them while another look-up is under way."""
    served, _ = faulty
    for each in ("victim", "other", "gone"):
        (source / "d1" / each).write_text(each)
    held = [os.open(served / "d1" / each, os.O_PATH) for each in os.listdir(served / "d1")]  # or it may forget them
    m = mount(served, "--attr-timeout", 60)
    for each in ("victim", "other", "gone"):
        os.stat(m.path / "d1" / each)
    yield m
    for fd in held:
        os.close(fd)


def test_a_listing_does_not_bring_back_what_this_mount_has_replaced(
    unpinned: Mount, faulty: tuple[Path, Path], source: Path
) -> None:
    with Asked(faulty[1], unpinned.path / "d1", "d1/victim"):
        os.rename(unpinned.path / "d1/other", unpinned.path / "d1/victim")
    unpinned.drop_caches()
    assert (unpinned.path / "d1/victim").read_text() == "other"
    assert set(os.listdir(unpinned.path / "d1")) == set(os.listdir(source / "d1"))


def test_a_listing_does_not_hide_a_file_that_this_mount_has_made(
    unpinned: Mount, faulty: tuple[Path, Path], source: Path
) -> None:
    with Asked(faulty[1], unpinned.path / "d1", "d1/f00001"):
        (unpinned.path / "d1/new").write_text("new")
        assert set(os.listdir(unpinned.path / "d1")) == set(os.listdir(source / "d1"))
    assert set(os.listdir(unpinned.path / "d1")) == set(os.listdir(source / "d1"))


@pytest.mark.parametrize("what", ["d1", "d1/gone"], ids=["listing", "look-up"])
def test_a_look_up_does_not_get_an_answer_of_before_a_removal_by_this_mount(
    unpinned: Mount, faulty: tuple[Path, Path], source: Path, what: str
) -> None:
    with Asked(faulty[1], unpinned.path / what, "d1/gone"):
        os.unlink(unpinned.path / "d1/gone")
        assert not (unpinned.path / "d1/gone").exists()
    assert not (unpinned.path / "d1/gone").exists()
    assert set(os.listdir(unpinned.path / "d1")) == set(os.listdir(source / "d1"))
