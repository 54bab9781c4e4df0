"""Each command of README.md is run: the blocks in their order, then the commands within the text.

On a machine with a real systemd, which shares this one's files but for the directories that the README writes to.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, make_files, settle
from tests.machine import machine

README = REPOSITORY / "README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
SPAN = re.compile(r"`([^`\n]+)`")
COMMANDS = {"cachefs", "systemctl", "ln", "eval", "make", "python", "python3", "/opt/cachefs/bin/pip", "apt-get"}
"""A span of code that begins with one of these is a command, and so is one that begins with an assignment."""
ELSEWHERE = {
    "make demo": "tests/test_readme.py::test_the_demo_in_the_readme_was_printed_by_the_demo",
    "DEMO_SOURCE=DIR make demo": "tests/test_readme.py::test_the_demo_in_the_readme_was_printed_by_the_demo",
    "make test": ".ci/run",
    "make check": ".ci/run",
    "make deb": "tests/packages/test_debian.py",
    "make bench": "benchmarks/all.py",
    "python -m benchmarks.against": "benchmarks/against.py",
}
"""Commands that run at another place, or for hours: the file, or the test, that has or is them."""
PLACEHOLDERS = {"PATH": "/data/imagenet/train", "FILE": "/data/project/runs/log", "MOUNTPOINT": "/data/project"}
MEANT = {
    "cachefs simulate": "cachefs simulate --help",
    "systemctl restart": "systemctl restart cachefs@imagenet",
    "systemctl reload": "systemctl reload cachefs@imagenet",
    "cachefs restart /data/imagenet": "cachefs restart /data/project",  # not one that systemd starts
    "cachefs umount --lazy": "cachefs umount --lazy --help",
    "cachefs evict": "cachefs evict /data/imagenet/train",
    "cachefs trace record": "timeout 3 cachefs trace record --help",
    "cachefs verify": "cachefs verify /data/imagenet",
    "cachefs doctor": "cachefs doctor /data/imagenet || [ $? = 1 ]",
    "_CACHEFS_COMPLETE=fish_source cachefs | source": "_CACHEFS_COMPLETE=fish_source cachefs | grep complete",
    "cachefs status /data/imagenet --watch": "timeout 3 cachefs status /data/imagenet --watch || [ $? = 124 ]",
}
"""A command that is named without its arguments, does not end, or finds advice for this machine (exit status 1)."""
OWN = ("/ceph", "/data")
"""Directories that are empty in the machine, and, if they do not exist here, made for it."""
CHANGED = ("/etc", "/usr/sbin", "/opt", "/var")
"""Directories that the README's commands change."""


def commands(text: str) -> Iterator[str]:
    """Those within the text."""
    for span in SPAN.findall(BLOCK.sub("", text)):
        first, *arguments = span.split()
        if (first in COMMANDS and arguments) or re.match(r"[A-Z_]+=\S+ \w", span):
            yield span


def meant(command: str) -> str:
    """A command that can be run. A placeholder is a word of its own."""
    command = MEANT.get(command, command)
    return " ".join(PLACEHOLDERS.get(word, word) for word in command.split(" "))


def runs_elsewhere(command: str) -> bool:
    return command.split("#")[0].strip() in ELSEWHERE


def script(block: str) -> str:
    """What is run of a block."""
    lines = (line for line in block.splitlines() if not runs_elsewhere(line))
    return "\n".join(MEANT.get(line.split("   ")[0], line) for line in lines)


def test_commands_are_found() -> None:
    text = "Run `cachefs ps`, or `A=b make x`; `--json` is `an option`.\n```sh\ncachefs ls\n```\n"
    assert list(commands(text)) == ["cachefs ps", "A=b make x"]
    assert script("make demo   # long\ncachefs ps\nmake test\n") == "cachefs ps"


@pytest.mark.parametrize("place", sorted(set(ELSEWHERE.values())))
def test_what_runs_elsewhere_exists(place: str) -> None:
    path, _, name = place.partition("::")
    assert (REPOSITORY / path).exists() and f"def {name}(" in (REPOSITORY / path).read_text() + "def ("


@pytest.mark.full_age
def test_the_demo_in_the_readme_was_printed_by_the_demo(tmp_path: Path) -> None:
    """The figures are of another machine."""
    make_files(tmp_path / "tree", 40)
    settle()
    environment = {**os.environ, "DEMO_SOURCE": str(tmp_path / "tree"), "DEMO_FILES": "40", "COLUMNS": "100"}
    command = [sys.executable, "-m", "benchmarks.demo"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = README.read_text().split("<!-- demo -->\n```\n")[1].split("```")[0]
    headers = [" ".join(line for line in each.splitlines() if "┃" in line) for each in (shown, done.stdout)]
    assert set(headers[0].split()) == set(headers[1].split()) and len(headers[0].split()) > 10
    assert done.stdout.count("100.0 %") == 2


TRAIN = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--data")
count = 0
for directory, _, files in os.walk(parser.parse_args().data):
    for name in files:
        with open(os.path.join(directory, name), "rb") as file:
            count += len(file.read())
assert count
"""
PYTHON = """
import os
paths = [os.path.join("/data/imagenet/train", name) for name in os.listdir("/data/imagenet/train")]
sampler = range(len(paths))
"""
STEPS = """
set -e
mount -t tmpfs tmpfs /ceph
mount -t tmpfs tmpfs /data
cp -a {source}/. /ceph/
mkdir /data/project
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of this checkout, without what git ignores, and a job."""
    place = tmp_path / "repository"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, place / name)
    (place / "train.py").write_text(TRAIN)
    return place


@pytest.mark.full_age
@pytest.mark.fastpath
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_each_command_of_the_readme(tmp_path: Path, repository: Path) -> None:
    source = tmp_path / "source"
    make_files(source / "imagenet/train", 60, directories=1)
    make_files(source / "project/runs", 3, directories=1)
    (source / "project/runs/log").write_bytes(b"one")
    settle()
    made = [place for place in OWN if not os.path.exists(place)]
    for place in made:
        os.mkdir(place)
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "python").symlink_to(shutil.which("python3") or "/usr/bin/python3")
    text = README.read_text()
    try:
        with machine(tmp_path, CHANGED) as m:

            def run(commands: str) -> str:
                environment = f"export HOME={tmp_path} PATH={bin_}:$PATH:/opt/cachefs/bin\n"
                command = m.enter("bash", "-euxc", f"cd {repository}\n{environment}{commands}")
                done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
                assert done.returncode == 0, (commands, done.stdout, done.stderr)
                return done.stdout

            run(STEPS.format(source=source))
            for language, block in BLOCK.findall(text):
                if language == "sh":
                    run(script(block))
                elif language == "python":
                    run(f"/opt/cachefs/bin/python - <<'.'\n{PYTHON}{block}.\n")
            assert "cachefs@imagenet" in m.systemctl("list-units", "--state=active")
            run("cachefs mount /ceph/project /data/project && cat /data/project/runs/log")
            for command in commands(text):
                if not runs_elsewhere(command):
                    run(meant(command))
            fstab = next(span for span in SPAN.findall(text) if " fuse.cachefs " in span)
            run(f"systemctl stop cachefs@imagenet\necho '{fstab}' >> /etc/fstab\nmount /data/imagenet")
            run("ls /data/imagenet/train")
            run("cachefs umount /data/imagenet\ncachefs umount /data/project")
    finally:
        for place in made:
            os.rmdir(place)
