"""What a new user has: help with examples, and completion."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from daemon.cli.main import main
from tests.conftest import CLI, REPOSITORY


def commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, group
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


ALL = dict(commands(main))


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_command_has_an_example_that_is_valid(path: tuple[str, ...]) -> None:
    said = CliRunner().invoke(main, [*path, "--help"]).output
    assert "Example" in said
    examples = re.findall(r"^ +cachefs ([^|>#&\n]+)", said.split("Example", 1)[1].split("Options:")[0], re.MULTILINE)
    assert examples or path == ()
    for example in examples:
        words = example.replace("'", "").split()
        found: click.Command = main
        while isinstance(found, click.Group) and words and words[0] in found.commands:
            found = found.commands[words.pop(0)]
        assert not isinstance(found, click.Group), example
        known = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, example


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    environment = os.environ | {"_CACHEFS_COMPLETE": f"{shell}_source"}
    script = 'from daemon.cli.main import main; main(prog_name="cachefs")'
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert "cachefs" in done.stdout and "_CACHEFS_COMPLETE" in done.stdout
    asked = os.environ | {"_CACHEFS_COMPLETE": f"{shell}_complete", "COMP_WORDS": "cachefs war", "COMP_CWORD": "1"}
    if shell == "fish":
        asked |= {"COMP_WORDS": "cachefs war", "COMP_CWORD": "war"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=asked, cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert "warmup" in done.stdout


def test_what_is_no_command() -> None:
    done = subprocess.run([*CLI, "wamrup"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "No such command 'wamrup'" in done.stderr and "Traceback" not in done.stderr


def test_a_minimum_age_is_for_tests_and_never_longer_than_the_rule() -> None:
    assert "minimum-age" not in CliRunner().invoke(main, ["mount", "--help"]).output
    for value in ("0", "-1", "2.5", "inf", "nan", "soon"):
        refused = CliRunner().invoke(main, ["mount", "/nowhere", "/place", "--minimum-age", value])
        assert refused.exit_code == 2 and "--minimum-age" in refused.output, value
