"""docs/deploy/slurm-*.sh, run as slurmd runs them, on a node with a real systemd: no PATH, only variables of Slurm."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, contents, make_files, settle
from tests.machine import Machine, machine
from tests.node import SEPARATE, package

PROLOG, EPILOG = (REPOSITORY / f"docs/deploy/slurm-{name}.sh" for name in ("prolog", "epilog"))
# Quotes, a comment and spaces: what no regular expression for `mountpoint = "…"` finds.
FILE = """
'source' = '{0}/dataset' # mountpoint = "/wrong"
mountpoint    =    '{0}/mnt'
cache-dir = \"\"\"{0}/cache\"\"\"
cache-size = "1G"
read-only = true
"""

pytestmark = [pytest.mark.full_age, pytest.mark.slow, pytest.mark.fastpath]


class SlurmNode:
    def __init__(self, directory: Path, m: Machine) -> None:
        self.machine, self.directory = m, directory
        self.place = directory / "mnt"
        self.place.mkdir()
        installed = m.run("dpkg", "--install", package(directory / "packages", "1.0"))
        assert installed.returncode == 0, installed
        m.run("mkdir", "-p", "/etc/cachefs", "/opt/slurm/bin")
        self.write("/etc/cachefs/set.toml", FILE.format(directory))
        # Commands of Slurm, and logger, for which no daemon runs here. They note how they were called.
        for name, answer in (("scancel", ""), ("squeue", "echo cachefs:set"), ("logger", "")):
            place = f"/opt/slurm/bin/{name}" if name != "logger" else "/usr/local/sbin/logger"
            self.write(place, f'#!/bin/sh\necho {name} "$@" >> {directory}/calls\n{answer}\n', mode="755")
        m.systemctl("daemon-reload")

    def write(self, path: str, text: str, mode: str = "644") -> None:
        script = 'cat > "$1" && chmod "$2" "$1"'
        subprocess.run(self.machine.enter("sh", "-c", script, "write", path, mode), input=text, text=True, check=True)

    def configure(self, mode: str) -> None:
        self.write("/etc/default/cachefs-slurm", f"ON_FAILURE={mode}\n")

    def slurmd(self, script: Path, job: int, comment: str | None = "cachefs:set") -> int:
        """The exit status of a script; `calls` has what it called."""
        (self.directory / "calls").unlink(missing_ok=True)
        variables = [f"SLURM_JOB_ID={job}", "SLURM_JOB_USER=user", "SLURM_JOB_UID=1000"]
        variables += [f"SLURM_JOB_COMMENT={comment}"] if comment is not None else []
        return self.machine.run("env", "-i", *variables, script).returncode

    @property
    def calls(self) -> str:
        path = self.directory / "calls"
        return path.read_text() if path.exists() else ""

    @property
    def is_mounted(self) -> bool:
        return f" {self.place} " in self.machine.run("cat", "/proc/self/mountinfo").stdout


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SlurmNode]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    make_files(tmp_path / "dataset", 50)
    settle()
    with machine(tmp_path, SEPARATE) as m:
        yield SlurmNode(tmp_path, m)


def test_the_dataset_is_mounted_from_the_first_to_the_last_job(node: SlurmNode) -> None:
    assert node.machine.run("env", "-i", "/bin/bash", "-c", "command -v cachefs").returncode == 1  # outside PATH
    for job, comment in ((1, "cachefs:set"), (2, "night run, cachefs:set"), (3, None)):  # None: squeue is asked
        assert node.slurmd(PROLOG, job, comment) == 0
        assert "logger" not in node.calls, node.calls
        assert node.is_mounted
    assert "squeue --noheader --jobs 3 --format %k" in node.calls
    check = node.machine.run("/opt/cachefs/bin/cachefs", "warmup", node.place)  # joins what is in the background
    assert check.returncode == 0 and "50" in check.stdout, check
    assert contents(Path(f"/proc/{node.machine.pid}/root{node.place}")) == contents(node.directory / "dataset")
    for job in (2, 1, 1):
        assert node.slurmd(EPILOG, job) == 0 and node.is_mounted
    assert node.slurmd(EPILOG, 3) == 0 and not node.is_mounted
    assert node.slurmd(PROLOG, 4, "no dataset") == 0 and not node.is_mounted and node.calls == ""


def test_a_prolog_does_not_overlap_the_epilog_of_the_last_job(node: SlurmNode) -> None:
    """The epilog has found that no job is left, and unmounts: the next job must not start on that mount."""
    for number in range(10, 16):
        assert node.slurmd(PROLOG, number) == 0
        variables = ["env", "-i", f"SLURM_JOB_ID={number}"]
        epilog = subprocess.Popen(node.machine.enter(*variables, EPILOG))
        assert node.slurmd(PROLOG, number + 100) == 0
        assert epilog.wait(60) == 0
        assert node.is_mounted
        assert node.slurmd(EPILOG, number + 100) == 0 and not node.is_mounted


@pytest.mark.parametrize("mode", ["continue", "cancel", "drain"])
def test_a_dataset_that_cannot_be_mounted(node: SlurmNode, mode: str) -> None:
    node.configure(mode)
    node.write("/etc/cachefs/set.toml", FILE.format(node.directory).replace("dataset", "missing"))
    assert node.slurmd(PROLOG, 7) == (1 if mode == "drain" else 0)
    assert "logger -t cachefs job 7: cachefs@set does not start" in node.calls
    assert ("scancel 7" in node.calls) == (mode == "cancel")
    node.machine.systemctl("stop", "cachefs@set")
    # A name that does not exist is a mistake of the user, which never drains a node.
    for comment, file in (("cachefs:imagenett", "imagenett.toml"), ("cachefs:../cachefs/set", "...toml")):
        assert node.slurmd(PROLOG, 8, comment) == 0
        assert f"job 8: there is no /etc/cachefs/{file}" in node.calls
        assert ("scancel 8" in node.calls) == (mode != "continue")
