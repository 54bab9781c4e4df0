"""What programs ask of a filesystem: each call of df, stat -f, find, cp -a, rsync -a, tar and git, made once.

`reads(root)`, `changes(root)` and `programs(root)` make the calls and return the results by name, so that those on a
mount can be compared with those on its source. A result is the errno of a call that fails.
"""

import errno
import fcntl
import hashlib
import mmap
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

Results = dict[str, Any]
HIGH = 4_294_967_293
"""A user id that no signed number holds."""
FREE = ("f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail")
_ATTRIBUTES = "st_mode st_ino st_nlink st_uid st_gid st_size st_rdev st_blocks st_blksize st_mtime_ns st_ctime_ns"


def result_of(call: Callable[[], object]) -> object:
    try:
        return call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def make_tree(root: Path, owner: int = HIGH) -> None:
    """Every kind of object that the calls distinguish, and a git repository. It grows old before it is used."""
    (root / "directory/nested/empty").mkdir(parents=True)
    (root / "directory/file").write_bytes(os.urandom(300_000))
    (root / "directory/nested/empty-file").touch()
    (root / "directory/script").write_text("#!/bin/sh\n")
    (root / "directory/script").chmod(0o4750)
    (root / "directory/private").mkdir(0o700)
    (root / "directory/other").write_bytes(b"of another user")
    os.chown(root / "directory/other", owner, 4242)
    os.link(root / "directory/file", root / "directory/second name")
    (root / "directory/link").symlink_to("nested/empty-file")
    (root / "directory/dangling").symlink_to("../nothing")
    os.mkfifo(root / "directory/fifo", 0o620)
    os.utime(root / "directory/script", ns=(1_000_000_001, 1_000_000_002))
    with open(root / "directory/sparse", "wb") as sparse:
        sparse.truncate(3 << 20)
        os.pwrite(sparse.fileno(), b"end", (3 << 20) - 3)
    _run(root, "git init -q repository")
    repository = root / "repository"
    (repository / "tracked").write_text("tracked\n")
    _run(repository, "git -c user.name=a -c user.email=a@b add .")
    _run(repository, "git -c user.name=a -c user.email=a@b commit -qm first")
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def reads(root: Path, *, directory_sizes: bool = True) -> Results:
    """Calls that change nothing, on everything beneath `root`. `directory_sizes`: compare them, too."""
    found: Results = {}
    for directory, names, files in os.walk(root):
        found[f"readdir {Path(directory).relative_to(root)}"] = sorted(
            (entry.name, entry.is_dir(follow_symlinks=False), entry.is_symlink(), entry.inode())
            for entry in os.scandir(directory)
        )
        for path in [Path(directory), *(Path(directory) / name for name in [*names, *files])]:
            _reads_of(root, path, found)
            if not directory_sizes and not path.is_symlink() and path.is_dir():
                found[f"lstat {path.relative_to(root)}"] |= {"st_size": 0, "st_blocks": 0}
    found |= _errors(root)
    pathconf = {name: result_of(lambda name=name: os.pathconf(root, name)) for name in ("PC_NAME_MAX", "PC_PATH_MAX")}
    filesystem = os.statvfs(root)
    fields = (name for name in dir(filesystem) if name.startswith("f_"))
    kept = {name: getattr(filesystem, name) for name in fields if name not in ("f_fsid", "f_flag", *FREE)}
    return found | {"pathconf": pathconf, "statvfs": kept}


def _reads_of(root: Path, path: Path, found: Results) -> None:
    where = path.relative_to(root)
    now = path.lstat()
    found[f"lstat {where}"] = {name: getattr(now, name) for name in _ATTRIBUTES.split()}
    if path == root:  # FUSE: the root's number is 1
        found[f"lstat {where}"] |= {"st_ino": 1}
    else:
        found[f"stat {where}"] = result_of(lambda: path.stat().st_ino)
    found[f"readlink {where}"] = result_of(lambda: os.readlink(path))
    attributes = result_of(lambda: sorted(os.listxattr(path, follow_symlinks=False)))
    found[f"listxattr {where}"] = attributes
    for name in [*(attributes if isinstance(attributes, list) else []), "user.none"]:
        found[f"getxattr {name} {where}"] = result_of(lambda name=name: os.getxattr(path, name, follow_symlinks=False))
    found[f"access {where}"] = [os.access(path, how, effective_ids=True) for how in (os.R_OK, os.X_OK)]
    if stat.S_ISREG(now.st_mode):
        found |= {f"{name} {where}": value for name, value in _reads_of_file(path).items()}


