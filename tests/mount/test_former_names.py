"""Writes by a name that the kernel still knows, and that another node has given to another file."""

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import Mount, expire


def append(path: Path, data: bytes) -> None:
    with open(path, "ab", buffering=0) as file:
        file.write(data)


def append_z(path: Path) -> None:
    """To a file that exists."""
    opened = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(opened, b"Z")
    os.close(opened)


def make_names(directory: Path, first: str, *others: str) -> None:
    """Make a file, and hard links to it."""
    (directory / first).write_bytes(b"old")
    for name in others:
        (directory / name).hardlink_to(directory / first)


def replace(path: Path) -> None:
    """By another file, as another node does."""
    new = path.with_name("new")
    new.write_bytes(b"new")
    new.replace(path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = tmp_path / "source"
    made.mkdir()
    return made


CHANGING = pytest.mark.parametrize(
    "mode", [(), ("--mutable", "**"), ("--no-fastpath",)], ids=["read-write", "mutable", "no-fastpath"]
)


@pytest.mark.promise("CH-4")
@CHANGING
def test_a_log_that_another_node_has_rotated_is_not_written_by_its_former_name(
    mount: Callable[..., Mount], source: Path, mode: tuple[str, ...]
) -> None:
    """Before: the kernel still knew it by that name, after a look at the new name the index did not, and so the rotated
    log was changed."""
    m = mount(source, "--attr-timeout", "60", *mode)
    (m.path / "log").write_bytes(b"old")
    for change, content in ((partial(append, data=b"Z"), b"newZ"), (partial(os.truncate, length=1), b"n")):
        m.drop_caches()
        assert (m.path / "log").stat().st_size
        (source / "log").rename(source / "log.1")
        (source / "log").write_bytes(b"new")
        rotated = (source / "log.1").read_bytes()
        assert (m.path / "log.1").stat().st_size == len(rotated)
        change(m.path / "log")
        assert (source / "log").read_bytes() == content
        assert (source / "log.1").read_bytes() == rotated


@pytest.mark.promise("CH-4")
@CHANGING
def test_a_name_that_another_node_has_replaced_leads_to_the_new_file_after_a_write_by_the_other_name(
    mount: Callable[..., Mount], source: Path, mode: tuple[str, ...]
) -> None:
    make_names(source, "one", "other")
    m = mount(source, "--attr-timeout", "60", *mode)
    assert (m.path / "one").stat().st_ino == (m.path / "other").stat().st_ino
    replace(source / "other")
    append(m.path / "one", b"1")
    append(m.path / "other", b"2")
    assert (source / "one").read_bytes() == b"old1"
    assert (source / "other").read_bytes() == b"new2"


@pytest.mark.promise("CH-1")
@CHANGING
def test_a_file_is_opened_by_a_name_that_stayed_when_several_others_are_gone(
    mount: Callable[..., Mount], source: Path, mode: tuple[str, ...]
) -> None:
    """Before: the first name that was gone ended each attempt, so that every second open failed."""
    make_names(source, *(f"f{at}" for at in range(10)))
    m = mount(source, "--attr-timeout", "60", *mode)
    for at in range(10):
        assert (m.path / f"f{at}").stat().st_nlink == 10
    for at in range(4, 10):
        (source / f"f{at}").unlink()
    append(m.path / "f0", b"1")
    append(m.path / "f3", b"2")
    os.truncate(m.path / "f1", 4)
    assert (source / "f0").read_bytes() == b"old1"


def open_in_another_thread(path: Path) -> None:
    thread = threading.Thread(target=append, args=(path, b""))
    thread.start()
    thread.join()


@pytest.mark.promise("CH-4")
@CHANGING
def test_a_second_name_that_is_replaced_is_looked_up_again_as_well(
    mount: Callable[..., Mount], source: Path, mode: tuple[str, ...]
) -> None:
    """Regression: the call that was repeated for the first name reached another file, and so the next one counted as
    repeated."""
    make_names(source, "stays")
    m = mount(source, "--attr-timeout", "60", *mode)
    for name in ("first", "second"):
        (m.path / name).hardlink_to(m.path / "stays")
        assert (m.path / name).stat().st_ino == (m.path / "stays").stat().st_ino
        replace(source / name)
        open_in_another_thread(m.path / "stays")
        append(m.path / name, b"1")
        assert (source / name).read_bytes() == b"new1"
        assert (source / "stays").read_bytes() == b"old"


@pytest.mark.promise("CH-4")
@CHANGING
def test_a_link_to_a_name_that_another_node_has_replaced_is_one_to_the_new_file(
    mount: Callable[..., Mount], source: Path, mode: tuple[str, ...]
) -> None:
    make_names(source, "one", "other")
    m = mount(source, "--attr-timeout", "60", *mode)
    assert (m.path / "other").stat().st_ino == (m.path / "one").stat().st_ino
    replace(source / "other")
    (m.path / "link").hardlink_to(m.path / "other")
    assert (source / "link").read_bytes() == b"new"


@pytest.mark.promise("CH-4")
@CHANGING
def test_several_names_that_other_nodes_have_replaced_are_each_looked_up_again(
    mount: Callable[..., Mount], source: Path, mode: tuple[str, ...]
) -> None:
    names = [f"f{number}" for number in range(4)]
    make_names(source, "stays", *names)
    m = mount(source, "--attr-timeout", "60", *mode)
    assert len({path.stat().st_ino for path in m.path.iterdir()}) == 1
    for name in names:
        replace(source / name)
    for name in names:
        append(m.path / name, b"1")
        assert (source / name).read_bytes() == b"new1"
    assert (source / "stays").read_bytes() == b"old"


def link(path: Path) -> None:
    path.with_name("link").hardlink_to(path)


def truncate(path: Path) -> None:
    os.truncate(path, 1)


def has_reached(path: Path, change: Callable[[Path], None]) -> bool:
    """Was the new file at the source, which had the contents "new", changed in this way, or linked?"""
    if change is link:
        return path.with_name("link").samefile(path)
    return path.read_bytes() == (b"n" if change is truncate else b"newZ")


@pytest.mark.promise("CH-4")
@CHANGING
@pytest.mark.parametrize("first", [append_z, truncate, link])
@pytest.mark.parametrize("change", [append_z, truncate, link])
def test_after_a_call_by_a_name_that_is_gone_its_thread_reaches_no_former_file(
    mount: Callable[..., Mount],
    source: Path,
    mode: tuple[str, ...],
    first: Callable[[Path], None],
    change: Callable[[Path], None],
) -> None:
    """The first call was answered with ESTALE, and its repetition failed on the way. Before: the next call of the
    thread counted as the repetition."""
    make_names(source, "gone", "replaced", "stays")
    m = mount(source, "--attr-timeout", "60", *mode)
    for name in ("gone", "replaced", "stays"):
        assert (m.path / name).stat().st_nlink == 3
    (source / "gone").unlink()
    replace(source / "replaced")
    with pytest.raises(FileNotFoundError):
        first(m.path / "gone")
    change(m.path / "replaced")
    assert (source / "stays").read_bytes() == b"old"
    assert has_reached(source / "replaced", change)


@pytest.mark.promise("CH-4")
@CHANGING
@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_RDONLY], ids=["writing", "both", "reading"])
@pytest.mark.parametrize("change", [append_z, truncate, link])
def test_a_name_that_another_node_has_replaced_leads_to_the_new_file_while_the_old_one_is_open(
    mount: Callable[..., Mount], source: Path, mode: tuple[str, ...], flags: int, change: Callable[[Path], None]
) -> None:
    """A log is rotated while it is written. Before: another writer opened the old one by the first one's descriptor."""
    (source / "log").write_bytes(b"old")
    m = mount(source, "--attr-timeout", "60", *mode)
    if flags == os.O_RDONLY and mode != ("--mutable", "**"):
        pytest.skip("it is immutable")
    opened = os.open(m.path / "log", flags)
    (source / "log").rename(source / "log.1")
    (source / "log").write_bytes(b"new")
    change(m.path / "log")
    assert (source / "log.1").read_bytes() == b"old"
    assert has_reached(source / "log", change)
    if flags != os.O_RDONLY:
        os.pwrite(opened, b"OLD", 0)
        assert (source / "log.1").read_bytes() == b"OLD"
    os.close(opened)


