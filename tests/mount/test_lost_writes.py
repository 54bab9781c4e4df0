"""Writes that may be lost because the source was mounted anew: each writer hears of it (docs/SEMANTICS.md, FA-14)."""

import errno
import os
import subprocess
from collections.abc import Callable

import pytest

from tests.bindfs import Bindfs, take_over
from tests.conftest import Mount, raises_errno, wait_for
from tests.holder import Holder

MakeMount = Callable[..., Mount]


@pytest.mark.promise("FA-14")
def test_c1_a_writer_hears_once_that_its_writes_may_be_lost(bindfs: Bindfs, mount: MakeMount) -> None:
    """A client that dies may lose written data. fsync must not report success."""
    m = mount(bindfs.path)
    fd = os.open(m.path / "written", os.O_RDWR | os.O_CREAT)
    try:
        os.write(fd, b"a" * 4096)
        bindfs.kill()
        bindfs.again()
        raises_errno(errno.EIO, lambda: os.fsync(fd))
        os.pwrite(fd, b"b" * 4096, 4096)
        os.fsync(fd)
    finally:
        os.close(fd)
    assert (bindfs.root / "written").read_bytes()[4096:] == b"b" * 4096


@pytest.mark.promise("FA-14")
def test_c1_a_writer_that_has_synced_goes_on(bindfs: Bindfs, mount: MakeMount) -> None:
    m = mount(bindfs.path)
    fd = os.open(m.path / "written", os.O_RDWR | os.O_CREAT)
    try:
        os.write(fd, b"a" * 4096)
        os.fsync(fd)
        bindfs.kill()
        bindfs.again()
        os.pwrite(fd, b"b" * 4096, 4096)
        os.fsync(fd)
        assert os.fstat(fd).st_size == 8192
    finally:
        os.close(fd)
    assert (bindfs.root / "written").read_bytes() == b"a" * 4096 + b"b" * 4096


@pytest.mark.promise("FA-14")
@pytest.mark.fastpath
def test_c2_a_successor_tells_a_writer_too_that_its_writes_may_be_lost(bindfs: Bindfs, mount: MakeMount) -> None:
    m = mount(bindfs.path, "--source-timeout", "2")
    holder = Holder(m.path / "written")
    assert holder.ask("write", 0, "before") == "before"
    bindfs.kill()
    m.kill()
    m.start()
    bindfs.again()
    wait_for(m.status, lambda s: not s["source_lost"] and s["source_reconnects"])
    assert holder.ask("fsync", 0, "done") == str(errno.EIO)
    assert holder.ask("fsync", 0, "done") == "done"
    holder.end()


@pytest.mark.promise("FA-14")
@pytest.mark.parametrize("call", ["write", "close"])
def test_writes_that_may_be_lost_are_told_at_the_next_write_or_close(
    bindfs: Bindfs, mount: MakeMount, call: str
) -> None:
    m = mount(bindfs.path)
    fd = os.open(m.path / "written", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"a" * 4096)
    bindfs.kill()
    bindfs.again()
    if call == "close":
        raises_errno(errno.EIO, lambda: os.close(fd))
        return
    raises_errno(errno.EIO, lambda: os.pwrite(fd, b"b", 0))
    assert os.pwrite(fd, b"b", 0) == 1  # once
    os.fsync(fd)
    os.close(fd)
    assert (bindfs.root / "written").read_bytes()[:1] == b"b"


@pytest.mark.promise("FA-14")
@pytest.mark.fastpath
@pytest.mark.parametrize("how", ["restart", "killed"])
@pytest.mark.parametrize("change", ["write", "truncate"])
def test_a_loss_that_a_predecessor_has_seen_is_reported(
    bindfs: Bindfs, mount: MakeMount, how: str, change: str
) -> None:
    """Regression: a handle learnt of the new source at its next use, which was after the take-over."""
    m = mount(bindfs.path)
    with Holder(m.path / "changed", m.path / "synced") as holder:
        assert holder.ask(change, 0, "6") == "6"
        assert holder.ask(change, 1, "6") == "6"
        assert holder.ask("fsync", 1, "done") == "done"
        bindfs.kill()
        bindfs.again()
        assert (m.path / "d0/f00000").stat()
        wait_for(m.status, lambda s: s["source_reconnects"] and not s["source_lost"])
        take_over(m, how)
        assert m.status()["source_reconnects"] == 0  # the successor has the new source
        assert holder.ask("write", 0, "after!") == str(errno.EIO)
        assert holder.ask("write", 0, "after!") == "after!"
        assert holder.ask("fsync", 0, "done") == "done"
        assert holder.ask("write", 1, "after!") == "after!"


@pytest.mark.promise("FA-14")
@pytest.mark.parametrize("call", ["write", "fsync", "truncate"])
def test_each_close_reports_a_loss_until_a_write_or_an_fsync_has(bindfs: Bindfs, mount: MakeMount, call: str) -> None:
    """Regression: a child closed its copy, which was told of the loss; fsync by the writer said success."""
    m = mount(bindfs.path)
    fd = os.open(m.path / "written", os.O_RDWR | os.O_CREAT)
    calls = {
        "write": lambda: os.pwrite(fd, b"b", 0),
        "fsync": lambda: os.fsync(fd),
        "truncate": lambda: os.ftruncate(fd, 1),
    }
    try:
        os.write(fd, b"a" * 4096)
        bindfs.kill()
        bindfs.again()
        subprocess.run(["true"], check=True)  # it closes its copy of the file, and ignores the answer
        for _ in range(2):
            raises_errno(errno.EIO, lambda: os.close(os.dup(fd)))
        raises_errno(errno.EIO, calls[call])
        os.close(os.dup(fd))
        calls[call]()
        os.fsync(fd)
    finally:
        os.close(fd)


@pytest.mark.promise("FA-14")
@pytest.mark.parametrize("how", ["ftruncate", "open"])
def test_a_truncation_that_may_be_lost_is_reported(bindfs: Bindfs, mount: MakeMount, how: str) -> None:
    (bindfs.root / "log").write_bytes(b"before")
    m = mount(bindfs.path, "--mutable", "log")
    fd = os.open(m.path / "log", os.O_RDWR | (os.O_TRUNC if how == "open" else 0))
    try:
        if how == "ftruncate":
            os.ftruncate(fd, 3)
        bindfs.kill()
        bindfs.again()
        raises_errno(errno.EIO, lambda: os.fsync(fd))
        os.ftruncate(fd, 2)
        os.fsync(fd)
        bindfs.kill()
        bindfs.again()
        os.fsync(fd)  # the truncation was synced
    finally:
        os.close(fd)
