"""Metadata snapshots: what a node that starts with one knows, and what it refuses."""

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import Mount, cachefs, contents, make_files, mounted_on, settle, small_disk, wait_for

MakeMount = Callable[..., Mount]
OTHER = 1234


def everything(root: Path, *but: str) -> list[object]:
    """Everything visible of a tree except the data, in the order of its listings."""
    seen: list[object] = []
    for path, directories, files in os.walk(root):
        for name in [*directories, *files]:
            place = os.path.join(path, name)
            found = os.lstat(place)
            target = os.readlink(place) if os.path.islink(place) else ""
            seen.append(
                (
                    os.path.relpath(place, root),
                    target,
                    *[getattr(found, f"st_{field}") for field in FIELDS if field not in but],
                )
            )
    return seen


FIELDS = ("mode", "nlink", "uid", "gid", "rdev", "size", "blocks", "blksize", "mtime_ns", "ctime_ns", "atime_ns", "ino")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    make_files(root, 300, directories=7)
    (root / "deep/er/still").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "odd \n\xff name").write_bytes(b"x")
    (root / "deep/link").symlink_to("../d0/f00000")
    os.link(root / "d0/f00000", root / "deep/er/hard")
    os.setxattr(root / "d1/f00001", "user.colour", b"green")
    os.mkfifo(root / "pipe")
    os.chmod(root / "d2", 0o2750)
    settle()
    return root


@pytest.fixture
def snapshot(mount: MakeMount, tree: Path, tmp_path: Path) -> Path:
    m = mount(tree, "--read-only", name="first")
    cachefs("warmup", m.path, "--metadata-only")
    os.getxattr(m.path / "d1/f00001", "user.colour")
    said = cachefs("snapshot", "export", m.path, tmp_path / "snap").stdout
    assert said.startswith(f"{tmp_path}/snap: 315 names")
    return tmp_path / "snap"


@pytest.mark.promise("PI-14")
def test_a_new_node_asks_for_nothing(mount: MakeMount, snapshot: Path, tree: Path) -> None:
    m = mount(tree, "--read-only", "--metadata-snapshot", snapshot)
    assert m.status()["pinned_inodes"] == 315  # one file has two names, and the root has none
    assert everything(m.path) == everything(m.path.parent / "first")
    # Listing the source has moved the times of access of its directories.
    assert sorted(map(str, everything(m.path, "atime_ns"))) == sorted(map(str, everything(tree, "atime_ns")))
    assert os.getxattr(m.path / "d1/f00001", "user.colour") == b"green"
    subprocess.run(["find", m.path, "-ls"], stdout=subprocess.DEVNULL, check=True)
    assert m.ops() == {}
    assert contents(m.path) == contents(tree)
    assert set(m.ops()) <= {"open", "read", "fstat", "close"}
    for _ in range(2):
        assert not (m.path / "d1/nobody").exists()
        assert m.ops()["lstat"] == 1  # a snapshot has no absences
        m.drop_caches()
    log = m.log()
    m.umount()
    m.start()  # the cache is not new any more
    assert "is not imported" in m.log().removeprefix(log)
    before = m.status()
    assert before["cached_files"] > 300 and contents(m.path) == contents(tree)
    assert m.ops().get("read", 0) == 0


@pytest.mark.promise("PI-14")
def test_what_changed_since_is_never_mixed(mount: MakeMount, snapshot: Path, tree: Path) -> None:
    (tree / "d0/f00007").write_bytes(b"another")
    settle()
    m = mount(tree, "--read-only", "--metadata-snapshot", snapshot)
    with pytest.raises(OSError, match="Stale"):
        (m.path / "d0/f00007").read_bytes()
    assert (m.path / "d0/f00007").read_bytes() == b"another"


