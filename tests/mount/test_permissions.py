"""What a mount learns after a directory was closed at the source is not shown to users without access."""

import ctypes
import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.bindfs import Bindfs
from tests.conftest import Mount, cachefs, expire, settle, wait_for
from tests.sources.images import make_image, mount_image
from tests.sshfs import sshfs
from tests.users import GROUP_OBJ, MASK, NOBODYS, OTHER, USER, USER_OBJ, acl, as_user, open_to_all

MakeMount = Callable[..., Mount]
ALICE, BOB, CAROL = 4321, 1234, 5432
ACL = "system.posix_acl_access"
MODES = [
    ("--read-only",),
    ("--read-only", "--no-fastpath"),
    ("--read-only", "--cache", "metadata"),
    (),
    ("--no-fastpath",),
    ("--mutable", "**"),
    ("--cache", "none"),
]
ATTEMPTS = 5
REFUSED = (errno.EACCES, errno.ESTALE)
LIMIT = 3
LIMITED = ("--read-only", "--metadata-limit", f"{LIMIT}", "--metadata-retention", "lru")
FEW_FILES = [LIMITED, (*LIMITED, "--no-fastpath")]
SOME = [("--read-only",), (), ("--no-fastpath",)]
KEEPING_NOTHING = [("--mutable", "**"), ("--cache", "none")]
READ_WRITE = [(), ("--no-fastpath",), ("--mutable", "**"), ("--cache", "none")]


def modes(arguments: Iterable[tuple[str, ...]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("arguments", arguments, ids=lambda a: "-".join(a))


def bob(function: Callable[[], object]) -> object:
    return as_user(BOB, BOB, [], function)


def alice(function: Callable[[], object]) -> object:
    return as_user(ALICE, ALICE, [], function)


def let_in(user: int) -> bytes:
    """rwx for the owner, r-x for one other user."""
    return acl(
        (USER_OBJ, 7, NOBODYS), (USER, 5, user), (GROUP_OBJ, 0, NOBODYS), (MASK, 5, NOBODYS), (OTHER, 0, NOBODYS)
    )


def a_tree(root: Path, name: str) -> Path:
    """outer/inner of Alice, which everyone may read."""
    inner = root / name / "inner"
    inner.mkdir(parents=True)
    (inner / "old").write_bytes(b"old")
    for path in (root / name, inner, inner / "old"):
        os.chown(path, ALICE, ALICE)
    return inner


def _chown_open(inner: Path) -> None:
    inner.chmod(0o700)
    os.chown(inner, BOB, BOB)


def _chgrp_open(inner: Path) -> None:
    inner.chmod(0o750)
    os.chown(inner, ALICE, BOB)


CLOSINGS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "parent": (lambda inner: None, lambda inner: inner.chmod(0o700)),
    "not searchable": (lambda inner: None, lambda inner: inner.chmod(0o744)),
    "grandparent": (lambda inner: None, lambda inner: inner.parent.chmod(0o700)),
    "owner": (_chown_open, lambda inner: os.chown(inner, ALICE, ALICE)),
    "group": (_chgrp_open, lambda inner: os.chown(inner, ALICE, ALICE)),
    "acl": (
        lambda inner: os.setxattr(inner, ACL, let_in(BOB)),
        lambda inner: os.setxattr(inner, ACL, let_in(BOB + 1)),
    ),
}
"""How Bob gets access at first, and how he loses it."""


def _move(outer: Path) -> None:
    outer.joinpath("inner").rename(outer.parent / "open" / "inner")


OPENINGS: dict[str, Callable[[Path], object]] = {
    "others": lambda outer: outer.chmod(0o701),
    "owner": lambda outer: os.chown(outer, BOB, ALICE),
    "group": lambda outer: os.chown(outer, ALICE, BOB),
    "acl": lambda outer: os.setxattr(outer, ACL, let_in(BOB)),
    "moved": _move,
}
"""How another node lets Bob into a directory, or moves what is in it to where he may go."""


_READ_BY_ALL = [(GROUP_OBJ, 5, NOBODYS), (MASK, 5, NOBODYS), (OTHER, 5, NOBODYS)]


def _refuse_bob(outer: Path) -> None:
    outer.chmod(0o755)
    os.setxattr(outer, ACL, acl((USER_OBJ, 7, NOBODYS), (USER, 0, BOB), *_READ_BY_ALL))


ACL_OPENINGS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "entry added": (lambda outer: outer.chmod(0o750), lambda outer: os.setxattr(outer, ACL, let_in(BOB))),
    "entry removed": (_refuse_bob, lambda outer: os.removexattr(outer, ACL)),
    "entry changed": (
        lambda outer: os.setxattr(outer, ACL, let_in(BOB + 1)),
        lambda outer: os.setxattr(outer, ACL, let_in(BOB)),
    ),
}
"""What the ACL of a directory is before, and how another node lets Bob in by it."""


def _change_owners(old: Path) -> bytes:
    """As `chown -R`."""
    for path in (old.parent, old):
        os.chown(path, CAROL, ALICE)
    return b"old"


def _append(old: Path) -> bytes:
    with old.open("ab") as file:
        file.write(b" and more")
    old.chmod(0o600)
    return b"old and more"


def _close(old: Path) -> bytes:
    old.chmod(0o600)
    return b"old"


FILE_CHANGES: dict[str, Callable[[Path], bytes]] = {
    "closed": _close,
    "closed and appended to": _append,
    "given away": _change_owners,
}
"""How another node changes a file of Alice. They return what is in it then."""


