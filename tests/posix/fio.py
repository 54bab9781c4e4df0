"""fio: writes blocks with checksums in several ways, and reads all of them back."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.posix.suite import Job, Suite, by_status

FORMS: dict[str, tuple[str, ...]] = {
    "sequential": ("--rw=write", "--ioengine=psync", "--bs=128k"),
    "random": ("--rw=randwrite", "--ioengine=psync", "--bs=4k"),
    "mixed": ("--rw=randrw", "--ioengine=psync", "--bs=4k"),
    "odd-sizes": ("--rw=randwrite", "--ioengine=psync", "--bsrange=1k-64k", "--bs_unaligned"),
    "mmap": ("--rw=randwrite", "--ioengine=mmap", "--bs=4k"),
    "direct": ("--rw=randwrite", "--ioengine=psync", "--bs=4k", "--direct=1"),
    "libaio": ("--rw=randwrite", "--ioengine=libaio", "--iodepth=16", "--bs=4k"),
    "libaio-direct": ("--rw=randwrite", "--ioengine=libaio", "--iodepth=16", "--bs=4k", "--direct=1"),
    "io_uring": ("--rw=randwrite", "--ioengine=io_uring", "--iodepth=16", "--bs=4k"),
    "vectors": ("--rw=randwrite", "--ioengine=pvsync2", "--bs=16k"),
    "splice": ("--rw=write", "--ioengine=splice", "--bs=64k"),
    "synced": ("--rw=randwrite", "--ioengine=psync", "--bs=4k", "--fsync=8", "--number_ios=1000"),
    "many-files": ("--rw=randwrite", "--ioengine=psync", "--bs=4k", "--nrfiles=64", "--openfiles=16"),
    "four-jobs": ("--rw=randwrite", "--ioengine=psync", "--bs=4k", "--numjobs=4"),
}


def build(_: Path, __: Path) -> None:
    pass


def version(_: Path) -> str:
    return subprocess.run(["fio", "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def jobs(_: Path, __: Path, short: bool) -> Iterator[Job]:
    size = "2M" if short else "32M"
    common = (
        "fio", "--name=job", "--directory=.", f"--size={size}", "--fallocate=none", "--verify=crc32c",
        "--verify_fatal=1", "--do_verify=1", "--verify_state_save=0", "--randseed=1", "--group_reporting",
    )  # fmt: skip
    for name, options in FORMS.items():
        yield Job(name, (*common, *options), by_status(name), timeout_s=120)


SUITE = Suite(build, jobs, version)
