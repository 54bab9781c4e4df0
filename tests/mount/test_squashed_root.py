"""A source that squashes root, as NFS servers do: it refuses the daemon what only the owner may read."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from daemon.cli import doctor
from tests.conftest import Mount, cachefs, expire, settle
from tests.users import as_user, open_to_all

MakeMount = Callable[..., Mount]
OWNER, OTHER = 5001, 5002
BOTH_WAYS = pytest.mark.parametrize("mode", [[], ["--no-fastpath"]], ids=["", "no-fastpath"])
KINDS = pytest.mark.parametrize("kind", [["--read-only"], []], ids=["read-only", "read-write"])
CONTENT = {"public": b"public", "private": b"private", "closed/inner": b"inner", "closed/deep/file": b"deep"}


def owner(function: Callable[[], object]) -> object:
    return as_user(OWNER, OWNER, [], function)


def other(function: Callable[[], object]) -> object:
    return as_user(OTHER, OTHER, [], function)


@pytest.fixture
def squashed(faulty: tuple[Path, Path], source: Path) -> Iterator[Path]:
    """A source with the home of a user, and root as nobody."""
    mountpoint, faults = faulty
    home = source / "home"
    for name, content in CONTENT.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o600)
    (home / "public").chmod(0o644)
    (home / "closed").chmod(0o700)
    (home / "closed/deep").chmod(0o700)
    for path in (home, *home.rglob("*")):
        os.chown(path, OWNER, OWNER)
    home.chmod(0o755)
    settle()
    (faults / "squash").touch()
    yield mountpoint


def mounted(mount: MakeMount, squashed: Path, *arguments: str) -> Mount:
    m = mount(squashed, "--allow-other", *arguments)
    open_to_all(m.path)
    return m


@pytest.mark.promise("PE-26")
@KINDS
@BOTH_WAYS
def test_owner_reads_and_lists_what_root_may_not(
    mount: MakeMount, squashed: Path, kind: list[str], mode: list[str]
) -> None:
    m = mounted(mount, squashed, *kind, *mode)
    home = m.path / "home"
    for _ in range(2):
        assert {name: owner((home / name).read_bytes) for name in CONTENT} == CONTENT
        assert owner(lambda: sorted(os.listdir(home / "closed"))) == ["deep", "inner"]
        assert owner(lambda: os.listdir(home / "closed/deep")) == ["file"]
        m.flush()
        m.drop_caches()
    opens = m.ops()["open"]
    assert owner((home / "closed/deep/file").read_bytes) == b"deep"
    assert m.ops()["open"] == opens, "it is cached"


@pytest.mark.promise("PE-26")
@pytest.mark.parametrize("level", [["--mutable", "**"], ["--profile", "changing"], ["--cache", "none"]])
@BOTH_WAYS
def test_owner_reads_what_is_not_cached(mount: MakeMount, squashed: Path, level: list[str], mode: list[str]) -> None:
    m = mounted(mount, squashed, *level, *mode)
    home = m.path / "home"
    for _ in range(2):
        assert {name: owner((home / name).read_bytes) for name in CONTENT} == CONTENT
        assert owner(lambda: sorted(os.listdir(home / "closed"))) == ["deep", "inner"]
        expire()


@pytest.mark.promise("PE-26")
@BOTH_WAYS
def test_owner_lists_first(mount: MakeMount, squashed: Path, mode: list[str]) -> None:
    """The names in the listing have their attributes."""
    m = mounted(mount, squashed, *mode)

    def sizes() -> dict[str, int]:
        with os.scandir(m.path / "home/closed") as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    assert owner(sizes) == {"inner": 5}


@pytest.mark.promise("PE-26")
@BOTH_WAYS
def test_owner_writes_and_reads_back(mount: MakeMount, squashed: Path, mode: list[str]) -> None:
    m = mounted(mount, squashed, *mode)
    new = m.path / "home/closed/new"

    def write() -> object:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(b"written")
        return new.read_bytes()

    assert owner(write) == b"written"
    assert owner(lambda: sorted(os.listdir(new.parent))) == ["deep", "inner", "new"]
    assert other(new.read_bytes) == errno.EACCES


@pytest.mark.promise("PE-26")
@BOTH_WAYS
def test_group_reads_what_root_may_not(mount: MakeMount, squashed: Path, source: Path, mode: list[str]) -> None:
    """Also if it is not the first group of the reader."""
    (source / "home/closed").chmod(0o750)
    (source / "home/closed/inner").chmod(0o640)
    m = mounted(mount, squashed, *mode)
    inner = m.path / "home/closed/inner"
    assert as_user(OTHER, OWNER, [], inner.read_bytes) == b"inner"
    m.drop_caches()
    assert as_user(OTHER, OTHER, [OWNER], inner.read_bytes) == b"inner"
    assert other(inner.read_bytes) == errno.EACCES


@pytest.mark.promise("PE-26")
@BOTH_WAYS
def test_user_is_served_while_root_is_refused(mount: MakeMount, squashed: Path, mode: list[str]) -> None:
    """Calls of both may be one call to the source."""
    m = mounted(mount, squashed, "--attr-timeout", "0", *mode)
    closed = m.path / "home/closed"
    stop = threading.Event()

    def root() -> None:
        while not stop.is_set():
            with suppress(PermissionError):
                os.listdir(closed)
            with suppress(PermissionError):
                (closed / "deep/file").read_bytes()

    thread = threading.Thread(target=root)
    thread.start()
    try:
        for _ in range(30):
            assert owner((closed / "inner").read_bytes) == b"inner"
            assert owner(lambda: sorted(os.listdir(closed))) == ["deep", "inner"]
    finally:
        stop.set()
        thread.join()


def test_doctor_names_what_is_refused(squashed: Path, source: Path) -> None:
    refused = doctor.refused_to_root(str(squashed))
    assert refused is not None and refused.startswith(f"{squashed}/home/")
    assert doctor.refused_to_root(str(source)) is None


@pytest.mark.promise("PE-27")
@KINDS
@BOTH_WAYS
def test_other_users_see_what_the_source_shows_them(
    mount: MakeMount, squashed: Path, kind: list[str], mode: list[str]
) -> None:
    m = mounted(mount, squashed, *kind, *mode)
    home = m.path / "home"
    for cached in (False, True):
        assert other((home / "public").read_bytes) == b"public"
        assert other((home / "private").read_bytes) == errno.EACCES
        assert other((home / "closed/inner").read_bytes) == errno.EACCES
        assert other(lambda: os.listdir(home / "closed")) == errno.EACCES
        if not cached:
            assert {name: owner((home / name).read_bytes) for name in CONTENT} == CONTENT


@pytest.mark.promise("PE-27")
@BOTH_WAYS
def test_root_reads_what_is_cached_and_is_refused_the_rest(mount: MakeMount, squashed: Path, mode: list[str]) -> None:
    m = mounted(mount, squashed, "--read-only", *mode)
    home = m.path / "home"
    with pytest.raises(PermissionError):
        (home / "private").read_bytes()
    with pytest.raises(PermissionError):
        os.listdir(home / "closed")
    assert owner((home / "private").read_bytes) == b"private"
    assert owner(lambda: sorted(os.listdir(home / "closed"))) == ["deep", "inner"]
    m.flush()
    assert (home / "private").read_bytes() == b"private"
    assert sorted(os.listdir(home / "closed")) == ["deep", "inner"]


@pytest.mark.promise("PE-27")
@BOTH_WAYS
def test_warm_up_reports_what_root_may_not_read(mount: MakeMount, squashed: Path, mode: list[str]) -> None:
    m = mounted(mount, squashed, "--read-only", *mode)
    done = cachefs("warmup", m.path, check=False)
    assert done.returncode == 1 and "home/closed" in done.stdout + done.stderr
    assert owner((m.path / "home/private").read_bytes) == b"private"
