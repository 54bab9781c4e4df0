"""pjdfstest, unmodified, on mounts of cachefs next to the disk that is their source.

    PJDFSTEST=DIRECTORY python -m tests.posix [--no-fastpath] [GROUP …]

DIRECTORY holds the sources (github.com/pjd/pjdfstest); they are compiled into a temporary directory. GROUP: names of
directories of its tests, such as `rename`; all without. Fails if a sub-test fails on a mount and not on the disk, or
does not run there. Needs root, a compiler and /dev/fuse.

Some of its tests run only on filesystems of certain types, for which they ask df. It gives the type of the disk for
each mount.

Each cache mode runs twice: on a fresh mount, and on one whose source was changed directly before each group:
directories that the mount knows are renamed, others take their names, and inode numbers are used again.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MODES: dict[str, tuple[str, ...]] = {"none": ("--cache", "none"), "full": (), "mutable": ("--mutable", "**")}
_HAVE = (
    "SYS_SYSMACROS_H FACCESSAT FCHMODAT FCHOWNAT FSTATAT LINKAT MKDIRAT MKFIFOAT MKNODAT OPENAT POSIX_FALLOCATE "
    "READLINKAT RENAMEAT SYMLINKAT UNLINKAT UTIMENSAT STRUCT_STAT_ST_ATIM STRUCT_STAT_ST_CTIM STRUCT_STAT_ST_MTIM"
)
"""What its configure script finds on Linux with glibc."""
_TIMEOUT_S = 600
_CHURNED = 20

Failures = dict[str, set[int]]
"""Test file → numbers of the sub-tests that fail."""


def build(sources: Path, place: Path) -> None:
    """Its program and its scripts, in `place`."""
    (place / "config.h").write_text("".join(f"#define HAVE_{name} 1\n" for name in _HAVE.split()))
    command = ["cc", "-O1", "-w", "-D_GNU_SOURCE", f"-I{place}", sources / "pjdfstest.c", "-o", place / "pjdfstest"]
    subprocess.run(command, check=True)
    shutil.copytree(sources / "tests", place / "tests")
    (place / "bin").mkdir()
    df = place / "bin/df"
    df.write_text(f"#!/bin/sh\nexec {shutil.which('df')} -PT {shlex.quote(str(place))}\n")
    df.chmod(0o755)


def run(place: Path, root: Path, groups: list[str], before_group: Callable[[], None]) -> tuple[int, Failures]:
    """(sub-tests, failures) in a new directory of `root`."""
    total, failures = 0, Failures()
    work = root / "work"
    work.mkdir()
    environment = {**os.environ, "PATH": f"{place}/bin:{os.environ['PATH']}"}
    for group in sorted(path for path in (place / "tests").iterdir() if path.is_dir()):
        if groups and group.name not in groups:
            continue
        before_group()
        for test in sorted(group.glob("*.t")):
            done = subprocess.run(
                ["sh", test], cwd=work, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                timeout=_TIMEOUT_S, check=False, env=environment,
            )  # fmt: skip
            results = re.findall(r"^(not )?ok (\d+)(.*# TODO)?", done.stdout, re.MULTILINE)
            total += len(results)
            failed = {int(number) for bad, number, todo in results if bad and not todo}
            plan = re.search(r"^1\.\.(\d+)", done.stdout, re.MULTILINE)
            if plan and len(results) < int(plan[1]):
                failed |= set(range(len(results) + 1, int(plan[1]) + 1))  # it ended before them
            if failed:
                failures[f"{group.name}/{test.stem}"] = failed
    return total, failures


def churn(source: Path, mounted: Path) -> None:
    """Change at the source what the mount knows, so that names and inode numbers lead elsewhere."""
    old, new = source / "churn-old", source / "churn"
    shutil.rmtree(old, ignore_errors=True)
    for directory in (source / "churn", source / "churn-new"):
        for number in range(_CHURNED):
            (directory / f"d{number}").mkdir(parents=True, exist_ok=True)
            (directory / f"d{number}/file").write_bytes(os.urandom(100))
    for _ in mounted.joinpath("churn").rglob("*"):
        pass
    Path("/proc/sys/vm/drop_caches").write_text("2")
    new.rename(old)
    (source / "churn-new").rename(new)
    shutil.rmtree(old)  # the tests get its inode numbers


def on_a_mount(
    place: Path, base: Path, name: str, arguments: list[str], groups: list[str], *, churned: bool
) -> tuple[int, Failures]:
    source, mounted = base / f"{name}-source", base / f"{name}-mount"
    source.mkdir()
    mounted.mkdir()
    cachefs = [sys.executable, "-m", "daemon"]
    subprocess.run(
        [*cachefs, "mount", source, mounted, "--cache-dir", base / f"{name}-cache", "--cache-size", "100M", *arguments],
        check=True,
    )
    try:
        total, failures = run(place, mounted, groups, (lambda: churn(source, mounted)) if churned else lambda: None)
    finally:
        subprocess.run([*cachefs, "umount", mounted], check=False)
    print(f"{name}: {total} sub-tests, {sum(map(len, failures.values()))} failures", flush=True)
    return total, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-fastpath", action="store_true")
    parser.add_argument("--mode", choices=MODES, action="append", help="only this one; may be given more than once")
    parser.add_argument("groups", nargs="*")
    arguments = parser.parse_args()
    if not os.environ.get("PJDFSTEST"):
        parser.error("PJDFSTEST must name the directory with its sources")
    without = ["--no-fastpath"] if arguments.no_fastpath else []
    worse = False
    base = Path(tempfile.mkdtemp(prefix="cachefs-posix-"))
    base.chmod(0o755)
    try:
        place = base / "pjdfstest"
        place.mkdir()
        build(Path(os.environ["PJDFSTEST"]), place)
        disk = base / "disk"
        disk.mkdir()
        total, expected = run(place, disk, arguments.groups, lambda: None)
        print(f"disk: {total} sub-tests, {sum(map(len, expected.values()))} failures", flush=True)
        for mode in arguments.mode or MODES:
            for churned in (False, True):
                name = f"{mode}-changed" if churned else mode
                ran, found = on_a_mount(place, base, name, [*MODES[mode], *without], arguments.groups, churned=churned)
                worse |= ran != total
                for test, failed in found.items():
                    if more := sorted(failed - expected.get(test, set())):
                        worse = True
                        print(f"  {test} {more}", flush=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
