"""Idmapped mounts beneath the source: they show other owners than the filesystem has."""

import ctypes
import errno
import os
import struct
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import Mount, expire, settle, wait_for
from tests.sources.images import make_image, umount_when_free
from tests.users import GROUP_OBJ, MASK, OTHER, USER, USER_OBJ, acl, as_user, open_to_all

MakeMount = Callable[..., Mount]
CLONE_NEWUSER = 0x10000000
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
OPEN_TREE_CLONE, AT_EMPTY_PATH, MOVE_MOUNT_F_EMPTY_PATH, MOUNT_ATTR_IDMAP = 1, 0x1000, 4, 0x100000
_LIBC = ctypes.CDLL(None, use_errno=True)


def called(number: int, *arguments: object) -> int:
    """The result of a system call."""
    result: int = _LIBC.syscall(number, *arguments)
    assert result >= 0, os.strerror(ctypes.get_errno())
    return result


def mount_idmapped(root: Path, place: Path, owner: int, count: int = 1) -> None:
    """Show `root` at `place`, with this user and group instead of root, the next ones instead of 1, …"""
    waits = ["unshare", "--user", "sh", "-c", "echo; cat"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{process.pid}/{name}").write_text(f"0 {owner} {count}")
        users = os.open(f"/proc/{process.pid}/ns/user", os.O_RDONLY)
        tree = called(OPEN_TREE, -100, bytes(root), OPEN_TREE_CLONE | os.O_CLOEXEC)
        attributes = struct.pack("=4Q", MOUNT_ATTR_IDMAP, 0, 0, users)
        called(MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, attributes, len(attributes))
        called(MOVE_MOUNT, tree, b"", -100, bytes(place), MOVE_MOUNT_F_EMPTY_PATH)
        os.close(users)
        os.close(tree)


def mount_when_free(image: Path, place: Path, options: str = "loop") -> None:
    """Its loop device may be busy for a moment after the last mount has ended."""
    wait_for(partial(subprocess.call, ["mount", "-o", options, image, place]), lambda failed: not failed)


def whole_acl(entries: list[tuple[int, int, int]], *, other: int) -> bytes:
    """`entries`: (tag, permissions, id)."""
    return acl((USER_OBJ, 6, 0), *entries, (MASK, 7, 0), (OTHER, other, 0))


def seen(user: int, path: Path) -> object:
    return as_user(user, user, [], path.read_bytes)


OPTIONS = pytest.mark.parametrize("options", [(), ("--read-only",), ("--no-fastpath",)], ids=" ".join)
NOBODY = int(Path("/proc/sys/kernel/overflowuid").read_text())
UNMAPPED, MAPPED = 7, 1001


@pytest.mark.promise("PE-1")
@OPTIONS
@pytest.mark.parametrize("place", [".", "sub"])
def test_nobody_is_not_taken_for_an_owner_who_is_not_mapped(
    mount: MakeMount, tmp_path: Path, beneath: ExitStack, options: tuple[str, ...], place: str
) -> None:
    """stat(2) shows nobody's id for such an owner. Before: nobody read what only that owner, or its group, may read."""
    root, source = tmp_path / "root", tmp_path / "source"
    (root / "closed").mkdir(parents=True)
    (source / place).mkdir(parents=True)
    for name, uid, gid, mode in (
        ("of its group", 0, UNMAPPED, 0o640),
        ("of its owner", UNMAPPED, 0, 0o640),
        ("for all", UNMAPPED, UNMAPPED, 0o644),
        ("not for its group", 0, UNMAPPED, 0o604),
        ("closed/name", 0, UNMAPPED, 0o640),
        ("closed", 0, UNMAPPED, 0o750),
        ("with an acl", 0, UNMAPPED, 0o644),
    ):
        if name != "closed":
            (root / name).write_text(name)
        os.chown(root / name, uid, gid)
        (root / name).chmod(mode)
    os.setxattr(
        root / "with an acl", "system.posix_acl_access", whole_acl([(USER, 6, UNMAPPED), (GROUP_OBJ, 4, 0)], other=4)
    )
    beneath.callback(subprocess.run, ["umount", "-l", source / place], check=False, stderr=subprocess.DEVNULL)
    settle()
    mount_idmapped(root, source / place, MAPPED)
    m = mount(source, *options)
    open_to_all(source)
    open_to_all(m.path.parent)

    def answers(user: int, directory: Path) -> list[object]:
        files = [seen(user, directory / name) for name in ("of its group", "of its owner", "for all", "closed/name")]
        listed = as_user(user, user, [], lambda: os.listdir(directory / "closed"))
        return [*files, listed, seen(user, directory / "with an acl")]

    # What root may not enter beneath the source is not read as its owner either (docs/SOURCES.md).
    for user in (*((MAPPED,) if place == "." else ()), NOBODY, UNMAPPED, NOBODY):
        assert answers(user, m.path / place) == answers(user, source / place), user
    assert seen(NOBODY, m.path / place / "of its group") == errno.EACCES
    assert seen(NOBODY, m.path / place / "not for its group") == errno.EACCES  # it may be in that group
    assert seen(NOBODY, m.path / place / "for all") == b"for all"


@pytest.mark.promise("CH-30")
@pytest.mark.parametrize("fastpath", [(), ("--no-fastpath",)], ids=["", "no-fastpath"])
@pytest.mark.parametrize("mode", [(), ("--read-only",)], ids=["read-write", "read-only"])
def test_a_mount_that_shows_other_owners_is_another_one(
    mount: MakeMount, tmp_path: Path, beneath: ExitStack, mode: tuple[str, ...], fastpath: tuple[str, ...]
) -> None:
    """Before: the former owner went on reading names in a directory that only he might enter, and the new one could
    not."""
    root, source, former, owner = tmp_path / "root", tmp_path / "source", 1001, 1002
    (root / "closed").mkdir(parents=True)
    for name in ("old", "secret"):
        (root / "closed" / name).write_text(name)
    (root / "closed").chmod(0o700)
    (source / "sub").mkdir(parents=True)
    beneath.callback(subprocess.run, ["umount", "-l", source / "sub"], check=False, stderr=subprocess.DEVNULL)
    settle()
    mount_idmapped(root, source / "sub", former)
    m = mount(source, *mode, *fastpath)
    open_to_all(source)
    open_to_all(m.path.parent)
    closed = m.path / "sub/closed"
    assert seen(former, closed / "old") == b"old"
    umount_when_free(source / "sub")
    mount_idmapped(root, source / "sub", owner)
    wait_for(partial(seen, owner, closed / "secret"), lambda content: content == b"secret")
    assert seen(former, closed / "secret") == errno.EACCES
    assert seen(former, source / "sub/closed/secret") == errno.EACCES


@pytest.mark.promise("CH-26")
@OPTIONS
def test_a_source_that_shows_other_owners_is_another_one(
    mount: MakeMount, tmp_path: Path, beneath: ExitStack, options: tuple[str, ...]
) -> None:
    """Its times are the same. Before: the next mount had the former owners in the ACLs, and admitted them."""
    root, source, former, owner = tmp_path / "root", tmp_path / "source", 2000, 3000
    (root / "closed").mkdir(parents=True)
    source.mkdir()
    (root / "closed" / "file").write_text("secret")
    os.setxattr(root / "closed", "system.posix_acl_access", whole_acl([(USER, 5, 1), (GROUP_OBJ, 0, 0)], other=0))
    beneath.callback(subprocess.run, ["umount", "-l", source], check=False, stderr=subprocess.DEVNULL)
    settle()
    mount_idmapped(root, source, former, 2)
    m = mount(source, *options)
    open_to_all(source)
    open_to_all(m.path.parent)
    for _ in range(2):
        assert seen(former + 1, m.path / "closed/file") == b"secret"
        expire()
    m.umount()
    umount_when_free(source)
    mount_idmapped(root, source, owner, 2)
    m.start()
    assert seen(former + 1, m.path / "closed/file") == seen(former + 1, source / "closed/file") == errno.EACCES
    assert seen(owner + 1, m.path / "closed/file") == b"secret"


@pytest.mark.promise("CH-26")
@OPTIONS
def test_a_filesystem_that_is_mounted_without_acls_is_another_one(
    mount: MakeMount, tmp_path: Path, beneath: ExitStack, options: tuple[str, ...]
) -> None:
    """Before: after it was mounted with ACLs, the mask of an ACL counted as the permissions of the group."""
    image, source, member, named = tmp_path / "image", tmp_path / "source", 1001, 1002
    source.mkdir()
    make_image("btrfs", source, image)
    mount_when_free(image, source)
    beneath.callback(subprocess.run, ["umount", "-l", source], check=False, stderr=subprocess.DEVNULL)
    (source / "file").write_text("secret")
    os.chown(source / "file", 0, member)
    os.setxattr(source / "file", "system.posix_acl_access", whole_acl([(USER, 4, named), (GROUP_OBJ, 0, 0)], other=0))
    umount_when_free(source)
    m = None
    for acls, admitted, refused in (("noacl", member, named), ("acl", named, member), ("noacl", member, named)):
        mount_when_free(image, source, f"loop,{acls}")
        if m is None:
            m = mount(source, *options)
        else:
            m.start()
        open_to_all(m.path)
        assert seen(admitted, m.path / "file") == seen(admitted, source / "file") == b"secret"
        assert seen(refused, m.path / "file") == seen(refused, source / "file") == errno.EACCES
        m.umount()
        umount_when_free(source)


@pytest.mark.promise("CH-26")
@OPTIONS
def test_a_filesystem_that_is_mounted_without_extended_attributes_is_another_one(
    mount: MakeMount, tmp_path: Path, beneath: ExitStack, options: tuple[str, ...]
) -> None:
    """Before: after it was mounted with them, their absence stayed pinned."""
    image, source, content = tmp_path / "image", tmp_path / "source", tmp_path / "content"
    for directory in (source, content):
        directory.mkdir()
    (content / "file").write_text("content")
    os.setxattr(content / "file", "user.a", b"value")
    make_image("erofs", content, image)
    mount_when_free(image, source, "loop,nouser_xattr")
    beneath.callback(subprocess.run, ["umount", "-l", source], check=False, stderr=subprocess.DEVNULL)
    m = mount(source, *options)
    for _ in range(2):
        assert (m.path / "file").read_text() == "content"
        with pytest.raises(OSError, match=r"not supported|No data"):
            os.getxattr(m.path / "file", "user.a")
        expire()
    m.umount()
    umount_when_free(source)
    mount_when_free(image, source, "loop,user_xattr")
    m.start()
    assert os.getxattr(m.path / "file", "user.a") == b"value"
