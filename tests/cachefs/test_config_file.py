"""Configuration files: options by their names, and errors that name the line."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from daemon import config
from daemon.cli import main
from daemon.mount import make_mount_config, mount
from policies.globs import Globs

EVERYTHING = """
source = "/ceph/imagenet"
mountpoint = "/data/imagenet"

read-only = true                # a comment
cache-size = "500G"
cache-dir = "/ssd/cachefs"
retention = "lru"
metadata-limit = 1
metadata-retention = "fifo"
mutable = ["runs/**", "*.log"]
source-timeout = 12.5
fastpath = false
small-file = 65536
"""


def mount_config(*arguments: str) -> config.MountConfig:
    with mount.make_context("mount", list(arguments)) as context:
        return make_mount_config(**context.params)


def check(file: Path) -> Result:
    return CliRunner().invoke(main, ["config", "check", str(file)])


def test_a_file_says_what_options_say(tmp_path: Path) -> None:
    file = tmp_path / "imagenet.toml"
    file.write_text(EVERYTHING)
    assert check(file).output == f"{file}: good\n"
    arguments = (
        "--read-only --cache-size 500G --cache-dir /ssd/cachefs --retention lru --metadata-limit 1 "
        "--metadata-retention fifo --mutable runs/** --mutable *.log --source-timeout 12.5 --no-fastpath "
        "--small-file 65536"
    )
    expected = mount_config("/ceph/imagenet", "/data/imagenet", *arguments.split())
    config.save(expected, tmp_path / "expected")
    config.save(mount_config("--config", str(file)), tmp_path / "made")
    assert (tmp_path / "made").read_text() == (tmp_path / "expected").read_text()


def test_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "imagenet.toml"
    file.write_text(EVERYTHING)
    made = mount_config(
        "/elsewhere", "/mnt", "--config", str(file), "--retention", "fifo", "--fastpath", "--mutable", "x"
    )
    assert (made.source, made.mountpoint) == ("/elsewhere", "/mnt")
    options = made.options
    assert (options.retention, options.fastpath, options.metadata_limit) == ("fifo", True, 1)
    assert options.mutable.patterns == Globs(("x",)).patterns


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('cache-sise = "500G"', "line 4: 'cache-sise' is no option; there are "),
        ('cache_size = "500G"', "line 4: 'cache_size' is no option; there are "),
        ('cache-size = "500 bananas"', "line 4: cache-size: '500 bananas' is not a size"),
        ("cache-size = true", "line 4: cache-size: must be a string or a number"),
        ('source-timeout = "30s"', "line 4: source-timeout: '30s' is not a number of seconds"),
        ('read-only = "yes"', "line 4: read-only: must be true or false"),
        ('mutable = "*.log"', "line 4: mutable: must be a list of strings"),
        ('retention = "last"', "line 4: retention: 'last' is not one of 'no-replacement'"),
        ("metadata-limit = 0", "line 4: metadata-limit: 0 is not in the range x>=1."),
        ('config = "other"', "line 4: 'config' is no option"),
        ("[mount]\nread-only = true", "line 4: 'mount' is no option"),
        ("read-only = ", "(at line 4, column 13)"),
        ('metadata-retention = "lru"', "--metadata-retention needs --metadata-limit"),
        ('prefetch = "all"', "--prefetch all needs --read-only"),
    ],
)
def test_what_makes_no_sense_names_its_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "imagenet.toml"
    file.write_text(f'\nsource = "/ceph"\nmountpoint = "/data"\n{line}\n')
    done = check(file)
    assert done.exit_code == 2 and message in " ".join(done.output.split()) and "Traceback" not in done.output


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    file = tmp_path / "imagenet.toml"
    file.write_text("read-only = true\n")
    done = check(file)
    assert done.exit_code == 2 and "Missing argument 'SOURCE'" in done.output
    done = check(tmp_path / "absent")
    assert done.exit_code == 2 and "does not exist" in done.output
    file.write_bytes(b"\xff")
    assert check(file).exit_code == 2
    with pytest.raises(click.UsageError):
        mount_config("--config", str(file))
