"""Configuration files: options by their names, and errors that name the line."""

from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from cachefs.options import CacheLevel, Revalidate
from daemon.cli.main import main
from daemon.cli.mount import make_mount_config, mount
from daemon.config import config, config_file
from daemon.config.settings import as_toml, reread
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
        return make_mount_config(context.params)


def check(file: Path) -> Result:
    return CliRunner().invoke(main, ["config", "check", str(file)])


def test_a_file_says_what_options_say(tmp_path: Path) -> None:
    file = tmp_path / "imagenet.toml"
    file.write_text(EVERYTHING)
    arguments = (
        "--read-only --cache-size 500G --cache-dir /ssd/cachefs --retention lru --metadata-limit 1 "
        "--metadata-retention fifo --mutable runs/** --mutable *.log --source-timeout 12.5 --no-fastpath "
        "--small-file 65536"
    )
    expected = mount_config("/ceph/imagenet", "/data/imagenet", *arguments.split())
    made = mount_config("--config", str(file))
    assert {name: s.value for name, s in made.settings.items()} == {n: s.value for n, s in expected.settings.items()}
    origins = {"source": 2, "read-only": 5, "cache-size": 6, "mutable": 11, "small-file": 14}
    assert {name: made.settings[name].origin for name in origins} == {
        name: f"{file}, line {line}" for name, line in origins.items()
    }
    assert {expected.settings[name].origin for name in origins} == {"command line"}
    assert made.settings["revalidate"] == config.Setting("auto", "default")
    config.save(replace(expected, settings={}), tmp_path / "expected")
    config.save(replace(made, settings={}, config_file=None), tmp_path / "made")
    assert (tmp_path / "made").read_text() == (tmp_path / "expected").read_text()
    config.save(made, tmp_path / "made")
    again = config.load(tmp_path / "made")
    assert again.settings == made.settings and again.config_file == file


def test_what_is_shown_is_a_file_that_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "imagenet.toml"
    file.write_text(EVERYTHING + 'attr-timeout = inf\nprefetch = "none"\n')
    made = mount_config("--config", str(file), "--fetch-threads", "7", "--mutable", 'it"s\\n*')
    (tmp_path / "shown.toml").write_text("\n".join(as_toml(made.settings)))
    again = mount_config("--config", str(tmp_path / "shown.toml"))
    assert {n: s.value for n, s in again.settings.items()} == {n: s.value for n, s in made.settings.items()}
    assert replace(again, settings={}, config_file=None, options=None) == replace(
        made, settings={}, config_file=None, options=None
    )


def test_profiles(tmp_path: Path) -> None:
    file = tmp_path / "model.toml"
    file.write_text('profile = "inference"\nrevalidate = "lazy"\n')
    made = mount_config("/ceph", "/data", "--config", str(file))
    assert made.options.read_only and made.options.revalidate is Revalidate.LAZY
    assert made.settings["read-only"].origin == "profile inference"
    assert made.settings["revalidate"].origin == f"{file}, line 2"
    assert not mount_config("/ceph", "/data", "--config", str(file), "--no-read-only").options.read_only
    made = mount_config("/ceph", "/data", "--config", str(file), "--profile", "changing", "--read-only")
    assert made.options.cache is CacheLevel.NONE and made.options.attr_timeout_s == 1.0
    assert not made.options.pins_everything
    plain, training = mount_config("/ceph", "/data"), mount_config("/ceph", "/data", "--profile", "training")
    assert {n: s.value for n, s in plain.settings.items()} == {n: s.value for n, s in training.settings.items()}
    done = CliRunner().invoke(main, ["mount", "/ceph", "/data", "--profile", "fast"])
    assert done.exit_code == 2 and "'training', 'workspace', 'inference', 'changing'" in done.output


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 500 << 30, 3 << 19, (5 << 40) + 1])
def test_sizes_are_shown_as_they_are_read(size: int) -> None:
    assert config.parse_size(config.format_size(size)) == size


