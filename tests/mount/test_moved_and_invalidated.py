"""`cachefs invalidate` after another node has moved directories: no former state may remain beneath the path."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from cachefs.system import syscalls
from tests.conftest import Mount, cachefs, expire, settle, wait_for

RENAME_EXCHANGE = 2
MODES = {"read-only": ("--read-only",), "no-fastpath": ("--read-only", "--no-fastpath"), "read-write": ()}


@pytest.mark.promise("CH-41")
@pytest.mark.promise("PI-7")
@pytest.mark.parametrize("invalidated", [".", "two"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_directory_that_has_no_known_name_is_invalidated(
    mount: Callable[..., Mount], tmp_path: Path, mode: tuple[str, ...], invalidated: str
) -> None:
    """Before: its subdirectories and files stayed pinned, and were shown when it was found by its new name."""
    source = tmp_path / "source"
    for name in ("one", "two"):
        (source / name / "sub").mkdir(parents=True)
    (source / "one" / "sub" / "label").write_bytes(b"before")
    settle()
    m = mount(source, *mode)
    assert (m.path / "one" / "sub" / "label").read_bytes() == b"before"
    one, two = bytes(source / "one"), bytes(source / "two")
    syscalls.renameat2(-1, one, -1, two, RENAME_EXCHANGE)
    (source / "two" / "sub" / "new").write_bytes(b"")
    with suppress(OSError):  # shows this mount that "one" is another directory now
        (m.path / "one" / "sub" / "new").stat()
    assert not (m.path / "one" / "sub" / "label").exists()
    (source / "two" / "sub" / "label").write_bytes(b"now")
    cachefs("invalidate", m.path / invalidated)
    assert (m.path / "two" / "sub" / "label").read_bytes() == b"now"


@pytest.mark.promise("CH-41")
@pytest.mark.parametrize("mode", [(), ("--no-fastpath",)], ids=["read-write", "no-fastpath"])
@pytest.mark.parametrize("depth", [1, 5])
@pytest.mark.parametrize("is_forgotten", [True, False], ids=["forgotten", "known"])
def test_a_pinned_directory_beneath_others_that_the_kernel_forgets_is_invalidated(
    mount: Callable[..., Mount], tmp_path: Path, mode: tuple[str, ...], depth: int, is_forgotten: bool
) -> None:
    """The kernel forgets them under memory pressure, and while they are invalidated. Before: nothing led to the pinned
    directory then, and its files kept their old contents."""
    source = tmp_path / "source"
    beneath = Path("new", *map(str, range(depth)))
    (source / beneath).mkdir(parents=True)
    (source / "old/pinned").mkdir(parents=True)
    (source / "old/pinned/file").write_bytes(b"before")
    settle()
    m = mount(source, *mode)
    for _ in range(2):
        assert (m.path / "old/pinned/file").read_bytes() == b"before"
    (source / "old/pinned").rename(source / beneath / "pinned")
    (source / beneath / "pinned/file").write_bytes(b"and now")
    wait_for((m.path / beneath / "pinned/file").exists, bool)
    if is_forgotten:
        m.drop_caches()
    cachefs("invalidate", m.path)
    expire()
    assert (m.path / beneath / "pinned/file").read_bytes() == b"and now"
