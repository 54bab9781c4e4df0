"""Answers that overtake each other on their way to the kernel.

The kernel ignores attributes that come with an answer whose request began before the last attributes came. It goes on
with those, although they may be older.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, stuck_threads, wait_for

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
        assert (m.path / name).read_bytes() == second
        assert os.stat(m.path / name).st_size == len(second)