def test_another_filesystem_with_the_same_root_inode_is_another_tree(mount: MakeMount, tmp_path: Path) -> None:
    """Each tmpfs has root inode 1. Before: the names of the other one were shown, and its absences pinned."""
    with ExitStack() as disks:
        one = disks.enter_context(small_disk(tmp_path / "a", "1M"))
        settle()  # birth times move in steps of the kernel's clock; two disks made in one step have the same
        other = disks.enter_context(small_disk(tmp_path / "b", "1M"))
        for disk in one, other:
            (disk / f"only-{disk.name}").touch()
        settle()
        assert one.stat().st_ino == other.stat().st_ino
        m = mount(one, "--read-only", name="first")
        cachefs("warmup", m.path, "--metadata-only")
        cachefs("snapshot", "export", m.path, tmp_path / "exported")
        m.umount()
        (tmp_path / "place").mkdir()
        arguments = ("--cache-dir", tmp_path / "new", "--read-only", "--metadata-snapshot", tmp_path / "exported")
        done = cachefs("mount", other, tmp_path / "place", *arguments, check=False)
        assert done.returncode == 1 and f"is a snapshot of another tree ({one})" in done.stderr
        n = mount(one, "--read-only", "--metadata-snapshot", tmp_path / "exported", name="again")
        assert os.listdir(n.path) == [f"only-{one.name}"]
        n.umount()


@pytest.mark.promise("PI-16")
def test_what_is_not_known_is_left_out(mount: MakeMount, tree: Path, tmp_path: Path) -> None:
    m = mount(tree, "--read-only", name="first")
    list((m.path / "d0").iterdir())
    (m.path / "d1/f00001").read_bytes()
    assert "4" in cachefs("snapshot", "export", m.path, tmp_path / "snap").stdout
    n = mount(tree, "--read-only", "--metadata-snapshot", tmp_path / "snap")
    assert sorted(os.listdir(n.path / "d0")) == sorted(os.listdir(tree / "d0"))
    assert n.ops() == {}
    assert contents(n.path) == contents(tree)
    assert sorted(map(str, everything(n.path, "atime_ns"))) == sorted(map(str, everything(tree, "atime_ns")))


@pytest.mark.promise("PI-15")
def test_what_was_pinned_with_other_mutable_patterns_is_compared(
    mount: MakeMount, snapshot: Path, tree: Path, tmp_path: Path
) -> None:
    log = tree / "d0/f00007"
    log.write_bytes(b"longer than it was in the snapshot")
    (tree / "d0/another.log").write_bytes(b"new")
    settle()
    patterns = ("--mutable", log.name, "--mutable", "*.log")
    m = mount(tree, "--read-only", "--metadata-snapshot", snapshot, *patterns, name="m")
    assert contents(m.path) == contents(tree)
    assert sorted(map(str, everything(m.path, "atime_ns"))) == sorted(map(str, everything(tree, "atime_ns")))
    log.write_bytes(b"mutable")
    wait_for(lambda: (m.path / "d0" / log.name).read_bytes(), lambda data: data == b"mutable")

    cachefs("warmup", m.path, "--metadata-only")
    cachefs("snapshot", "export", m.path, tmp_path / "another")
    same = mount(tree, "--read-only", "--metadata-snapshot", tmp_path / "another", *patterns[2:], *patterns[:2])
    assert os.lstat(same.path / "d1/f00001").st_size == os.lstat(tree / "d1/f00001").st_size
    assert same.ops() == {}
    log.write_bytes(b"immutable")
    settle()
    none = mount(tree, "--read-only", "--metadata-snapshot", tmp_path / "another", name="none")
    assert contents(none.path) == contents(tree)


@pytest.mark.promise("PI-17")
def test_a_snapshot_that_another_user_could_have_written_is_refused(
    mount: MakeMount, snapshot: Path, tree: Path, tmp_path: Path
) -> None:
    """Names, modes and owners in it would be shown to every user of the mount."""
    place = tmp_path / "refused"
    place.mkdir()
    cache = tmp_path / "new cache"
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(snapshot)
    os.mkfifo(pipe, 0o600)

    def refused(file: Path) -> str:
        command = ("mount", tree, place, "--read-only", "--cache-dir", cache, "--metadata-snapshot", file)
        done = cachefs(*command, check=False)
        if mounted_on(place):
            cachefs("umount", place)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done
        return done.stderr

    os.chown(snapshot, OTHER, OTHER)
    assert f"{snapshot} belongs to user {OTHER}" in refused(snapshot)
    assert f"{link} belongs to user {OTHER}" in refused(link)
    os.chown(snapshot, 0, OTHER)
    for mode in (0o620, 0o602):
        snapshot.chmod(mode)
        assert f"{snapshot} may be written to by others" in refused(snapshot)
    assert f"{pipe} is not a regular file" in refused(pipe)
    snapshot.chmod(0o644)
    os.lchown(link, OTHER, OTHER)  # what it leads to is what counts
    m = mount(tree, "--read-only", "--metadata-snapshot", link, cache=cache)
    assert m.status()["pinned_inodes"] == 315


