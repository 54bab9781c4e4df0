"""`mount.fuse.cachefs SOURCE MOUNTPOINT -o …`: mount(8) calls it for the type fuse.cachefs, also from /etc/fstab.

    /ceph/imagenet  /data/imagenet  fuse.cachefs  ro,cache-size=500G,mutable=*.log,_netdev  0 0

mount_options.py has the options. The exit status follows mount(8): 1 for wrong options, 32 if the mount failed.
"""

import re
import sys
from collections.abc import Sequence

import click

from daemon.cli.mount import mount
from daemon.output import one_line_errors, say

_USAGE, _FAILED = 1, 32


def arguments(given: Sequence[str]) -> list[str]:
    """The arguments of `cachefs mount` for those of mount(8). Raises click.UsageError.

    Options like X-mount.mkdir are left out: mount(8) does what they say.
    """
    places: list[str] = []
    options: list[str] = []
    rest = iter(given)
    for argument in rest:
        if argument == "-o":
            own = [each for each in next(rest, "").split(",") if not each.startswith("X-")]
            options += ["-o", ",".join(own)]
        elif argument in ("-t", "-N"):
            next(rest, None)
        elif not re.fullmatch(r"-[sfnvw]+", argument):
            places.append(argument)
    if len(places) != 2:
        raise click.UsageError("usage: mount.fuse.cachefs SOURCE MOUNTPOINT [-o OPTIONS]")
    return [*options, "--", *places]


def main() -> None:
    try:
        with one_line_errors():
            if any(re.fullmatch(r"-[sfnvw]*f[sfnvw]*", each) for each in sys.argv[1:]):  # mount --fake
                mount.make_context("mount.fuse.cachefs", arguments(sys.argv[1:]))
            else:
                mount.main(arguments(sys.argv[1:]), "mount.fuse.cachefs", standalone_mode=False)
    except click.ClickException as error:
        say(f"mount.fuse.cachefs: {error.format_message()}", err=True)
        sys.exit(_USAGE)
    except SystemExit as error:
        sys.exit(_FAILED if error.code else 0)