def put(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    os.chown(path, ALICE, ALICE)


def closable_trees(source: Path) -> dict[str, Path]:
    """The directory of files in a tree for each way of closing it. All are open, and older than two seconds."""
    trees = {name: a_tree(source, name) for name in CLOSINGS}
    for name, inner in trees.items():
        CLOSINGS[name][0](inner)
    settle()
    return trees


def mounted(mount: MakeMount, source: Path, arguments: tuple[str, ...]) -> Mount:
    m = mount(source, "--allow-other", *arguments)
    open_to_all(source)
    open_to_all(m.path)
    return m


@modes(MODES)
def test_an_invalidation_takes_all_new_permissions_over(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    """Each directory with other permissions failed an open with ESTALE, and the kernel repeats one only once."""
    names = ["a", "a/b", "a/b/c", "a/b/c/d"]
    (source / names[-1]).mkdir(parents=True)
    (source / names[-1] / "file").write_bytes(b"content")
    subprocess.run(["chmod", "-R", "a+rX", source], check=True)
    settle()
    m = mount(source, "--allow-other", *arguments)
    open_to_all(m.path)
    read = (m.path / names[-1] / "file").read_bytes
    assert bob(read) == alice(read) == b"content"
    for name in (".", *names):
        (source / name).chmod(0o775)
    cachefs("invalidate", m.path)
    assert bob(read) == alice(read) == b"content"


@pytest.mark.promise("PE-6", "PE-7", "PE-10")
@modes(MODES)
def test_what_is_made_in_a_closed_directory_is_not_shown(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    trees = closable_trees(source)
    m = mounted(mount, source, arguments)
    inside = {name: m.path / name / "inner" for name in trees}
    for _ in range(2):
        for name, inner in inside.items():
            assert bob((inner / "old").read_bytes) == b"old", name
        expire()  # what is pinned now is valid without limit
    for name, inner in trees.items():
        CLOSINGS[name][1](inner)
        put(inner / "new", b"secret")
        put(inner / "other", b"secret")
    expire()
    for name, inner in inside.items():
        assert bob((inner / "new").read_bytes) == errno.EACCES, name
        assert bob((inner / "other").stat) == errno.EACCES, name
        assert bob((trees[name] / "new").read_bytes) == errno.EACCES, name
        assert (inner / "old").read_bytes() == b"old", name
        assert (inner / "new").read_bytes() == b"secret", name
        assert alice((inner / "new").read_bytes) == b"secret", name
        assert alice(lambda inner=inner: sorted(os.listdir(inner))) == ["new", "old", "other"], name
    for name, inner in trees.items():  # and opened again
        inner.parent.chmod(0o755)
        inner.chmod(0o755)
        if name == "acl":
            os.removexattr(inner, ACL)
            inner.chmod(0o755)
    for name, inner in inside.items():
        wait_for(lambda inner=inner: bob((inner / "new").read_bytes), lambda got: got == b"secret")
        assert bob(lambda inner=inner: sorted(os.listdir(inner))) == ["new", "old", "other"], name


@pytest.mark.promise("PE-8")
@modes(MODES)
def test_the_names_of_a_closed_directory_are_not_listed(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    """A directory that was not listed before: there is no old listing to show."""
    trees = closable_trees(source)
    m = mounted(mount, source, arguments)
    for name in trees:
        assert bob((m.path / name / "inner/old").read_bytes) == b"old", name
    for name, inner in trees.items():
        CLOSINGS[name][1](inner)
        put(inner / "new", b"secret")
    expire()
    for name in trees:
        listed = bob(lambda name=name: os.listdir(m.path / name / "inner"))
        if name == "not searchable":  # Bob may see the names, and nothing else
            assert listed == errno.ESTALE or sorted(listed) == ["new", "old"], listed
            assert bob((m.path / name / "inner/new").stat) == errno.EACCES
        else:
            assert listed in (errno.EACCES, errno.ESTALE), (name, listed)
            assert bob(lambda name=name: os.listdir(m.path / name / "inner")) == errno.EACCES, name
        assert sorted(os.listdir(m.path / name / "inner")) == ["new", "old"], name
        assert alice(lambda name=name: sorted(os.listdir(m.path / name / "inner"))) == ["new", "old"], name


@pytest.mark.promise("PE-8")
@modes([(), ("--no-fastpath",)])
@pytest.mark.parametrize("closed", ["outer", "outer/inner"])
def test_the_names_of_a_closed_directory_are_not_listed_to_the_second_process_either(
    mount: MakeMount, source: Path, arguments: tuple[str, ...], closed: str
) -> None:
    """The kernel had let both open it by the former permissions. Before: the first got ESTALE, the second the names."""
    inner = a_tree(source, "outer")
    settle()
    m = mounted(mount, source, arguments)
    assert bob((m.path / "outer/inner/old").read_bytes) == b"old"
    (source / closed).chmod(0o700)
    put(inner / "new", b"secret")
    opened = [bob(lambda: os.open(m.path / "outer/inner", os.O_RDONLY)) for _ in range(2)]
    for fd in opened:
        assert isinstance(fd, int), "the kernel knows already, and this proves nothing"
        assert bob(lambda fd=fd: os.listdir(fd)) == errno.ESTALE
        os.close(fd)
    assert bob(lambda: os.listdir(m.path / "outer/inner")) == errno.EACCES
    assert alice(lambda: sorted(os.listdir(m.path / "outer/inner"))) == ["new", "old"]


@pytest.mark.promise("PE-8")
@modes(SOME)
def test_who_may_still_enter_lists_a_directory_that_was_closed_to_others(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    inner = a_tree(source, "outer")
    settle()
    m = mounted(mount, source, arguments)
    assert alice((m.path / "outer/inner/old").read_bytes) == b"old"
    inner.chmod(0o700)
    put(inner / "new", b"new")
    settle()
    assert alice(lambda: sorted(os.listdir(m.path / "outer/inner"))) == ["new", "old"]


OWN_CHANGES: dict[str, Callable[[Path], object]] = {
    "setxattr": lambda inside: os.setxattr(inside, "user.note", b"new"),
    "removexattr": lambda inside: os.removexattr(inside, "user.former"),
    "utimens": lambda inside: os.utime(inside),
    "mkdir": lambda inside: (inside / "made").mkdir(),
    "unlink": lambda inside: (inside / "other").unlink(),
    "rename": lambda inside: inside.rename(inside.parent / "moved"),
}
"""What a process on this mount changes in a directory that another node has closed, or of it."""


@pytest.mark.promise("PE-6", "PE-7")
@modes(SOME[1:])
@pytest.mark.parametrize("change", OWN_CHANGES)
def test_a_change_by_this_mount_does_not_hide_that_a_directory_was_closed(
    mount: MakeMount, source: Path, arguments: tuple[str, ...], change: str
) -> None:
    """The change shows this mount the new permissions. Before, where it was one of the directory itself: they were
    recorded, the kernel went on with the former ones for good, and what another node had made meanwhile was shown."""
    trees = {name: a_tree(source, name) for name in CLOSINGS}
    for name, inner in trees.items():
        os.setxattr(inner, "user.former", b"old")
        put(inner / "other", b"other")
        CLOSINGS[name][0](inner)
    settle()
    m = mounted(mount, source, arguments)
    for name in trees:
        assert bob((m.path / name / "inner/old").read_bytes) == b"old"
    for name, inner in trees.items():
        CLOSINGS[name][1](inner)
        put(inner / "new", b"secret")
    settle()
    for name in trees:
        OWN_CHANGES[change](m.path / name / "inner")
    for name in trees:
        new = m.path / name / ("moved" if change == "rename" else "inner") / "new"
        assert bob(new.read_bytes) in (errno.EACCES, errno.ESTALE), name
        assert alice(new.read_bytes) == b"secret", name
        assert bob(new.read_bytes) == errno.EACCES, name


@pytest.mark.promise("PE-6")
@modes(READ_WRITE)
def test_a_directory_that_may_be_listed_and_no_longer_searched_is_listed(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    """Before: ESTALE for 5 s to 60 s, because the check took the right to search."""
    inner = a_tree(source, "outer")
    m = mounted(mount, source, arguments)
    inside = m.path / "outer/inner"
    assert bob(lambda: os.listdir(inside)) == ["old"] and bob((inside / "old").read_bytes) == b"old"
    inner.chmod(0o744)
    expire()
    wait_for(lambda: bob((inside / "old").read_bytes), lambda found: found == errno.EACCES, 5)
    assert [bob(lambda: os.listdir(inside)) for _ in range(3)] == [["old"]] * 3
    inner.chmod(0o711)
    expire()
    wait_for(lambda: bob(lambda: os.listdir(inside)), lambda found: found == errno.EACCES, 5)
    assert bob((inside / "old").read_bytes) == b"old"


@pytest.mark.promise("PE-7")
@modes(SOME)
def test_a_directory_that_was_moved_into_a_closed_one(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    inner = a_tree(source, "outer")
    private = source / "private"
    private.mkdir(mode=0o700)
    os.chown(private, ALICE, ALICE)
    settle()
    m = mounted(mount, source, arguments)
    assert bob((m.path / "outer/inner/old").read_bytes) == b"old"
    inner.rename(private / "inner")
    put(private / "inner/new", b"secret")
    settle()
    assert bob((m.path / "outer/inner/new").read_bytes) == errno.ENOENT
    assert bob((m.path / "private/inner/new").read_bytes) == errno.EACCES
    assert alice((m.path / "private/inner/new").read_bytes) == b"secret"


@pytest.mark.promise("PE-9")
@modes(SOME)
def test_who_has_a_directory_open_looks_names_up_in_it(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    """As on a local disk: the directories above were checked when it was opened."""
    inner = a_tree(source, "outer")
    settle()
    m = mounted(mount, source, arguments)
    opened = bob(lambda: os.open(m.path / "outer/inner", os.O_RDONLY))
    assert isinstance(opened, int)
    try:
        assert bob((m.path / "outer/inner/old").read_bytes) == b"old"
        inner.parent.chmod(0o700)
        put(inner / "new", b"new")
        settle()

        def read_or_error() -> bytes | int | None:
            try:
                fd = os.open("new", os.O_RDONLY, dir_fd=opened)
            except OSError as error:
                return error.errno
            try:
                return os.read(fd, 10)
            finally:
                os.close(fd)

        assert bob(lambda: wait_for(read_or_error, lambda got: got == b"new")) == b"new"
        assert bob((m.path / "outer/inner/new").read_bytes) == errno.EACCES
    finally:
        os.close(opened)


@pytest.mark.promise("PE-6")
@modes(SOME)
def test_nothing_slips_through_while_a_directory_is_being_closed(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    """Requests that are under way when the change is noticed were also admitted by the old permissions."""
    inner = a_tree(source, "outer")
    settle()
    m = mounted(mount, source, arguments)
    assert bob((m.path / "outer/inner/old").read_bytes) == b"old"
    stolen: list[str] = []
    refused = threading.Event()
    begin = threading.Barrier(9)

    def steal(part: int) -> None:
        def run() -> None:
            begin.wait(20)
            for number in range(part, 400, 8):
                try:
                    (m.path / f"outer/inner/new{number}").read_bytes()
                    stolen.append(f"new{number}")
                except PermissionError:
                    refused.set()
                except OSError as error:
                    assert error.errno == errno.ESTALE, error

        bob(run)

    inner.chmod(0o700)
    for number in range(400):
        put(inner / f"new{number}", b"secret")
    settle()
    threads = [threading.Thread(target=steal, args=(part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    begin.wait(20)
    for thread in threads:
        thread.join(60)
    assert refused.is_set()
    assert not stolen


@pytest.mark.promise("PE-6")
@modes(FEW_FILES)
def test_who_has_lost_access_does_not_share_the_answer_to_another_user(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    """Who waits in the kernel for another user's LOOKUP gets its answer, and so does who comes after it (hazard 68)."""
    close_and_read_at_once(source, lambda: mounted(mount, source, arguments))


def close_and_read_at_once(source: Path, begin_mount: Callable[[], Mount]) -> None:
    """Directories are closed to Bob, the files in them are rewritten, and Alice and Bob read them at the same time."""
    inners = [a_tree(source, f"outer{number}") for number in range(24)]
    settle()
    m = begin_mount()
    files = [m.path / f"outer{number}/inner/old" for number in range(len(inners))]
    for file in files:
        assert bob(file.read_bytes) == alice(file.read_bytes) == b"old"
    for number, inner in enumerate(inners):
        (inner if number % 2 else inner.parent).chmod(0o700)
        put(inner / "old", b"secret")
    settle()
    changed = files[: -LIMIT - 1]  # of the last ones the old data are still cached
    begin = threading.Barrier(8)
    seen: dict[int, list[object]] = {ALICE: [], BOB: []}

    def read_all(user: int) -> None:
        begin.wait(20)
        for file in changed:
            try:
                seen[user].append(file.read_bytes())
            except OSError as error:
                seen[user].append(error.errno)

    threads = [
        threading.Thread(target=as_user, args=(user, user, [], partial(read_all, user))) for user in (ALICE, BOB) * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == {ALICE: [b"secret"] * 4 * len(changed), BOB: [errno.EACCES] * 4 * len(changed)}


@pytest.mark.promise("PE-10")
@modes([("--read-only",), ()])
def test_a_daemon_that_takes_over_knows_which_directories_had_other_permissions(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    inner = a_tree(source, "outer")
    settle()
    m = mounted(mount, source, arguments)
    inside = m.path / "outer/inner"
    assert bob((inside / "old").read_bytes) == b"old"
    expire()
    inner.chmod(0o700)
    put(inner / "new", b"secret")
    wait_for(lambda: bob((inside / "new").read_bytes), lambda got: got == errno.EACCES)
    expire()
    assert bob((inside / "old").read_bytes) == errno.EACCES
    cachefs("restart", m.path)
    assert bob((inside / "old").read_bytes) == errno.EACCES
    expire()
    assert bob((inside / "old").read_bytes) == errno.EACCES
    inner.chmod(0o755)
    wait_for(lambda: bob((inside / "new").read_bytes), lambda got: got == b"secret")


@pytest.mark.promise("PE-6")
@modes(SOME)
def test_a_directory_that_was_closed_in_the_second_of_its_last_change(
    mount: MakeMount, old_ext4: Path, arguments: tuple[str, ...]
) -> None:
    """Times in whole seconds do not say that it was closed, nor which file changed after that."""
    inners = [a_tree(old_ext4, f"outer{number}") for number in range(ATTEMPTS)]
    for inner in inners:
        put(inner / "another", b"old")
    time.sleep(2.1)
    m = mounted(mount, old_ext4, arguments)
    for inner in inners:  # the machine may be busy
        while time.time() % 1 > 0.1:
            time.sleep(0.01)
        inner.chmod(0o755)
        inside = m.path / inner.relative_to(old_ext4)
        assert bob((inside / "old").read_bytes) == alice((inside / "old").read_bytes) == b"old"
        inner.chmod(0o700)
        put(inner / "another", b"secret")
        put(inner / "new", b"secret")
        if len({path.stat().st_ctime_ns for path in (inner, inner / "new", inner / "another")}) == 1:
            break
    else:
        raise AssertionError("no directory was closed in the second of its last change")
    expire()
    for name in ("new", "another"):
        assert bob((inside / name).read_bytes) in (errno.ESTALE, errno.EACCES)
        assert bob((inside / name).read_bytes) == errno.EACCES
        assert alice((inside / name).read_bytes) == b"secret"


@pytest.mark.promise("PE-6")
@modes(SOME)
@pytest.mark.parametrize("ahead", [".", "old"])
def test_a_time_that_lies_ahead_does_not_hide_that_a_directory_was_closed(
    mount: MakeMount, tmp_path: Path, beneath: ExitStack, arguments: tuple[str, ...], ahead: str
) -> None:
    """The source is an image that was written while the clock was ahead. Before: the directory counted as unchanged
    until that time had come. So did each directory above such a file."""
    tree, image, source = tmp_path / "tree", tmp_path / "image", tmp_path / "source"
    inner = a_tree(tree, "outer")
    make_image("ext4", tree, image)
    name = os.path.normpath(inner.relative_to(tree) / ahead)
    set_time = f"set_inode_field /{name} ctime @{int(time.time()) + 3600}"
    subprocess.run(["debugfs", "-w", "-R", set_time, image], check=True, capture_output=True)
    source.mkdir()
    mount_image("ext4", image, source)
    beneath.callback(subprocess.run, ["umount", "-l", source], check=True)
    inner = source / inner.relative_to(tree)
    assert (inner / ahead).stat().st_ctime > time.time() + 3000
    m = mounted(mount, source, arguments)
    inside = m.path / inner.relative_to(source)
    for _ in range(2):
        assert bob((inside / "old").read_bytes) == alice((inside / "old").read_bytes) == b"old"
        expire()
    inner.chmod(0o700)
    expire()
    put(inner / "new", b"secret")
    for _ in range(2):
        assert bob((inside / "new").read_bytes) in (errno.ESTALE, errno.EACCES)
    assert alice((inside / "new").read_bytes) == b"secret"
    assert bob((inside / "new").read_bytes) == errno.EACCES


@pytest.mark.promise("PE-1")
@modes(SOME)
def test_a_file_that_was_closed_in_the_second_of_its_last_change(
    mount: MakeMount, old_ext4: Path, arguments: tuple[str, ...]
) -> None:
    """Its times are those of the version that everyone might read."""
    files = [old_ext4 / f"file{number}" for number in range(ATTEMPTS)]
    m = mounted(mount, old_ext4, arguments)
    for file in files:  # the machine may be busy
        while time.time() % 1 > 0.1:
            time.sleep(0.01)
        put(file, b"public")
        inside = m.path / file.name
        assert bob(inside.read_bytes) == b"public"
        before = file.stat()
        file.chmod(0o600)
        put(file, b"secret")
        seen = [bob(inside.read_bytes) for _ in range(3)]
        if file.stat().st_ctime_ns == file.stat().st_mtime_ns == before.st_ctime_ns:
            break
    else:
        raise AssertionError("no file was closed in the second of its last change")
    assert b"secret" not in seen
    assert seen[-1] in (b"public", errno.EACCES)
    assert (inside.read_bytes()) in (b"public", b"secret")


@pytest.mark.promise("PE-6")
@modes([("--mutable", "changing"), ("--mutable", "changing", "--no-fastpath")])
def test_a_new_attribute_of_a_mutable_file_in_a_closed_directory_is_not_shown(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    """The kernel knows the file for a second, and asks for the attribute without a look-up of its name."""
    inner = a_tree(source, "outer")
    put(inner / "changing", b"old")
    os.setxattr(inner / "changing", "user.a", b"old")
    settle()
    m = mounted(mount, source, (*arguments, "--attr-timeout", "20"))
    inside = m.path / "outer/inner"
    assert bob((inside / "old").read_bytes) == b"old"
    expire()  # the directory is valid for ever, now that it was compared again
    assert bob((inside / "old").read_bytes) == b"old"
    assert bob(lambda: os.getxattr(inside / "changing", "user.a")) == b"old"
    inner.chmod(0o700)
    os.setxattr(inner / "changing", "user.a", b"secret")
    assert bob(lambda: os.getxattr(inside / "changing", "user.a")) == errno.EACCES


PLACES = pytest.mark.parametrize("place", [".", "sub"], ids=["the source", "beneath the source"])
"""Where another filesystem is mounted, from the source that cachefs is mounted over."""


def a_place(tmp_path: Path, place: str) -> tuple[Path, Path]:
    """The source, and where a filesystem is mounted in it."""
    source = tmp_path / "with-others"
    (source / place).mkdir(parents=True)
    return source, source / place


def close_and_mount(inner: Path, inside: Path, secret: Path, beneath: ExitStack) -> None:
    """Close a directory, mount another one in it, and check who sees its file through the mount."""
    inner.chmod(0o700)
    subprocess.run(["mount", "--bind", secret, inner / "place"], check=True)
    beneath.callback(subprocess.run, ["umount", "-l", inner / "place"], check=True)
    expire()
    for _ in range(2):
        assert bob((inside / "place/old").read_bytes) in (errno.EACCES, errno.ESTALE)
    assert alice((inside / "place/old").read_bytes) == b"old"
    assert bob((inside / "place/old").read_bytes) == errno.EACCES


@pytest.mark.promise("PE-6")
@modes(SOME)
def test_what_is_mounted_in_a_closed_directory_is_not_shown(
    mount: MakeMount, source: Path, tmp_path: Path, beneath: ExitStack, arguments: tuple[str, ...]
) -> None:
    """Its times are older than those of the directory, as are those of a snapshot that is made there."""
    secret = a_tree(tmp_path, "elsewhere")
    settle()
    inner = a_tree(source, "outer")
    (inner / "place").mkdir()
    settle()
    m = mounted(mount, source, arguments)
    inside = m.path / "outer/inner"
    assert bob((inside / "old").read_bytes) == b"old"
    close_and_mount(inner, inside, secret, beneath)


@pytest.mark.promise("PE-6")
@modes(SOME)
@PLACES
def test_what_is_mounted_beneath_a_fuse_source_in_a_closed_directory_is_not_shown(
    mount: MakeMount, source: Path, tmp_path: Path, beneath: ExitStack, arguments: tuple[str, ...], place: str
) -> None:
    """bindfs shows it under its own device number: nothing says that another filesystem begins."""
    secret = a_tree(tmp_path, "elsewhere")
    settle()
    inner = a_tree(source, "outer")
    (inner / "place").mkdir()
    settle()
    root, at = a_place(tmp_path, place)
    bindfs = Bindfs(source, at, "rw,subtype=bindfs")
    beneath.callback(bindfs.close)
    m = mounted(mount, root, arguments)
    inside = m.path / place / "outer/inner"
    assert bob((inside / "old").read_bytes) == b"old"
    expire()
    assert bob((inside / "old").read_bytes) == b"old"
    close_and_mount(inner, inside, secret, beneath)


@contextmanager
def a_fuse_filesystem_of(user: int, path: Path, more: str = "") -> Iterator[None]:
    """It answers nobody, and is closed to all other users, unless `more` options allow them."""
    fd, libc = os.open("/dev/fuse", os.O_RDWR), ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode=40000,user_id={user},group_id={user}{more}"
    assert libc.mount(b"nobody", os.fsencode(path), b"fuse", 0, options.encode()) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        os.close(fd)
        subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.promise("PE-6")
@modes([(*first, *cache) for first in ((), ("--no-fastpath",)) for cache in ((), ("--cache", "metadata"))])
@pytest.mark.parametrize("replaced", [True, False])
def test_an_attribute_of_a_moved_file_is_not_read_by_the_descriptor_of_another_process(
    mount: MakeMount, source: Path, arguments: tuple[str, ...], replaced: bool
) -> None:
    """Before: the call by name failed, and what another process had open was asked instead."""
    inner = a_tree(source, "outer")
    (source / "closed").mkdir(mode=0o700)
    put(inner / "file", b"old" * 8_000_000)
    settle()
    m = mounted(mount, source, ("--read-only", *arguments))
    inside = m.path / "outer/inner/file"

    def first_bytes() -> bytes:
        with open(inside, "rb") as file:
            return file.read(3)

    for _ in range(2):
        assert bob(first_bytes) == b"old"
        expire()
    with open(inside, "rb", buffering=0) as held:
        assert held.read(1) == b"o"
        (inner / "file").rename(source / "closed/file")
        if replaced:
            put(inner / "file", b"another")
        os.setxattr(source / "closed/file", "user.a", b"secret")
        expire()
        for _ in range(2):
            assert bob(lambda: os.getxattr(inside, "user.a")) in (errno.ENODATA, errno.ENOENT, errno.ESTALE)
            assert bob(lambda: os.listxattr(inside)) in ([], errno.ENOENT, errno.ESTALE)
        answer = bob(lambda: os.getxattr(inside, "user.a"))
        assert answer == (errno.ENODATA if replaced else errno.ENOENT)


@pytest.mark.promise("PE-6", "PE-8")
@modes([(), ("--no-fastpath",)])
@pytest.mark.parametrize("more", ["", ",allow_other"], ids=["closed", "hangs"])
def test_a_name_that_cannot_be_looked_at_is_not_listed_in_a_closed_directory(
    mount: MakeMount, source: Path, beneath: ExitStack, arguments: tuple[str, ...], more: str
) -> None:
    """A FUSE filesystem that a user has mounted there is closed to root, or hangs. Before: no other name said that the
    directory had changed."""
    inner = a_tree(source, "outer")
    settle()
    m = mounted(mount, source, arguments)
    inside = m.path / "outer/inner"
    for _ in range(2):
        assert bob((inside / "old").read_bytes) == b"old"
        assert bob(lambda: os.listdir(inside)) == ["old"]
        expire()
    inner.chmod(0o700)
    settle()
    (inner / "secret").mkdir()
    os.chown(inner / "secret", ALICE, ALICE)
    beneath.enter_context(a_fuse_filesystem_of(ALICE, inner / "secret", more))
    expire()
    assert bob(lambda: os.listdir(inside)) in (errno.EACCES, errno.ESTALE)
    assert bob(lambda: os.listdir(inside)) == errno.EACCES
    assert alice(lambda: sorted(os.listdir(inside))) == ["old", "secret"]


@pytest.mark.promise("PE-6", "PE-7")
@pytest.mark.parametrize(
    ("arguments", "most"), [((), 200), (("--no-fastpath",), 16)], ids=["fast path", "Python alone"]
)
def test_look_ups_that_wait_for_long_are_answered_by_the_new_permissions(
    mount: MakeMount, source: Path, arguments: tuple[str, ...], most: int
) -> None:
    """With the fast path they wait for the user's share of calls, without it in the kernel, which lets one in at a
    time. Before: who had waited for more than five seconds got the names."""
    inner = a_tree(source, "outer")
    settle()
    m = mounted(mount, source, ("--read-only", "--simulate-latency", "2000" if not arguments else "500", *arguments))
    inside = m.path / "outer/inner"
    for _ in range(2):
        assert bob((inside / "old").read_bytes) == b"old"
        expire()
    begun = time.monotonic()
    with ThreadPoolExecutor(most) as pool:
        asked = [pool.submit(bob, (inside / f"new{number}").stat) for number in range(most)]
        time.sleep(0.5)  # they are admitted
        inner.chmod(0o700)
        for number in range(most):
            put(inner / f"new{number}", b"secret")
        answers = {answer if isinstance(answer, int) else "shown" for answer in (each.result() for each in asked)}
    assert time.monotonic() - begun > 9, "nobody has waited for long"
    assert answers <= {errno.EACCES, errno.ESTALE, errno.ENOENT}, "ENOENT: asked before the file was made"
    assert errno.EACCES in answers


@pytest.mark.promise("PE-6")
@modes(SOME)
@PLACES
@pytest.mark.parametrize("restarts", [False, True], ids=["", "restart"])
def test_an_old_file_that_comes_into_a_closed_directory_is_not_shown(
    mount: MakeMount,
    source: Path,
    tmp_path: Path,
    beneath: ExitStack,
    arguments: tuple[str, ...],
    place: str,
    restarts: bool,
) -> None:
    """sshfs shows mtime as ctime, so that the file seems to be older than the closing."""
    if restarts and "--no-fastpath" in arguments:
        pytest.skip("only the fast path keeps a mount over a restart")
    inner = a_tree(source, "outer")
    put(tmp_path / "secret", b"secret")
    os.utime(tmp_path / "secret", (1e9, 1e9))
    settle()
    root, at = a_place(tmp_path, place)
    beneath.enter_context(sshfs(source, at, "-o", "allow_other,default_permissions,dir_cache=no"))
    m = mounted(mount, root, arguments)
    inside = m.path / place / "outer/inner"
    assert bob((inside / "old").read_bytes) == b"old"
    inner.chmod(0o700)
    (tmp_path / "secret").rename(inner / "new")
    expire()
    if restarts:
        cachefs("restart", m.path)
        m.pid = int(m.status()["pid"])
    for _ in range(2):
        assert bob((inside / "new").read_bytes) in (errno.EACCES, errno.ESTALE)
    assert alice((inside / "new").read_bytes) == b"secret"
    assert bob((inside / "new").read_bytes) == errno.EACCES


@pytest.mark.promise("PE-13")
@modes(SOME)
def test_that_a_name_does_not_exist_is_answered_without_a_comparison(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    inner = a_tree(source, "outer")
    settle()
    m = mounted(mount, source, arguments)
    for _ in range(2):
        assert bob((m.path / "outer/inner/old").read_bytes) == b"old"
        expire()  # what is pinned now is valid without limit
    inner.chmod(0o700)
    assert bob((m.path / "outer/inner/missing").stat) == errno.ENOENT
    put(inner / "made", b"secret")
    assert bob((m.path / "outer/inner/made").stat) == errno.EACCES  # which is compared


# --- changes ---------------------------------------------------------------------------------------------------------


def _changes(inner: Path) -> dict[str, Callable[[], object]]:
    """What Bob may do in a directory that everyone may write to."""
    return {
        "create": (inner / "created").touch,
        "mkdir": (inner / "made").mkdir,
        "mknod": lambda: os.mkfifo(inner / "fifo"),
        "symlink": lambda: (inner / "symlink").symlink_to("x"),
        "link": lambda: (inner / "linked").hardlink_to(inner / "mine"),
        "unlink": (inner / "unlinked").unlink,
        "rmdir": (inner / "removed").rmdir,
        "rename": lambda: (inner / "before").rename(inner / "after"),
        "write": lambda: (inner / "shared").write_bytes(b"written"),
        "truncate": lambda: os.truncate(inner / "shared", 0),
        "chmod": lambda: (inner / "mine").chmod(0o600),
        "utimens": lambda: os.utime(inner / "mine", (1, 1)),
        "setxattr": lambda: os.setxattr(inner / "mine", "user.x", b"x"),
    }


@pytest.mark.promise("PE-12")
@modes(READ_WRITE)
def test_nothing_is_changed_beneath_a_closed_directory(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    places = {(closed, name): f"{closed}-{name}" for closed in ("inner", "outer") for name in _changes(source)}
    for place in places.values():
        inner = a_tree(source, place)
        (inner / "removed").mkdir()
        for name in ("mine", "unlinked", "before", "shared"):
            (inner / name).write_bytes(b"content")
        for name in ("removed", "mine", "unlinked", "before", "shared"):
            os.chown(inner / name, BOB, BOB)
        inner.chmod(0o777)
    settle()
    m = mounted(mount, source, arguments)

    def change(closed: str, name: str) -> object:
        return bob(_changes(m.path / places[closed, name] / "inner")[name])

    def state() -> dict[str, tuple[int, int]]:
        found = {path: path.lstat() for place in places.values() for path in (source / place / "inner").iterdir()}
        return {str(path): (now.st_ctime_ns, now.st_mode) for path, now in found.items()}

    for place in places.values():
        assert bob((m.path / place / "inner/old").read_bytes) == b"old"
        bob(lambda place=place: [each.stat() for each in (m.path / place / "inner").iterdir()])
    for (closed, _), place in places.items():
        (source / place / "inner" if closed == "inner" else source / place).chmod(0o700)
    expire()
    before = state()
    for key in places:
        assert change(*key) == errno.EACCES, key
    assert state() == before
    for place in places.values():
        (source / place / "inner").chmod(0o777)
        (source / place).chmod(0o755)
    for key in places:
        wait_for(
            lambda key=key: change(*key),
            lambda got: got not in (errno.EACCES, errno.ESTALE),
        )
    assert state() != before


# --- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("PE-11")
@modes([("--read-only",), ()])
def test_each_directory_is_looked_at_once_for_many_new_objects(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    m = mount(source, *arguments)
    (m.path / "d0/f00000").read_bytes()
    for number in range(50):
        (source / f"d0/new{number}").write_bytes(b"new")
    expire()
    settle()
    before = m.ops()
    for number in range(50):
        (m.path / f"d0/new{number}").stat()
    after = m.ops()
    asked = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    assert asked["lstat"] == 50 + 2  # d0 and the root
    assert asked.get("getxattr", 0) <= 2


def test_a_warm_up_fetches_what_was_made_in_a_directory_that_was_closed_meanwhile(
    mount: MakeMount, source: Path
) -> None:
    m = mount(source)
    (m.path / "d0/f00000").read_bytes()
    (source / "d0").chmod(0o700)
    (source / "d0/new").write_bytes(b"new")
    settle()
    done = cachefs("warmup", m.path)
    assert "42 of 42" in done.stdout, done.stdout
    assert (m.path / "d0").stat().st_mode & 0o777 == 0o700


@pytest.mark.promise("PE-29")
@modes(MODES)
@pytest.mark.parametrize("closed", ["inner", "inner/old"], ids=["directory", "file"])
def test_a_directory_that_is_opened_shows_nothing_that_was_closed_before(
    mount: MakeMount, source: Path, arguments: tuple[str, ...], closed: str
) -> None:
    """An attack read it for as long as it tried: the source had never admitted the user."""
    outers = {name: a_tree(source, name).parent for name in OPENINGS}
    (source / "open").mkdir()
    for outer in outers.values():
        outer.chmod(0o750)
    settle()
    m = mounted(mount, source, arguments)
    for _ in range(2):
        for name in outers:
            assert alice((m.path / name / "inner/old").read_bytes) == b"old"
            assert bob((m.path / name / "inner/old").read_bytes) == errno.EACCES
        expire()
    for name, outer in outers.items():
        (outer / closed).chmod(0o700)
        OPENINGS[name](outer)
        put(outer / "new", b"new")
    expire()
    for name in outers:
        assert alice((m.path / name / "new").read_bytes) == b"new"
    alice(partial(os.listdir, m.path / "open"))
    for name in outers:
        inner = Path("open" if name == "moved" else name) / "inner"
        assert alice((m.path / inner / "old").read_bytes) == b"old"
        for root in (source, m.path):
            assert bob((root / inner / "old").read_bytes) in REFUSED, (name, root)
            listed = bob(partial(os.listdir, root / inner))
            assert listed == ["old"] if closed == "inner/old" else listed in REFUSED, (name, root)
        assert alice((m.path / inner / "old").read_bytes) == b"old"


@pytest.mark.promise("PE-30")
@modes(MODES)
@pytest.mark.parametrize("opening", ["others", "owner", "group", "acl"])
@pytest.mark.parametrize("change", FILE_CHANGES)
def test_a_file_and_its_directory_get_other_permissions(
    mount: MakeMount, source: Path, arguments: tuple[str, ...], opening: str, change: str
) -> None:
    """The kernel repeats an open by a path only once, and the directory has caused that already."""
    outer = a_tree(source, "outer").parent
    outer.chmod(0o750)
    settle()
    m = mounted(mount, source, arguments)
    for _ in range(2):
        assert alice((m.path / "outer/inner/old").read_bytes) == b"old"
        expire()
    OPENINGS[opening](outer)
    expected = FILE_CHANGES[change](outer / "inner/old")
    if arguments not in KEEPING_NOTHING:
        expected = b"old"
    assert alice((m.path / "outer/inner/old").read_bytes) == expected
    for user in (BOB, CAROL):
        at_source = as_user(user, user, [], (outer / "inner/old").read_bytes)
        assert as_user(user, user, [], (m.path / "outer/inner/old").read_bytes) == at_source


@pytest.mark.promise("PE-30")
@modes(MODES)
def test_a_tree_gets_other_owners_and_modes_while_it_is_not_mounted(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    """Before: the first open in each directory failed with ESTALE, although the kernel knew nothing of it."""
    inners = [a_tree(source, name) for name in ("first", "second", "third")]
    settle()
    m = mounted(mount, source, arguments)
    there = [m.path / inner.relative_to(source) for inner in inners]
    for inner in there:
        assert alice((inner / "old").read_bytes) == b"old"
    m.umount()
    for inner in inners:
        for path in (inner.parent, inner, inner / "old"):
            os.chown(path, BOB, BOB)
            path.chmod(0o700)
    m.start()
    for inner in there:
        assert bob((inner / "old").read_bytes) == b"old"
        assert alice((inner / "old").read_bytes) == errno.EACCES


@pytest.mark.promise("PE-30")
@modes(READ_WRITE)
def test_a_file_gets_an_owner_here_just_after_it_got_a_mode_elsewhere(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    """The kernel had dropped the attributes for the mode, but not for the owner: a second of ESTALE."""
    old = a_tree(source, "outer") / "old"
    old.chmod(0o664)
    settle()
    m = mounted(mount, source, arguments)
    there = m.path / old.relative_to(source)
    there.stat()
    old.chmod(0o660)
    expire()
    there.stat()
    os.chown(there, CAROL, -1)
    for _ in range(3):
        assert as_user(0, 0, [], there.read_bytes) == as_user(CAROL, CAROL, [], there.read_bytes) == b"old"
        assert bob(there.read_bytes) == errno.EACCES


@pytest.mark.promise("PE-29")
@modes(SOME)
@pytest.mark.parametrize("reads", [True, False], ids=["read", "looked-at"])
@pytest.mark.parametrize("opening", ACL_OPENINGS)
def test_a_directory_that_its_acl_alone_opens_shows_nothing_that_was_closed_before(
    mount: MakeMount, source: Path, arguments: tuple[str, ...], opening: str, reads: bool
) -> None:
    """Mode and owners stay. `reads`: is the directory's ACL known before?"""
    before, after = ACL_OPENINGS[opening]
    outer = a_tree(source, "outer").parent
    before(outer)
    settle()
    m = mounted(mount, source, arguments)
    for _ in range(2):
        assert alice((m.path / "outer/inner/old").read_bytes) == b"old"
        if reads:
            assert bob((m.path / "outer/inner/old").read_bytes) == errno.EACCES
        expire()
    mode = outer.stat().st_mode
    (outer / "inner").chmod(0o700)
    after(outer)
    assert outer.stat().st_mode == mode
    for _ in range(2):
        expire()
        assert alice((m.path / "outer").stat).st_mode == mode  # type: ignore[attr-defined]
        for root in (source, m.path):
            assert bob((root / "outer/inner/old").read_bytes) in REFUSED, root
            assert bob(partial(os.listdir, root / "outer/inner")) in REFUSED, root
    assert alice((m.path / "outer/inner/old").read_bytes) == b"old"


@pytest.mark.promise("PE-29")
@modes(READ_WRITE)
def test_a_directory_that_this_mount_moves_shows_nothing_that_was_closed_before(
    mount: MakeMount, source: Path, arguments: tuple[str, ...]
) -> None:
    outer = a_tree(source, "outer").parent
    outer.chmod(0o750)
    (source / "open").mkdir()
    settle()
    m = mounted(mount, source, arguments)
    for _ in range(2):
        assert alice((m.path / "outer/inner/old").read_bytes) == b"old"
        expire()
    (outer / "inner/old").chmod(0o600)
    (m.path / "outer/inner").rename(m.path / "open/inner")
    for root in (source, m.path):
        assert bob((root / "open/inner/old").read_bytes) in REFUSED, root
    assert alice((m.path / "open/inner/old").read_bytes) == b"old"
