"""What all suites have in common: how one is built, what of it is run in a directory, and how results are read."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


Results = dict[str, Outcome]
"""Name of a test → what came of it."""


@dataclass(frozen=True)
class Job:
    """One program that is run in a directory; `read` makes results of its output and its exit status."""

    name: str
    command: tuple[str | Path, ...]
    read: Callable[[str, int], Results]
    timeout_s: int = 60
    environment: Mapping[str, str] = field(default_factory=dict)
    group: str = ""
    directory: str = ""
    """Jobs that name the same one run in it one after the other; without, a job has one of its own."""
    same_beneath: bool = False
    """Afterwards the source must have what the mount shows."""


@dataclass(frozen=True)
class Suite:
    build: Callable[[Path, Path], None]
    """(sources, place): compile and install into `place`; sources are not written to."""
    jobs: Callable[[Path, Path, bool], Iterable[Job]]
    """(place, directory on the filesystem under test, short form): what is run."""
    version: Callable[[Path], str]
    sources: str = ""
    """Name of the sub-directory of $POSIX_SUITES; none for what Debian packages."""
    churned: bool = False
    """Runs once more while the source changes before each group of its jobs."""


class Hung(Exception):
    """A program that was killed does not end: it waits in the kernel."""


def described(sources: Path) -> str:
    """Version of a checkout."""
    done = subprocess.run(
        ["git", "-C", sources, "describe", "--tags", "--always"], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def by_status(name: str, skipped: int | None = None) -> Callable[[str, int], Results]:
    """A program that is one test, and says by its exit status what came of it."""

    def read(_: str, status: int) -> Results:
        outcome = {0: Outcome.PASSED, skipped: Outcome.SKIPPED}.get(status, Outcome.FAILED)
        return {name: outcome}

    return read


def tree(root: Path) -> dict[str, tuple[int, int, int, int, int, int, str | bytes]]:
    """Everything in `root`: attributes, and what it has in it."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        contents: str | bytes = ""
        if path.is_symlink():
            contents = os.readlink(path)
        elif path.is_file():
            contents = path.read_bytes()
        directory = path.is_dir() and not path.is_symlink()
        found[str(path.relative_to(root))] = (
            status.st_mode, status.st_uid, status.st_gid, 0 if directory else status.st_size, status.st_nlink,
            status.st_mtime_ns, contents,
        )  # fmt: skip
    return found


def _ended(process: "subprocess.Popen[str]") -> str:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=20)[0]
    except subprocess.TimeoutExpired as expired:
        raise Hung from expired


def run_job(job: Job, root: Path, beneath: Path | None, outputs: Path) -> Results:
    """`beneath`: where the source has `root`. Output of what fails goes to `outputs`."""
    name = job.directory or job.name.replace("/", "-")
    work = root / name
    work.mkdir(exist_ok=bool(job.directory))
    if not job.directory:
        work.chmod(0o777)  # some tests become another user first
    process = subprocess.Popen(
        job.command, cwd=work, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True, env={**os.environ, **job.environment},
    )  # fmt: skip
    try:
        output = process.communicate(timeout=job.timeout_s)[0]
        results = job.read(output, process.returncode)
    except subprocess.TimeoutExpired:
        output = _ended(process) + f"\nnot done after {job.timeout_s} s\n"
        results = {**job.read(output, 1), job.name: Outcome.FAILED}
    except BaseException:
        _ended(process)
        raise
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has left
    if job.same_beneath and beneath is not None:
        shown, there = tree(work), tree(beneath / name)
        different = [path for path in {*shown, *there} if shown.get(path) != there.get(path)]
        results[f"{job.name}/same-beneath"] = Outcome.FAILED if different else Outcome.PASSED
        output += "".join(f"\n{path}: {shown.get(path)} here, {there.get(path)} beneath"[:500] for path in different)
    if Outcome.FAILED in results.values():
        outputs.mkdir(parents=True, exist_ok=True)
        (outputs / f"{job.name.replace('/', '-')}.txt").write_text(output)
    if not job.directory:
        shutil.rmtree(work, ignore_errors=True)
    return results
