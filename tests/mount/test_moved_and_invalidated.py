"""`cachefs invalidate` after another node has moved directories: no former state may remain beneath the path."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from cachefs.system import syscalls
from tests.conftest import Mount, cachefs, settle

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