def _reads_of_file(path: Path) -> Results:
    fd = os.open(path, os.O_RDONLY | os.O_NOATIME | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        content = os.pread(fd, size + 1, 0)
        with open(os.memfd_create("copy"), "wb") as copy:
            sent = os.sendfile(copy.fileno(), fd, 0, size) if size else 0
        mapped = b""
        if 0 < size < 1 << 20:  # a mapping of a hole would allocate it, on a tmpfs
            with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapping:
                mapped = mapping[:]
        return {
            "content": hashlib.sha256(content).hexdigest(),
            "sendfile": sent,
            "mmap": hashlib.sha256(mapped).hexdigest(),
            "read at the end": os.pread(fd, 10, size),
            "lseek at the end": result_of(lambda: os.lseek(fd, size, os.SEEK_DATA)),
            "flock": result_of(lambda: fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)),
            "lockf": result_of(lambda: fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)),
            "fsync": result_of(lambda: os.fsync(fd)),
        }
    finally:
        os.close(fd)


def without_numbers(found: Results) -> Results:
    """Results of `reads` without those of inode numbers."""
    kept: Results = {}
    for name, value in found.items():
        if name.startswith("readdir ") and isinstance(value, list):
            kept[name] = [entry[:-1] for entry in value]
        elif name.startswith("lstat "):
            kept[name] = value | {"st_ino": 0}
        elif not (name.startswith("stat ") and isinstance(value, int)):
            kept[name] = value
    return kept


def _errors(root: Path) -> Results:
    """What the calls refuse."""
    directory = root / "directory"

    def opened(path: Path, flags: int) -> object:
        def call() -> str:
            os.close(os.open(path, flags))
            return "opened"

        return result_of(call)

    return {
        "open of nothing": opened(directory / "none", os.O_RDONLY),
        "open beneath a file": opened(directory / "file/none", os.O_RDONLY),
        "open of a file as a directory": opened(directory / "file", os.O_DIRECTORY),
        "open of a directory for writing": opened(directory, os.O_WRONLY),
        "open of a symlink": opened(directory / "link", os.O_NOFOLLOW),
        "open of a symlink that dangles": opened(directory / "dangling", os.O_RDONLY),
        "open of a path": opened(directory / "link", os.O_PATH | os.O_NOFOLLOW),
        "stat of nothing": result_of(lambda: os.stat(directory / "none")),
        "stat of a name that is too long": result_of(lambda: os.stat(directory / ("n" * 300))),
        "open of a name that is too long": opened(directory / ("n" * 300), os.O_RDONLY | os.O_CREAT),
        "stat with a slash": result_of(lambda: os.stat(f"{directory}/file/")),
        "stat of the parent": result_of(lambda: os.stat(directory / "nested/..").st_ino),
        "readdir of a file": result_of(lambda: os.listdir(directory / "file")),
    }


def changes(root: Path, owner: int = HIGH) -> Results:
    """Calls that change something, in a new directory, and what is there after each of them."""
    place = root / "changes"
    found: Results = {"mkdir": result_of(lambda: place.mkdir(0o750))}

    def step(name: str, call: Callable[[], object]) -> None:
        found[name] = result_of(call)
        found[f"after {name}"] = sorted(_changed(place, path) for path in [place, *place.rglob("*")])

    file, other = place / "file", place / "other"
    fd = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o640)
    step("write", lambda: os.pwrite(fd, b"x" * 10_000, 100))
    step("create of what exists", lambda: os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR))
    step("ftruncate", lambda: os.ftruncate(fd, 5000))
    step("fsync", lambda: os.fsync(fd))
    step("fchmod", lambda: os.fchmod(fd, 0o4711))
    step("fchown", lambda: os.fchown(fd, owner, 17))
    step("lchown", lambda: os.lchown(file, 0, owner + 1))
    step("futimens", lambda: os.utime(fd, ns=(1_500_000_000_000_000_001, 1_400_000_000_000_000_002)))
    step("append", lambda: _append(file))
    step("setxattr", lambda: os.setxattr(file, "user.name", b"value"))
    step("setxattr of what exists", lambda: os.setxattr(file, "user.name", b"other", os.XATTR_CREATE))
    step("removexattr", lambda: os.removexattr(file, "user.name"))
    step("removexattr of nothing", lambda: os.removexattr(file, "user.name"))
    step("link", lambda: os.link(file, other))
    step("rename", lambda: os.rename(other, place / "renamed"))
    step("rename of the same", lambda: os.rename(file, place / "renamed"))
    step("rename into a file", lambda: os.rename(file, place / "renamed/none"))
    step("symlink", lambda: os.symlink("file", place / "link"))
    step("utime of a symlink", lambda: os.utime(place / "link", ns=(7, 9), follow_symlinks=False))
    step("mkfifo", lambda: os.mkfifo(place / "fifo", 0o604))
    step("mknod", lambda: os.mknod(place / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 3)))
    step("mkdir of a child", lambda: os.mkdir(place / "child", 0o2755))
    step("rename of a directory", lambda: os.rename(place / "child", place / "moved"))
    step("rename over a directory", lambda: os.rename(file, place / "moved"))
    step("unlink of a directory", lambda: os.unlink(place / "moved"))
    step("rmdir of what is full", lambda: os.rmdir(place))
    step("rmdir", lambda: os.rmdir(place / "moved"))
    step("rmdir of nothing", lambda: os.rmdir(place / "moved"))
    step("flock", lambda: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB))
    step("unlink", lambda: os.unlink(file))
    step("fstat without a name", lambda: os.fstat(fd).st_nlink)
    step("unlink of nothing", lambda: os.unlink(file))
    os.close(fd)
    return found


