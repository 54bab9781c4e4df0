"""`mount.fuse.cachefs SOURCE MOUNTPOINT -o …`: mount(8) calls it for the type fuse.cachefs, also from /etc/fstab.

    /ceph/imagenet  /data/imagenet  fuse.cachefs  ro,cache-size=500G,mutable=*.log,_netdev  0 0

Options are those of `cachefs mount`, by name; `ro` is --read-only. Options that only mount(8) and systemd use are
ignored. The exit status follows mount(8): 1 for wrong options, 32 if the mount failed.
"""

import re
import sys
from collections.abc import Sequence

import click

from daemon.cli.mount import mount
from daemon.config.parameters import one_line_errors
from daemon.output import say

_IGNORED = re.compile(
    r"rw|defaults|(no)?auto|(no)?user|users|owner|group|_netdev|nofail|(no)?suid|(no)?dev|(no)?exec|(no|rel|nodir|strict|lazy|dir)?atime"
    r"|(no)?async|sync|(x-|comment=|fsname=|subtype=).*"
)
_USAGE, _FAILED = 1, 32


def arguments(given: Sequence[str]) -> list[str]:
    """The arguments of `cachefs mount` for those of mount(8). Raises click.UsageError."""
    places: list[str] = []
    options: list[str] = []
    rest = iter(given)
    for argument in rest:
        if argument == "-o":
            options += next(rest, "").split(",")
        elif argument in ("-t", "-N"):
            next(rest, None)
        elif not re.fullmatch(r"-[sfnvw]+", argument):
            places.append(argument)
    if len(places) != 2:
        raise click.UsageError("usage: mount.fuse.cachefs SOURCE MOUNTPOINT [-o OPTIONS]")
    command = []
    for option in options:
        name, has_value, value = option.partition("=")
        name = name.replace("_", "-")
        if option == "ro":
            command.append("--read-only")
        elif name == "allow-other":
            command.append("--allow-other")
        elif option and not _IGNORED.fullmatch(option):
            command += [f"--{name}", value] if has_value else [f"--{name}"]
    return [*command, "--", *places]


def main() -> None:
    try:
        with one_line_errors():
            mount.main(arguments(sys.argv[1:]), "mount.fuse.cachefs", standalone_mode=False)
    except click.ClickException as error:
        say(f"mount.fuse.cachefs: {error.format_message()}", err=True)
        sys.exit(_USAGE)
    except SystemExit as error:
        sys.exit(_FAILED if error.code else 0)
