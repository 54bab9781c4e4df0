"""The Linux Test Project's tests of system calls on files, its filesystem tests, and fsstress.

One test each line of runtest/. Left out: tests that mount a device of their own, and what is no filesystem's.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.posix.suite import Job, Suite, by_status, described

_CALLS = """
    access chdir chmod chown chroot close copy_file_range creat dup execve execveat faccessat faccessat2 fallocate
    fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fpathconf
    fremovexattr fsetxattr fstat fstatat fstatfs fsync ftruncate futimesat getcwd getdents getxattr inotify
    io_submit io_uring lchown lgetxattr link linkat listxattr llistxattr llseek lremovexattr lseek lstat mincore
    mkdir mkdirat mknod mknodat mmap mprotect mremap msync munmap name_to_handle_at open open_by_handle_at openat
    openat2 pathconf pread preadv preadv2 pwrite pwritev pwritev2 read readahead readdir readlink readlinkat readv
    realpath remap_file_pages removexattr rename renameat renameat2 rmdir sendfile setfsuid setxattr splice stat
    statfs statvfs statx symlink symlinkat sync sync_file_range truncate umask unlink unlinkat utime utimensat
    utimes write writev
"""
"""Directories of testcases/kernel/syscalls."""
_PROGRAMS = """
    fs/fsstress fs/doio fs/ftest fs/inode fs/linktest fs/openfile fs/stream fs/fs_di fs/fs_inod fs/lftest fs/racer
    fs/acl fs/fs_perms io/direct_io io/writetest
"""
"""Directories of testcases/kernel."""
_DEVICE = re.compile(
    r"\.needs_device|\.mount_device|\.all_filesystems|\.format_device|\.needs_rofs|\.needs_overlay|\.needs_hugetlbfs"
    r"|tst_acquire_device"
)
_DIRECTORY = re.compile(r"\.needs_tmpdir|tst_tmpdir|\.needs_checkpoints")
_NOT_OF_A_DIRECTORY = re.compile(
    r"proc01|read_all|sendfile09|quota_remount|isofs|fs_fill|binfmt|squashfs"
    r"|gf(1[2345678]|2\d|30)|rwtest0[1234]|iogen"  # long; what they do is done by the others, fsx and fio
)
_SHORT = re.compile(r"^(rename|open|fs_perms|acl)")
_TCONF = 32
_OPEN_FILES = 1024
"""What a process is usually allowed. Some tests take all of it, and a FUSE filesystem needs one of its own for each."""
_LONG = {"dio30": 900}
"""Seconds. 100 processes that write 12 GB with O_DIRECT, which come in pieces of 128 KiB (hazard 5)."""
_FSSTRESS_SEEDS = 4


def build(sources: Path, place: Path) -> None:
    """What is needed of it, in a copy."""
    copy = place / "sources"
    shutil.copytree(sources, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))

    def make(*arguments: str) -> None:
        with (place / "build.txt").open("a") as output:
            subprocess.run(["make", "-s", *arguments], cwd=copy, check=True, stdout=output, stderr=output)

    make("autotools")
    with (place / "build.txt").open("a") as output:
        configure = ["./configure", f"--prefix={place}", "--without-tirpc"]
        subprocess.run(configure, cwd=copy, check=True, stdout=output, stderr=output)
    calls = (f"testcases/kernel/syscalls/{call}" for call in _CALLS.split())
    programs = (f"testcases/kernel/{program}" for program in _PROGRAMS.split())
    for directory in ("lib", "libs"):
        make("-j2", "-C", directory)
    for directory in (*calls, *programs, "testcases/lib"):
        make("-j2", "-C", directory, "all")
        make("-C", directory, "install")


def _selected(sources: Path) -> Iterator[tuple[str, str]]:
    """(name, command line)"""
    programs = {
        path.stem: path.read_text(errors="replace")
        for call in _CALLS.split()
        for path in (sources / "testcases/kernel/syscalls" / call).glob("**/*.c")
    }
    for list_of_tests in ("syscalls", "fs", "fs_perms_simple", "dio"):
        for line in (sources / "runtest" / list_of_tests).read_text().splitlines():
            name, _, command = line.partition("#")[0].strip().replace("\t", " ").partition(" ")
            if not name or _NOT_OF_A_DIRECTORY.match(name):
                continue
            if list_of_tests == "syscalls":
                program = command.split()[0]
                text = programs.get(program) or programs.get(re.sub(r"_(16|64)$", "", program), "")
                if _DEVICE.search(text) or not _DIRECTORY.search(text):
                    continue
            yield name, re.sub(r"-L \d+", "-L 2", command)


def jobs(place: Path, directory: Path, short: bool) -> Iterator[Job]:
    for name, command in _selected(place / "sources"):
        if short and not _SHORT.match(name):
            continue
        own = directory / name
        environment = {
            "PATH": f"{place}/testcases/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LTPROOT": str(place),
            "TMPDIR": str(own),
            "LTP_COLORIZE_OUTPUT": "0",
            "LTP_RUNTIME_MUL": "0.1",
            "LTP_TIMEOUT_MUL": "2",
        }
        yield Job(
            name,
            ("sh", "-c", f"ulimit -n {_OPEN_FILES}; {command}"),
            by_status(name, _TCONF),
            timeout_s=_LONG.get(name, 150),
            environment=environment,
        )
    for seed in range(1, 2 if short else _FSSTRESS_SEEDS + 1):
        name = f"fsstress-{seed}"
        size = "100" if short else "1000"
        command = (place / "testcases/bin/fsstress", "-d", ".", "-n", size, "-p", "4", "-s", str(seed))
        yield Job(name, command, by_status(name), timeout_s=300, same_beneath=True)


SUITE = Suite(build, jobs, described, sources="ltp")
