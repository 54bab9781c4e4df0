"""Daemon, fast path, or both are killed again and again under writers: what was acknowledged is at the source."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Mount, contents, make_files, raises_errno, settle, wait_for
from tests.crash.writer import data_of, models, read_whole
from tests.processes import stop

MakeMount = Callable[..., Mount]
WRITERS = 3
BETWEEN_S = 0.4
"""Writers run so long, at most, between two kills."""


def kill_fast_path(m: Mount) -> None:
    m.killed_fastpaths += 1
    os.kill(int(m.status()["fastpath"]["pid"]), signal.SIGKILL)


def kill_daemon(m: Mount) -> None:
    m.kill()
    m.start()


def kill_both(m: Mount) -> None:
    """The daemon first: it must not start another fast path."""
    fast_path = int(m.status()["fastpath"]["pid"])
    stop(m.pid)
    os.kill(fast_path, signal.SIGKILL)
    m.kill()
    m.start()


@pytest.mark.fastpath
def test_a_part_of_a_file_is_followed_by_an_error_where_the_mount_is_gone(mount: MakeMount, source: Path) -> None:
    """What the writers must not take for a short file: the kernel gives the pages that it has."""
    content = data_of(1, 200_000)
    (source / "large").write_bytes(content)
    m = mount(source, "--attr-timeout", "60")  # the size is asked for before each read, and that must not fail
    handle = os.open(m.path / "large", os.O_RDWR)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)  # the kernel reads nothing ahead
    assert os.pread(handle, 53_248, 0) == content[:53_248]
    kill_both(m)
    assert os.pread(handle, 300_000, 0) == content[:53_248]
    raises_errno(errno.ENOTCONN, lambda: read_whole(handle))
    raises_errno(errno.ENOTCONN, lambda: os.close(handle))


@pytest.mark.slow
@pytest.mark.promise("LC-2")
def test_what_was_acknowledged_under_kills_is_at_the_source(
    mount: MakeMount, tmp_path: Path, pytestconfig: pytest.Config, random_seed: int
) -> None:
    kills = pytestconfig.getoption("--kills")
    draw, source = random.Random(random_seed), tmp_path / "source"
    paths = make_files(source, 100, (1, 100_000))
    expected = contents(source)
    settle()
    m = mount(source)
    kinds: list[Callable[[Mount], None]] = [kill_daemon]
    if m.status()["fastpath"]:
        kinds = [kill_fast_path, kill_daemon, kill_both]
    manifests = [tmp_path / f"manifest{number}" for number in range(WRITERS)]
    writers = [start_writer(m, manifest, number) for number, manifest in enumerate(manifests)]
    done: Counter[str] = Counter()
    began = time.monotonic()
    try:
        for number in range(kills):
            kind = kinds[number % len(kinds)]
            done[kind.__name__.replace("_", " ")] += 1
            kind(m)
            until = time.monotonic() + draw.uniform(0, BETWEEN_S)
            while time.monotonic() < until:
                path = draw.choice(paths)
                assert (m.path / path).read_bytes() == expected[path], path
            assert [writer.poll() for writer in writers] == [None] * WRITERS
        wait_for(lambda: [acknowledged(manifest) for manifest in manifests], all)
    finally:
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.close()
        statuses = [writer.wait(60) for writer in writers]
    assert statuses == [0] * WRITERS
    writes = 0
    for where in (m.path, source):
        for manifest in manifests:
            writes += acknowledged(manifest)
            for name, model in models(manifest).items():
                there = where / name
                found = there.read_bytes() if there.exists() else b""
                assert not (wrong := model.differs(found)), f"{there}: {wrong}"
    assert contents(m.path) == contents(source)
    assert m.status()["corrupt_records"] == 0
    kinds_done = ", ".join(f"{kind} {count}" for kind, count in done.items())
    print(f"{kills} kills ({kinds_done}), {writes // 2:,} acknowledged writes at the source, no wrong byte, "
          f"{time.monotonic() - began:.0f} s")  # fmt: skip


def start_writer(m: Mount, manifest: Path, seed: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.crash.writer", m.path, manifest, str(seed)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE)


def acknowledged(manifest: Path) -> int:
    lines = manifest.read_text().splitlines() if manifest.exists() else []
    return sum(json.loads(line)[-1] > 0 for line in lines)
