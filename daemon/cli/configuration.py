"""`cachefs config`: check and show configuration files."""

import os
import sys
from pathlib import Path

import click

from cachefs.client import mount_table
from cachefs.client.client import Client
from cachefs.errors import CacheFsError
from cachefs.system import private_files
from daemon.cli.mount import make_mount_config, mount
from daemon.config import config, config_file
from daemon.config.parameters import json_option, mountpoint_argument
from daemon.config.settings import as_toml, context_of
from daemon.kernel import mounts
from daemon.output import print_json, say

_INVALID = 2


@click.group("config")
def configuration() -> None:
    """Check and show configuration files. `cachefs mount --config` reads them.

    \b
    Example:
      cachefs config check /etc/cachefs/imagenet.toml
      cachefs config show /data/imagenet
    """


@configuration.command()
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def check(file: Path, as_json: bool) -> None:
    """Check a configuration file, and that the paths in it exist and can be used. Nothing is mounted.

    The exit status is 2 if the file is invalid, and 1 if a path cannot be used. A mounted MOUNTPOINT is not checked.

    \b
    Example:
      cachefs config check /etc/cachefs/imagenet.toml
    """
    problem, status = _problem_of(file)
    if as_json:
        print_json({"file": str(file), "valid": problem is None, "problem": problem})
    elif problem is None:
        say(f"{file}: valid")
    else:
        say(f"cachefs: {problem}", err=True)
    sys.exit(status)


def _problem_of(file: Path) -> tuple[str | None, int]:
    """What is wrong with a file, and the exit status."""
    try:
        if not file.is_file():
            raise config_file.InvalidFile(file, None, "is not a file" if file.exists() else "does not exist")
        with context_of(mount, file) as context:
            mount_config = make_mount_config(context.params)
        _check_paths(mount_config)
    except click.UsageError as error:
        message = error.format_message()
        return message if isinstance(error, config_file.InvalidFile) else f"{file}: {message}", _INVALID
    except CacheFsError as error:
        return f"{file}: {error}", 1
    except OSError as error:
        return f"{file}: {error.filename}: {error.strerror}", 1
    return None, 0


def _check_paths(mount_config: config.MountConfig) -> None:
    """Raises CacheFsError, OSError."""
    from cachefs.store.cache_directory import check_usable  # lmdb is slow to load

    source, mountpoint = mount_config.source, mount_config.mountpoint
    is_mounted = mount_table.is_mounted(mountpoint)
    timeout_s = mount_config.options.source_timeout_s
    mounts.check_places(source, mountpoint, mount_config.own_places, timeout_s=timeout_s, is_mounted=is_mounted)
    if not is_mounted or source != mountpoint:
        os.close(mounts.open_source(source))
    check_usable(mount_config.cache_place, source)
    if warning := mounts.size_warning(mount_config.cache_place, mount_config.cache_size_bytes):
        say(f"cachefs: {warning}", err=True)
    if mount_config.metadata_snapshot is not None:
        os.close(private_files.open_given(mount_config.metadata_snapshot))
    if mount_config.metrics is not None and mount_config.metrics.startswith("/"):
        directory = os.path.dirname(mount_config.metrics)
        try:
            os.stat(directory)
        except OSError as error:
            raise CacheFsError(f"metrics: {directory}: {error.strerror}") from error


@configuration.command()
@mountpoint_argument
@json_option
def show(mountpoint: str, as_json: bool) -> None:
    """Print the options of a mount as a configuration file, with the origin of each. Defaults are commented out.

    \b
    Example:
      cachefs config show /data/imagenet
      cachefs config show /data/imagenet > /etc/cachefs/imagenet.toml
    """
    answer = Client(mount_table.containing(mountpoint)).settings()
    if as_json:
        print_json(answer)
        return
    for line in as_toml({name: config.Setting(**setting) for name, setting in answer.items()}):
        say(line)