@pytest.mark.alone  # a process that looks at all mounts of the machine, as other tests do, pins its root
@pytest.mark.parametrize("arguments", [("--read-only",), ()], ids=["read-only", "read-write"])
def test_a_mount_that_knows_nothing_is_not_exported(
    mount: MakeMount, source: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    m = mount(source, *arguments, name="first")
    cachefs("warmup", m.path)
    assert not (m.path / "missing").exists()
    for _ in range(2):
        cachefs("invalidate", m.path)
        done = cachefs("snapshot", "export", m.path, tmp_path / "snap", check=False)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert "the root directory is not pinned" in done.stderr
        assert not (tmp_path / "snap").exists()
        cachefs("warmup", m.path)
        cachefs("snapshot", "export", m.path, tmp_path / "snap")
        another = mount(source, "--read-only", "--metadata-snapshot", tmp_path / "snap", name="another")
        assert contents(another.path) == contents(source)
        another.umount()
        shutil.rmtree(another.cache)
        (tmp_path / "snap").unlink()


def test_what_is_refused(mount: MakeMount, snapshot: Path, tree: Path, tmp_path: Path) -> None:
    good, bad = snapshot.read_bytes(), tmp_path / "bad"
    (tmp_path / "place").mkdir()
    arguments = ("--cache-dir", tmp_path / "new", "--read-only", "--metadata-snapshot", bad)
    for spoilt, message in (
        (good[:-100], "is damaged"),
        (good[:200] + bytes([good[200] ^ 1]) + good[201:], "is damaged"),
        (good[:12], "is damaged"),
        (b"", "is no metadata snapshot"),
        (b"hello" * 100, "is no metadata snapshot"),
    ):
        bad.write_bytes(spoilt)
        done = cachefs("mount", tree, tmp_path / "place", *arguments, check=False)
        assert done.returncode == 1 and done.stderr.count("\n") == 1 and message in done.stderr
    m = mount(tree, "--read-only", cache=tmp_path / "new")  # nothing of it was left behind
    assert contents(m.path) == contents(tree)


def test_another_tree_and_bad_places(mount: MakeMount, snapshot: Path, source: Path, tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()

    def refused(*arguments: object) -> str:
        command = ("mount", source, tmp_path / "place", "--cache-dir", tmp_path / "new", *arguments)
        done: subprocess.CompletedProcess[str] = cachefs(*command, check=False)
        assert done.returncode in (1, 2) and "Traceback" not in done.stderr
        return done.stderr

    assert "is a snapshot of another tree" in refused("--read-only", "--metadata-snapshot", snapshot)
    assert "No such file" in refused("--read-only", "--metadata-snapshot", tmp_path / "nobody")
    assert "needs --read-only" in refused("--metadata-snapshot", snapshot)
    done = cachefs("snapshot", "export", tmp_path / "place", tmp_path / "x", check=False)
    assert done.returncode == 1 and "no cachefs is mounted" in done.stderr
    done = cachefs("snapshot", "export", tmp_path / "first", tmp_path / "no/where", check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "cannot write" in done.stderr
    shutil.rmtree(tmp_path / "new", ignore_errors=True)


@pytest.mark.promise("PI-16")
def test_an_export_follows_nothing_that_was_planted_and_is_closed_to_others(
    mount: MakeMount, tree: Path, tmp_path: Path
) -> None:
    """The snapshot has all names, also those below directories that others may not read."""
    m = mount(tree, "--read-only")
    cachefs("warmup", m.path, "--metadata-only")
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for name in ("snap", "snap.new"):
        (tmp_path / name).symlink_to(victim)
    before = os.umask(0)
    try:
        cachefs("snapshot", "export", m.path, tmp_path / "snap")
    finally:
        os.umask(before)
    assert victim.read_bytes() == b"precious"
    found = (tmp_path / "snap").lstat()
    assert stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600 and found.st_size > 100