def test_what_may_change_while_mounted(tmp_path: Path) -> None:
    file = tmp_path / "imagenet.toml"
    file.write_text(EVERYTHING)
    running = mount_config("--config", str(file), "--source-timeout", "3")
    file.write_text(EVERYTHING.replace("500G", "20G").replace("12.5", "40").replace('"lru"', '"fifo"'))
    now, waiting = reread(mount, running)
    assert waiting == ["retention"]
    assert now.cache_size_bytes == 20 << 30 and now.settings["cache-size"].value == "20G"
    assert now.options == running.options and now.settings["retention"] == running.settings["retention"]
    file.write_text(EVERYTHING.replace("500G", "20 bananas"))
    with pytest.raises(click.UsageError, match="line 6: cache-size"):
        reread(mount, running)
    without = mount_config("/ceph", "/data")
    assert reread(mount, without) == (without, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "sets no source"),
        ("# nothing\n", "sets no source"),
        ('mountpoint = "/data"\ncache-size = "1G"\n', "sets no source"),
        ('source = "/ceph"\ncache-size = "1G"\n', "sets no mountpoint"),
        (EVERYTHING.replace("12.5", "0"), "line 12: source-timeout: must be more than 0"),
    ],
)
def test_a_file_that_could_not_be_mounted_is_not_taken_up(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "imagenet.toml"
    file.write_text(EVERYTHING)
    running = mount_config("--config", str(file))
    file.write_text(text)
    with pytest.raises(click.UsageError) as caught:
        reread(mount, running)
    assert message in caught.value.format_message()


def test_places_on_the_command_line_need_not_be_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "imagenet.toml"
    file.write_text('cache-size = "1G"\n')
    running = mount_config("/ceph", "/data", "--config", str(file))
    file.write_text('cache-size = "2G"\n')
    now, waiting = reread(mount, running)
    assert (now.cache_size_bytes, waiting) == (2 << 30, [])
    file.write_text("# an editor is about to write it\n")
    with pytest.raises(click.UsageError, match="contains no options"):
        reread(mount, running)


def test_what_only_a_new_mount_takes_up_is_said(tmp_path: Path) -> None:
    file = tmp_path / "imagenet.toml"
    (tmp_path / "graph").write_text('{"partition": "a", "depends": []}\n')
    graph = f'\nprefetch-graph = "{tmp_path}/graph"\n'
    file.write_text(EVERYTHING.replace('retention = "lru"\n', "", 1) + graph)
    running = mount_config("--config", str(file), "--fetch-threads", "7")
    assert reread(mount, running) == (running, [])
    changed = EVERYTHING.replace("/ceph/imagenet", "/ceph/other").replace("read-only = true", "read-only = false")
    file.write_text(changed.replace('retention = "lru"\n', "", 1) + "fetch-threads = 9\nattr-timeout = 5\n")
    now, waiting = reread(mount, running)
    assert sorted(waiting) == ["attr-timeout", "prefetch-graph", "read-only", "source"]
    assert now == running


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
        ('cache-sise = "500G"', "line 4: 'cache-sise' is not an option: did you mean 'cache-size'?"),
        ('cache_size = "500G"', "line 4: 'cache_size' is not an option: did you mean 'cache-size'?"),
        ('bananas = "500G"', "line 4: 'bananas' is not an option; the options are "),
        ("cache-size = 0", "line 4: cache-size: a cache needs room"),
        ('cache-size = "500 bananas"', "line 4: cache-size: '500 bananas' is not a size"),
        ("cache-size = true", "line 4: cache-size: must be a string or a number"),
        ("source-timeout = 0", "line 4: source-timeout: must be more than 0"),
        ("source-timeout = 1e30", "line 4: source-timeout: must not be more than 1,000,000,000"),
        (
            'cache-size = "99999999999999999999G"',
            "line 4: cache-size: '99999999999999999999G' is larger than any disk",
        ),
        ("simulate-latency = nan", "line 4: simulate-latency: nan is not a time"),
        ("simulate-latency = -1", "line 4: simulate-latency: -1 is not a time"),
        ('metrics = "65536"', "line 4: metrics: '65536' is neither a socket (/run/x.sock), nor a port"),
        ('source-timeout = "30 bananas"', "line 4: source-timeout: '30 bananas' is not a time"),
        ('read-only = "yes"', "line 4: read-only: must be true or false"),
        ('mutable = "*.log"', "line 4: mutable: must be a list of strings"),
        ('retention = "last"', "line 4: retention: 'last' is not one of 'no-replacement'"),
        ("metadata-limit = 0", "line 4: metadata-limit: 0 is not in the range x>=1."),
        ('config = "other"', "line 4: 'config' is not an option"),
        ("[mount]\nread-only = true", "line 4: 'mount' is not an option"),
        ("read-only = ", "(at line 4, column 13)"),
        ("mutable = " + "[" * 10_000, "imagenet.toml: nested too deeply"),
        ("source-timeout = " + "9" * 5000, "imagenet.toml: contains a number that is too long"),
        ("source-timeout = 0x" + "f" * 5000, "line 4: source-timeout: the number is too large"),
        ("metadata-limit = 9223372036854775808", "line 4: metadata-limit: the number is too large"),
        ('metadata-retention = "lru"', "--metadata-retention needs --metadata-limit"),
        ('prefetch = "all"', "--prefetch all needs --read-only"),
    ],
)
def test_what_makes_no_sense_names_its_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "imagenet.toml"
    file.write_text(f'\nsource = "/ceph"\nmountpoint = "/data"\n{line}\n')
    done = check(file)
    assert done.exit_code == 2 and message in done.output
    assert done.output.startswith(f"cachefs: {file}") and done.output.count("\n") == 1


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    file = tmp_path / "imagenet.toml"
    file.write_text("read-only = true\n")
    done = check(file)
    assert (done.exit_code, done.output) == (2, f"cachefs: {file}: sets no source\n")
    done = check(tmp_path / "absent")
    assert (done.exit_code, done.output) == (2, f"cachefs: {tmp_path}/absent: does not exist\n")
    file.write_bytes(b"\xff")
    assert check(file).exit_code == 2
    with pytest.raises(click.UsageError):
        mount_config("--config", str(file))