def chmod(path: Path) -> None:
    path.chmod(0o640)


def set_times(path: Path) -> None:
    os.utime(path, (5, 5))


def set_colour(path: Path) -> None:
    os.setxattr(path, "user.colour", b"red")


def own(path: Path) -> None:
    os.chown(path, 4321, 4321)


def is_changed(path: Path) -> bool:
    found = path.stat()
    return found.st_mode & 0o777 == 0o640 or found.st_mtime == 5 or found.st_uid == 4321 or bool(os.listxattr(path))


@pytest.mark.promise("CH-6")
@CHANGING
@pytest.mark.parametrize("is_renamed", [True, False], ids=["renamed", "linked"])
@pytest.mark.parametrize("change", [chmod, set_times, set_colour, own])
def test_attributes_of_a_name_that_another_node_has_replaced_are_those_of_the_new_file(
    mount: Callable[..., Mount],
    source: Path,
    mode: tuple[str, ...],
    is_renamed: bool,
    change: Callable[[Path], None],
) -> None:
    make_names(source, "log", *(() if is_renamed else ("log.1",)))
    m = mount(source, "--attr-timeout", "60", *mode)
    for name in ("log",) if is_renamed else ("log", "log.1"):
        assert (m.path / name).stat()
    if is_renamed:
        (source / "log").rename(source / "log.1")
    replace(source / "log")
    if is_renamed:
        assert (m.path / "log.1").stat()
    change(m.path / "log")
    assert [is_changed(source / name) for name in ("log", "log.1")] == [True, False]


