"""A FUSE source without birth times is mounted anew, and its inode numbers belong to other objects, as with libfuse."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Mount, mounted_on, settle, wait_for
from tests.users import as_user, open_to_all

MakeMount = Callable[..., Mount]

USER, OTHER = 4001, 4002
MODES = {"read-only": ["--read-only"], "read-write": [], "mutable": ["--mutable", "**"], "none": ["--cache", "none"]}
TIMES = {"different-times": "", "one-tick": "1700000000000000000"}
FIRST = ("a", "b", "a/label", "b/label")
SWAPPED = ("b", "a", "b/label", "a/label")
LABELS = {"a": b"label of a", "b": b"label of b"}
"""Of one size."""

LONG_AGO = 1577836800


class Renumbered:
    """A FUSE mount of `root` that gives the numbers from 2 on to given paths; each time it is mounted, to others."""

    def __init__(self, root: Path, path: Path) -> None:
        self.root, self.path, self.faults = root, path, path.with_name("faults")
        path.mkdir()
        self.faults.mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    def mount(self, *paths: str) -> None:
        self.faults.joinpath("numbers").write_text("".join(f"{2 + at} {path}\n" for at, path in enumerate(paths)))
        command = [sys.executable, "-m", "tests.faultfs", self.root, self.path, self.faults]
        self._process = subprocess.Popen(command, cwd=REPOSITORY)
        wait_for(lambda: mounted_on(self.path), bool)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            subprocess.run(["umount", "-l", self.path], check=True)
        self._process = None

    def again(self, *paths: str) -> None:
        self.end()
        self.mount(*paths)


@pytest.fixture
def renumbered(tmp_path: Path) -> Iterator[Renumbered]:
    root = tmp_path / "data"
    for name, label in LABELS.items():
        (root / name).mkdir(parents=True)
        (root / name / "label").write_bytes(label)
        os.utime(root / name / "label", (LONG_AGO, LONG_AGO))  # so that its ctime is no copy of its mtime
    settle()
    made = Renumbered(root, tmp_path / "renumbered")
    made.mount(*FIRST)
    yield made
    made.end()


def again_and_again(call: Callable[[], object]) -> object:
    """A listing of a directory that counts as replaced fails once (CH-1)."""
    with suppress(OSError):
        call()
    return call()


def read_as(user: int, path: Path) -> object:
    return as_user(user, user, [], path.read_bytes)


def check_labels(m: Mount, *names: str) -> None:
    for name in names:
        assert (m.path / name / "label").read_bytes() == LABELS[name]


@pytest.mark.promise("TE-1")
@pytest.mark.promise("CH-25")
@pytest.mark.promise("CH-2")
@pytest.mark.promise("FA-10")
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seen", [("a",), ("a", "b")], ids=["one", "both"])
def test_directories_that_exchange_numbers_are_not_mistaken(
    renumbered: Renumbered, mount: MakeMount, seen: tuple[str, ...], mode: str, times: str
) -> None:
    if TIMES[times]:
        (renumbered.faults / "tick").write_text(TIMES[times])
    m = mount(renumbered.path, *MODES[mode])
    check_labels(m, *seen)
    (renumbered.root / "b/only_b").write_bytes(b"")
    renumbered.again(*SWAPPED)
    check_labels(m, "b", "a", "b")
    assert again_and_again(lambda: sorted(os.listdir(m.path / "a"))) == ["label"]
    if seen == ("a",):
        assert again_and_again(lambda: sorted(os.listdir(m.path / "b"))) == ["label", "only_b"]
    if mode != "read-only":
        (m.path / "b/new").write_bytes(b"")
        assert sorted(os.listdir(renumbered.root / "a")) == ["label"]
        assert sorted(os.listdir(renumbered.root / "b")) == ["label", "new", "only_b"]


@pytest.mark.promise("CH-25")
def test_a_directory_that_was_recognized_is_the_same_when_it_changes(renumbered: Renumbered, mount: MakeMount) -> None:
    """Its number counts in the new connection, too. Before that, a directory with another ctime is another one."""
    (renumbered.root / "a/young").write_bytes(b"old")
    m = mount(renumbered.path)
    check_labels(m, "a")
    number = (m.path / "a").stat().st_ino
    renumbered.again(*FIRST)
    (renumbered.root / "a/young").write_bytes(b"young")
    settle()
    assert (m.path / "a/young").read_bytes() == b"young"  # looks at the permissions of the directory again
    (renumbered.root / "a/more").write_bytes(b"more")
    settle()
    assert (m.path / "a/more").read_bytes() == b"more"
    assert (m.path / "a").stat().st_ino == number


@pytest.mark.promise("TE-1")
@pytest.mark.promise("CH-25")
@pytest.mark.promise("CH-17")
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("revalidate", ["never", "lazy"])
def test_a_new_mount_does_not_mistake_them_either(
    renumbered: Renumbered, mount: MakeMount, revalidate: str, times: str
) -> None:
    if TIMES[times]:
        (renumbered.faults / "tick").write_text(TIMES[times])
    m = mount(renumbered.path, "--read-only", "--revalidate", revalidate)
    check_labels(m, "a")
    m.flush()
    m.umount()
    renumbered.again(*SWAPPED)
    m.start()
    check_labels(m, "b", "a", "b")
    assert again_and_again(lambda: os.listdir(m.path / "a")) == ["label"]


@pytest.mark.promise("TE-1")
@pytest.mark.promise("CH-25")
@pytest.mark.fastpath
@pytest.mark.parametrize("mode", ["read-only", "read-write"])
def test_a_successor_does_not_mistake_them_either(renumbered: Renumbered, mount: MakeMount, mode: str) -> None:
    m = mount(renumbered.path, *MODES[mode])
    check_labels(m, "a")
    renumbered.again("x", *FIRST)
    check_labels(m, "a")  # in a second connection
    m.kill()
    renumbered.again(*SWAPPED)
    m.start()
    check_labels(m, "b", "a", "b")


@pytest.mark.promise("PE-3")
@pytest.mark.promise("PE-6")
@pytest.mark.parametrize("mode", MODES)
def test_a_directory_has_its_own_permissions(renumbered: Renumbered, mount: MakeMount, mode: str) -> None:
    for name, owner in (("a", USER), ("b", OTHER)):
        os.chown(renumbered.root / name, owner, owner)
        (renumbered.root / name).chmod(0o700)
    (renumbered.root / "b/secret").write_bytes(b"secret")
    settle()
    m = mount(renumbered.path, "--allow-other", *MODES[mode])
    open_to_all(m.path)
    assert read_as(USER, m.path / "a/label") == LABELS["a"]
    renumbered.again(*SWAPPED)
    for _ in range(3):
        for name in ("secret", "label"):
            assert read_as(USER, m.path / "b" / name) == errno.EACCES
    assert read_as(OTHER, m.path / "b/secret") == b"secret"
    assert (m.path / "b").stat().st_uid == OTHER


@pytest.mark.promise("CH-2")
@pytest.mark.parametrize("mode", ["read-write", "mutable"])
def test_a_directory_that_took_a_name_and_a_number_is_another(
    renumbered: Renumbered, mount: MakeMount, mode: str
) -> None:
    m = mount(renumbered.path, *MODES[mode])
    check_labels(m, "a")
    renumbered.end()
    (renumbered.root / "a").rename(renumbered.root / "old")
    (renumbered.root / "b").rename(renumbered.root / "a")
    (renumbered.root / "a/only_b").write_bytes(b"")
    renumbered.mount("a", "old", "a/label", "old/label")
    assert again_and_again((m.path / "a/only_b").read_bytes) == b""
    assert wait_for((m.path / "a/label").read_bytes, lambda found: found == LABELS["b"])


@pytest.mark.promise("FA-10")
@pytest.mark.parametrize("how", ["mounted again", "new mount"])
@pytest.mark.parametrize("mode", ["read-only", "read-write"])
def test_what_keeps_its_number_and_name_stays_cached(
    renumbered: Renumbered, mount: MakeMount, mode: str, how: str
) -> None:
    m = mount(renumbered.path, *MODES[mode])
    check_labels(m, "a", "b")
    m.flush()
    if how == "new mount":
        m.umount()
    renumbered.again(*FIRST)
    if how == "new mount":
        m.start()
    else:
        (m.path / "missing").exists()  # it finds out
        wait_for(lambda: m.status()["source_reconnects"], lambda count: count == 1)
    m.drop_caches()
    (renumbered.faults / "fails").write_text("read EIO label\n")
    check_labels(m, "a", "b")


@pytest.mark.promise("CH-2")
def test_after_a_comparison_a_directory_may_change_and_stays_the_same(renumbered: Renumbered, mount: MakeMount) -> None:
    m = mount(renumbered.path)
    number = (m.path / "a").stat().st_ino
    renumbered.again(*FIRST)
    assert sorted(os.listdir(m.path)) == ["a", "b"]
    wait_for(lambda: m.status()["source_reconnects"], lambda count: count == 1)
    inside = os.open(m.path / "a", os.O_PATH)
    try:
        (m.path / "a/mine").write_bytes(b"")
        (renumbered.root / "a/theirs").write_bytes(b"")
        wait_for(lambda: sorted(os.listdir(m.path / "a")), lambda names: names == ["label", "mine", "theirs"])
        assert (m.path / "a").stat().st_ino == os.fstat(inside).st_ino == number
        assert os.stat("theirs", dir_fd=inside).st_size == 0
    finally:
        os.close(inside)