def test_a_file_that_is_too_long_is_refused_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text("#\n" * config_file.MAX_CHARACTERS + "cache = 'none'\n")
    for path in (str(file), "/dev/zero"):
        with pytest.raises(click.UsageError, match=f"{path}: is too long"):
            mount_config("--config", path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (r'mutable = ["*.log", "\u0000"]', "contains a NUL character"),
        (r'immutable = ["a\u0000b"]', "contains a NUL character"),
        (r'cache-dir = "/ssd/\u0000"', "contains a NUL character"),
        ("fetch-threads = 1e2", "must be a whole number"),
        ("fetch-threads = inf", "must be a whole number"),
        ("metadata-limit = 10.0", "must be a whole number"),
        ("foreground = true", "must be given on the command line"),
        ("foreground = false", "must be given on the command line"),
    ],
)
def test_values_that_no_mount_can_mean_are_refused_with_their_key(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "file.toml").write_text(f'source = "{tmp_path}/source"\nmountpoint = "{tmp_path}/mnt"\n{line}\n')
    done = check(tmp_path / "file.toml")
    key = line.partition(" ")[0]
    assert done.exit_code == 2
    assert f"file.toml, line 3: {key}: " in done.output and reason in done.output


def test_a_printed_configuration_can_be_read_again(tmp_path: Path) -> None:
    """Regression: that of a service had `foreground = true`."""
    made = mount_config("--foreground", "--noexec", str(tmp_path), str(tmp_path / "mnt"))
    assert made.foreground
    (tmp_path / "file.toml").write_text("\n".join(as_toml(made.settings)))
    again = mount_config("--config", str(tmp_path / "file.toml"))
    assert (again.source, again.noexec, again.foreground) == (made.source, True, False)