@pytest.mark.promise("CH-6")
@CHANGING
def test_attributes_of_a_file_that_is_open_change_whatever_has_its_name(
    mount: Callable[..., Mount], source: Path, mode: tuple[str, ...]
) -> None:
    make_names(source, "log")
    m = mount(source, "--attr-timeout", "60", *mode)
    with open(m.path / "log", "r+b") as opened:
        (source / "log").rename(source / "log.1")
        replace(source / "log")
        assert (m.path / "log.1").stat()
        os.fchmod(opened.fileno(), 0o640)
        os.setxattr(opened.fileno(), "user.colour", b"red")
    assert [is_changed(source / name) for name in ("log", "log.1")] == [False, True]


@pytest.mark.promise("CH-4")
@CHANGING
@pytest.mark.parametrize("change", [append_z, truncate, link])
@pytest.mark.parametrize("others", [(), ("kept",)], ids=["one name", "two names"])
def test_a_name_that_a_file_with_another_lost_name_has_got_leads_to_it(
    mount: Callable[..., Mount],
    source: Path,
    mode: tuple[str, ...],
    change: Callable[[Path], None],
    others: tuple[str, ...],
) -> None:
    """Before: the call failed with ESTALE, once for each of the two files, and the kernel repeats it only once."""
    make_names(source, "got", *others)
    (source / "moved").write_bytes(b"new")
    (source / "other").hardlink_to(source / "moved")
    m = mount(source, "--attr-timeout", "60", *mode)
    for name in ("got", *others, "moved", "other"):
        assert (m.path / name).stat()
    (source / "moved").rename(source / "got")
    change(m.path / "got")
    assert [(source / name).read_bytes() for name in others] == [b"old"] * len(others)
    assert has_reached(source / "other", change)


@pytest.mark.promise("CH-4")
@CHANGING
@pytest.mark.parametrize("change", [append_z, truncate])
def test_a_look_up_by_another_name_after_a_failed_link_does_not_count(
    mount: Callable[..., Mount], source: Path, mode: tuple[str, ...], change: Callable[[Path], None]
) -> None:
    names = [f"gone{at}" for at in range(20)], [f"replaced{at}" for at in range(20)], [f"new{at}" for at in range(20)]
    make_names(source, "stays", *names[0], *names[1])
    m = mount(source, "--attr-timeout", "60", *mode)
    for name in (*names[0], *names[1]):
        assert (m.path / name).stat().st_nlink == 41
    for name in names[0]:
        (source / name).unlink()
    for name in names[1]:
        replace(source / name)
    for gone, replaced, new in zip(*names, strict=True):
        with pytest.raises(FileNotFoundError):
            (m.path / new).hardlink_to(m.path / gone)
        (source / f"another {new}").hardlink_to(source / "stays")
        assert (m.path / f"another {new}").stat()
        change(m.path / replaced)
        assert (source / "stays").read_bytes() == b"old"


def open_to_empty(path: Path) -> None:
    """A file that exists."""
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))


@pytest.mark.promise("CH-4")
@CHANGING
@pytest.mark.parametrize("others", [(), ("second", "third")], ids=["open", "three names"])
def test_a_name_that_a_listing_does_not_show_any_more_changes_no_former_file(
    mount: Callable[..., Mount], source: Path, mode: tuple[str, ...], others: tuple[str, ...]
) -> None:
    """Before: the listing forgot the name, and the kernel still had it."""
    changes = (append_z, truncate, open_to_empty, chmod, link)
    m = mount(source, *mode)
    for change in changes:
        (source / change.__name__).mkdir()
        make_names(source / change.__name__, "gone", *others)
        assert sorted(os.listdir(m.path / change.__name__)) == sorted(["gone", *others])
    expire()
    for change in changes:
        directory = m.path / change.__name__
        for name in ("gone", *others):
            assert (directory / name).stat()
        opened = None if others else os.open(directory / "gone", os.O_RDWR)
        (source / change.__name__ / "gone").unlink()
        assert sorted(os.listdir(directory)) == sorted(others)
        if opened is None or change is not chmod:  # CH-6
            with pytest.raises(FileNotFoundError):
                change(directory / "gone")
        for name in others:
            assert (source / change.__name__ / name).read_bytes() == b"old"
        if opened is not None:
            os.close(opened)


@pytest.mark.promise("CH-4")
@CHANGING
def test_a_link_after_a_call_by_a_path_that_led_nowhere_reaches_no_former_file(
    mount: Callable[..., Mount], source: Path, mode: tuple[str, ...]
) -> None:
    """Before: the look-ups in between counted as those of the repeated call."""
    m = mount(source, "--attr-timeout", "60", *mode)
    for first in (append_z, truncate):
        for call in (first, link):
            directory = Path(f"{first.__name__}, then {call.__name__}")
            (source / directory).mkdir()
            make_names(source / directory, "gone", "stays")
            for name in ("gone", "stays"):
                assert (m.path / directory / name).stat()
            (source / directory / "gone").unlink()
            with pytest.raises(FileNotFoundError):
                call(m.path / directory / "gone")