def new_repository(place: Path) -> Results:
    """What git says while it makes a repository, changes it and reads it."""
    place.mkdir()
    found = {"git init": _run(place, "git init -q .")}
    author = "-c user.name=a -c user.email=a@b -c commit.gpgsign=false"
    for version in ("first", "second"):
        (place / "file").write_text(f"{version}\n" * 1000)
        found[f"git add {version}"] = _run(place, "git add file")
        found[f"git commit {version}"] = _run(place, f"git {author} commit -qm {version} --date 2020-01-01T00:00:00Z")
    (place / "file").write_text("third\n")
    for command in ("git diff --stat", "git checkout -q -- file", "git status", "git fsck --strict", "git gc -q"):
        found[command] = _run(place, command)
    found["git log"] = _run(place, "git", "log", "-p", "--format=%s %ad")
    return found


def _append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


def _changed(place: Path, path: Path) -> tuple[object, ...]:
    now = path.lstat()
    content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(now.st_mode) else ""
    size = now.st_size if stat.S_ISREG(now.st_mode) else 0  # of a directory it is the filesystem's own affair
    time_ns = now.st_mtime_ns if now.st_mtime_ns < 1_500_000_000_000_000_000 else 0
    attributes = result_of(lambda: sorted(os.listxattr(path, follow_symlinks=False)))
    return (
        str(path.relative_to(place)), now.st_mode, now.st_nlink, now.st_uid, now.st_gid, now.st_rdev, size, time_ns,
        content, [] if attributes == "ENOTSUP" else attributes,
    )  # fmt: skip


def programs(root: Path, out: Path, *, counts: bool = True, numbers: bool = True) -> Results:
    """What the programs themselves say and make of `root`. `counts`: of free space and of sizes of directories, too.

    `numbers`: of inodes.
    """
    out.mkdir()
    find = r"%p %y %m %n %U %G %l %T@ %C@" + r" %i" * numbers + r" %s %b" * counts + r"\n"
    found: Results = {
        "find": sorted(_run(root, "find", ".", "-mindepth", "1", "-printf", find).splitlines()),
        "stat -f": _run(root, "stat", "-f", "-c", "%l %s %S" + " %a %b %c %d %f" * counts, "."),
        "git status": _run(root / "repository", "git status --porcelain"),
        "git fsck": _run(root / "repository", "git fsck --strict"),
        "git clone": _run(root, f"git clone -q --no-hardlinks repository {out}/clone"),
        "git log": _run(root / "repository", "git log -p --no-color"),
        "tar": _tar(out / "a.tar", root, "--xattrs --acls"),
        "tar -S": _tar(out / "b.tar", root, "-S"),
    }
    if counts:
        found["ls"] = _run(root / "directory", "ls -lanR --time-style=full-iso").splitlines()
        found["du"] = sorted(_run(root, "du -a").splitlines())
        found["df"] = _run(root, "df --output=size,used,avail,itotal,iused,iavail .")
    _run(root, f"cp -a . {out}/cp")
    _run(root, f"rsync -aHAXS ./ {out}/rsync")
    found["cp -a"] = _run(root, f"rsync -aHAXnci --delete ./ {out}/cp/")
    found["rsync"] = _run(root, f"rsync -aHAXnci --delete ./ {out}/rsync/")
    found["clone"] = _run(root / "repository", f"rsync -rlnci --delete --exclude /.git ./ {out}/clone/")
    return found


def _tar(archive: Path, root: Path, options: str) -> str:
    """What differs from an archive of `root`; it may record holes in another way, and the times of reading."""
    return _run(root, f"tar {options} -cf {archive} directory") + _run(root, f"tar -df {archive}")


def _run(directory: Path, *command: str) -> str:
    """What a program says, errors included; "." is the directory. One string: its words."""
    words = command[0].split() if len(command) == 1 else command
    environment = {"PATH": os.environ["PATH"], "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory"}
    environment |= {"GIT_CONFIG_VALUE_0": "*", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C", "TZ": "UTC"}
    done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, timeout=60)
    return f"{done.returncode}\n{done.stdout}{done.stderr}".replace(str(directory), ".")


def differences(mounted: Results, source: Results) -> Results:
    """Name → (on the mount, on the source), of the results that differ; of lists, of the elements that differ."""
    found: Results = {}
    for name in mounted.keys() | source.keys():
        ours, theirs = mounted.get(name), source.get(name)
        if isinstance(ours, list) and isinstance(theirs, list) and ours != theirs:
            found[name] = [each for each in ours if each not in theirs], [each for each in theirs if each not in ours]
        elif ours != theirs:
            found[name] = ours, theirs
    return found
