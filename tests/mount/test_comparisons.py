"""What is fetched is compared with what was pinned, also where size and mtime are the same and while it changes."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, raises_errno, settle, wait_for

MakeMount = Callable[..., Mount]
MIB = 1 << 20
MODES = pytest.mark.parametrize("mode", [("--read-only",), ()], ids=["read-only", "read-write"])


def rewrite(path: Path, content: bytes) -> None:
    """In place, at equal size, with its mtime kept: only ctime tells."""
    times = path.stat()
    with open(path, "r+b") as file:
        file.write(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def read_until_noticed(path: Path) -> bytes:
    """What a reader gets who tries again after ESTALE."""

    def attempt() -> bytes | None:
        try:
            return path.read_bytes()
        except OSError as error:
            assert error.errno == errno.ESTALE
            return None

    found: bytes = wait_for(attempt, lambda content: content is not None)
    return found


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("comparisons")
    for name in ("read-only", "read-write"):
        (root / name).write_bytes(b"a" * 12 * MIB)
    settle()
    return root


@pytest.mark.promise("CH-10")
@MODES
def test_a_file_that_is_rewritten_with_its_mtime_kept_is_never_mixed(
    mount: MakeMount, large: Path, mode: tuple[str, ...]
) -> None:
    name = "read-only" if mode else "read-write"
    m = mount(large, *mode, "--prefetch", "none")
    with open(m.path / name, "rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        assert os.pread(opened.fileno(), MIB, 0) == b"a" * MIB
        rewrite(large / name, b"b" * 12 * MIB)
        raises_errno(errno.ESTALE, lambda: os.pread(opened.fileno(), MIB, 10 * MIB))
    assert m.status()["stale_reads"] >= 1
    assert read_until_noticed(m.path / name) == b"b" * 12 * MIB


@MODES
def test_a_cached_file_that_was_rewritten_with_its_mtime_kept_is_noticed_after_a_restart(
    mount: MakeMount, source: Path, mode: tuple[str, ...]
) -> None:
    m = mount(source, *mode)
    path = m.path / "d0/f00000"
    old = path.read_bytes()
    m.flush()
    new = bytes(byte ^ 0xFF for byte in old)
    m.umount()
    rewrite(source / "d0/f00000", new)
    m.start()
    assert read_until_noticed(path) == new


@pytest.mark.promise("IM-2", "CH-10")
@MODES
def test_a_file_that_is_rewritten_while_it_is_read_is_stale(
    mount: MakeMount, source: Path, mode: tuple[str, ...]
) -> None:
    """The source is asked slowly: the file changes when it has been opened, and before it is read."""
    m = mount(source, *mode, "--attr-timeout", "60", "--simulate-latency", "400")
    path = m.path / "d0/f00000"
    old = (source / "d0/f00000").read_bytes()
    path.stat()
    opens = m.ops().get("open", 0)
    results: list[bytes | int] = []

    def read() -> None:
        try:
            results.append(path.read_bytes())
        except OSError as error:
            results.append(error.errno or 0)

    thread = threading.Thread(target=read)
    thread.start()
    wait_for(m.ops, lambda ops: ops.get("open", 0) > opens)  # counted when it begins
    time.sleep(0.6)  # opened; 0.2 s until it is read
    new = bytes(byte ^ 0xFF for byte in old)
    rewrite(source / "d0/f00000", new)
    thread.join(60)
    # Where open() itself compares, a file that had changed by then is looked up and opened again.
    compared_by_open = m.no_fastpath and not mode
    assert results in ([old], [errno.ESTALE]) or (compared_by_open and results == [new])
    if results == [errno.ESTALE]:
        assert read_until_noticed(path) == new
        m.drop_caches()
        assert path.read_bytes() == new


@pytest.mark.promise("EX-8")
@pytest.mark.parametrize("mode", [("--mutable", "**"), ("--cache", "none"), ()], ids=["mutable", "none", "unpinned"])
@pytest.mark.parametrize("pieces", [1, 300], ids=["shorter", "longer"])
def test_who_opens_a_mutable_file_gets_the_size_that_it_has_now(
    mount: MakeMount, tmp_path: Path, mode: tuple[str, ...], pieces: int
) -> None:
    """Also while the kernel believes the old one: it would pad with zeros what was cut off."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(b"a" * 100 * 512)
    settle()
    m = mount(source, *mode, "--attr-timeout", "60")
    path = m.path / "file"
    if not mode:
        path.read_bytes()
        cachefs("unpin", path)
    assert path.stat().st_size == 100 * 512
    (source / "file").write_bytes(b"b" * pieces * 512)
    with open(path, "rb", buffering=0) as opened:
        assert os.fstat(opened.fileno()).st_size == pieces * 512
        assert opened.read() == b"b" * pieces * 512
    assert path.stat().st_size == pieces * 512
