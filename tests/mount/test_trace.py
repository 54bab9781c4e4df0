"""`cachefs trace record` on a real mount, and what the simulator makes of it."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import pytest

from cachefs.tools.trace import read_trace
from tests.conftest import CLI, REPOSITORY, Mount, cachefs

MakeMount = Callable[..., Mount]


@contextmanager
def recording(m: Mount, output: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [*CLI, "trace", "record", str(m.path), "--output", str(output), *arguments]
    with subprocess.Popen(
        command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"recording {m.path}\n"
        try:
            yield process
        finally:
            process.kill()


def test_what_a_job_opens_is_recorded_and_simulated(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    m = mount(source, "--read-only")
    paths = sorted(path for path in m.path.rglob("f*") if path.is_file())
    passes = [paths, paths[::-1], paths]  # from the second time on the page cache answers
    with recording(m, tmp_path / "job.trace") as process:
        for each in passes:  # by different processes: the kernel makes one of what one opens twice in a short time
            subprocess.run(["cat", *each], stdout=subprocess.DEVNULL, check=True)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=20)
        assert process.returncode == 0
    order = [path for each in passes for path in each]
    assert said == f"{len(order)} files opened, in {tmp_path / 'job.trace'}\n"
    trace, whole = read_trace(tmp_path / "job.trace")
    assert whole
    assert [trace.sizes[number] for number in trace.accesses] == [path.stat().st_size for path in order]
    parts = [trace.parts[number] for number in trace.accesses]
    assert len(set(parts)) == 4
    rows = cachefs("simulate", tmp_path / "job.trace", "--cache", "1.0", "--retention", "lru", "--json").stdout
    assert json.loads(rows)["hits"] == 2 * len(paths)


def test_it_ends_with_the_mount(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    m = mount(source, "--read-only")
    with recording(m, tmp_path / "job.trace") as process:
        (m.path / "d0/f00000").read_bytes()
        m.umount()
        assert process.wait(20) == 0
    assert len(read_trace(tmp_path / "job.trace")[0].accesses) == 1


@pytest.mark.promise("LC-16")
def test_what_the_recorder_has_not_read_yet_does_not_keep_the_mount(
    mount: MakeMount, source: Path, tmp_path: Path
) -> None:
    """Each event that waits for it holds a file open."""
    m = mount(source, "--read-only")
    with recording(m, tmp_path / "job.trace") as process:
        process.send_signal(signal.SIGSTOP)
        (m.path / "d0/f00000").read_bytes()
        resume = Timer(0.3, process.send_signal, [signal.SIGCONT])
        resume.start()
        m.umount()
        resume.join()
        assert process.wait(20) == 0


def test_what_cannot_be_recorded_is_one_clear_line(mount: MakeMount, source: Path, tmp_path: Path) -> None:
    done = cachefs("trace", "record", tmp_path, check=False)
    assert done.returncode == 1 and done.stderr == f"cachefs: no cachefs is mounted on {tmp_path}\n"
    m = mount(source)
    done = cachefs("trace", "record", m.path, "--output", tmp_path / "absent" / "t", check=False)
    assert done.returncode == 1 and "cannot write" in done.stderr and "Traceback" not in done.stderr
    assert os.path.ismount(m.path)
