"""The container recipe: its steps on a new machine, and a mount by its entry point."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, make_files, wait_for
from tests.packages.machine import Machine

pytestmark = [pytest.mark.packages, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]
RECIPE = REPOSITORY / "docs/deploy/Containerfile"


def steps() -> list[tuple[str, str]]:
    """(instruction, arguments) in order."""
    lines = [line for line in RECIPE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def test_the_recipe_gives_an_image_that_mounts(machine: Machine, package: Path) -> None:
    entry: list[str] = []
    for instruction, arguments in steps():
        if instruction == "COPY":
            pattern, target = arguments.split()
            for file in REPOSITORY.glob(pattern):
                shutil.copy(file, machine.tree / target.lstrip("/"))
        elif instruction == "RUN":
            machine.run("sh", "-c", arguments)
        elif instruction == "ENTRYPOINT":
            entry = json.loads(arguments)
    assert not (machine.tree / "tmp" / package.name).exists()
    make_files(machine.tree / "srv/files", 50, (1, 60_000))
    (machine.tree / "data").mkdir()
    command = [*entry, "mount", "/srv/files", "/data", "--read-only", "--cache-size", "50M", "--foreground"]
    daemon = machine.start(*command)
    read = ["sh", "-c", "cd /data && find . -type f | sort | xargs sha256sum"]
    wait_for(lambda: machine.run("mountpoint", "/data", check=False).returncode, lambda status: status == 0)
    expected = machine.run("sh", "-c", "cd /srv/files && find . -type f | sort | xargs sha256sum").stdout
    assert machine.run(*read).stdout == expected and expected.count("\n") == 50
    pid = json.loads(machine.run("cachefs", "status", "/data", "--json").stdout)["pid"]
    machine.run("sh", "-c", f"kill {pid}")
    daemon.communicate(timeout=60)
    assert daemon.returncode == 0 and machine.run("mountpoint", "/data", check=False).returncode != 0
