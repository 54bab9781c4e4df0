"""Other projects' filesystem suites, unmodified, on mounts of cachefs next to the disk that is their source.

    POSIX_SUITES=DIRECTORY python -m tests.posix [SUITE[/TEST] …] [--place PLACE] [--short]

DIRECTORY has the sources of each in a sub-directory of its own: pjdfstest, xfstests (for fsx), ltp, libfuse. stress-ng
and fio are packages: `scripts/system-packages --posix`. Sources are compiled below build/posix, once. TEST may be a
pattern.

Runs each suite on the disk, on bindfs (another FUSE filesystem) and on mounts of each mode, with the fast path and
without (-python). Fails if a test that the disk passes fails on a mount, or does not run there, unless
tests/posix/differences.py says why. What tests print goes to build/posix/failed. Needs root, a compiler and /dev/fuse.

Where a suite says so a mount runs twice: fresh, and with a source that is changed directly before each group of tests
(-changed): directories that the mount knows are renamed, others take their names, and inode numbers are used again.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

from tests.posix import fio, fsx, libfuse, ltp, pjdfstest, stress_ng
from tests.posix.differences import explained
from tests.posix.places import CHANGED, MODES, PYTHON, opened
from tests.posix.suite import Hung, Outcome, Results, Suite, run_job

SUITES: dict[str, Suite] = {
    "pjdfstest": pjdfstest.SUITE,
    "fsx": fsx.SUITE,
    "ltp": ltp.SUITE,
    "libfuse": libfuse.SUITE,
    "stress-ng": stress_ng.SUITE,
    "fio": fio.SUITE,
}
MOUNTS = (*MODES, *(mode + PYTHON for mode in MODES))
_BUILD = Path("build/posix")
_CHURNED = 20


def built(name: str, suite: Suite, place: Path) -> str:
    """Its version; built already, or built now."""
    stamp = place / ".built"
    sources = Path(os.environ.get("POSIX_SUITES", ""), suite.sources) if suite.sources else Path()
    if suite.sources and not sources.is_dir():
        sys.exit(f"{name}: $POSIX_SUITES must name a directory that has its sources in {suite.sources}")
    version = suite.version(sources)
    if not stamp.exists() or stamp.read_text() != version:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        suite.build(sources.resolve(), place.resolve())
        stamp.write_text(version)
    return version


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


def run(suite: Suite, place: Path, at: str, base: Path, wanted: Callable[[str], bool], short: bool) -> Results:
    """Everything of it that is wanted, in one place."""
    results = Results()
    group = None
    with opened(at, base) as there:
        for job in suite.jobs(place.resolve(), there.root, short):
            if not wanted(job.name):
                continue
            if at.endswith(CHANGED) and there.beneath and job.group != group:
                group = job.group
                churn(there.beneath, there.root)
            try:
                results |= run_job(job, there.root, there.beneath, _BUILD / "failed" / at / place.name)
            except Hung:
                print(f"{at}: {job.name} hangs", flush=True)
                results[job.name] = Outcome.FAILED
                there.abort()
                break
    return results


def compared(name: str, at: str, expected: Results, found: Results) -> tuple[list[str], list[str]]:
    """What is different from the disk: (explained, not explained)."""
    known, worse = [], []
    for test, outcome in expected.items():
        if outcome is Outcome.PASSED and found.get(test) is not Outcome.PASSED:
            full = f"{name}/{test}"
            (known if explained(full, at) else worse).append(f"{full}: {found.get(test, 'not run')}")
    return known, worse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a few minutes of everything")
    places = ["bindfs", *MOUNTS, *(mount + CHANGED for mount in MOUNTS)]
    parser.add_argument("--place", choices=places, action="append", help="only there; may be given more than once")
    parser.add_argument("tests", nargs="*", help=f"SUITE or SUITE/TEST, of {', '.join(SUITES)}")
    arguments = parser.parse_args()
    patterns = [test if "/" in test else f"{test}/*" for test in arguments.tests or SUITES]
    if unknown := {pattern.partition("/")[0] for pattern in patterns} - set(SUITES):
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], stdout=subprocess.PIPE, text=True, check=True)
    print(f"cachefs {commit.stdout.strip()}", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(1))  # unmounts
    base = Path(tempfile.mkdtemp(prefix="cachefs-posix-"))
    base.chmod(0o755)
    all_worse: list[str] = []
    try:
        for name, suite in SUITES.items():
            if not any(pattern.startswith(f"{name}/") for pattern in patterns):
                continue
            version = built(name, suite, _BUILD / name)

            def wanted(job: str, name: str = name) -> bool:
                return any(fnmatchcase(f"{name}/{job}", pattern) for pattern in patterns)

            expected = Results()
            changed = [mount + CHANGED for mount in MOUNTS] if suite.churned else []
            for at in ("disk", *(arguments.place or ("bindfs", *MOUNTS, *changed))):
                if at.endswith(CHANGED) and not suite.churned:
                    continue
                there = base / name / at
                there.mkdir(parents=True)
                found = run(suite, _BUILD / name, at, there, wanted, arguments.short)
                shutil.rmtree(there, ignore_errors=True)
                if at == "disk":
                    expected = found
                counts = Counter(found.values())
                known, worse = compared(name, at, expected, found)
                print(
                    f"| {name} {version} | {at} | "
                    + " | ".join(str(counts[outcome]) for outcome in Outcome)
                    + f" | {len(known)} |",
                    flush=True,
                )
                for line in worse:
                    print(f"  {line}", flush=True)
                if at != "bindfs":
                    all_worse += worse
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return int(bool(all_worse))


if __name__ == "__main__":
    sys.exit(main())
