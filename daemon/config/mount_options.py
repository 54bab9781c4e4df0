"""`-o ro,cache-size=500G`: options of `cachefs mount` as mount(8) writes them.

Options are those of `cachefs mount`, by name; `ro` is --read-only. Options that only mount(8) and systemd use are
ignored. Options that are written out (--cache-size) override those of -o.
"""

import re
from collections.abc import Iterator

import click

_IGNORED = re.compile(
    r"rw|defaults|(no)?auto|(no)?user|users|owner|group|_netdev|nofail|(no)?suid|(no)?dev|(no)?exec|(no|rel|nodir|strict|lazy|dir)?atime"
    r"|(no)?async|sync|(x-|comment=|fsname=|subtype=).*"
)
_NAME = "mount_options"

option = click.option(
    "-o",
    _NAME,
    multiple=True,
    expose_value=False,
    metavar="A,B=C",
    help="Set options as mount(8) does, e.g. -o ro,cache-size=500G.",
)


class MountCommand(click.Command):
    """A command with `option`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = self.make_parser(ctx).parse_args(list(args))[0].get(_NAME, ())
        return super().parse_args(ctx, [*(each for options in given for each in _written_out(options)), *args])


def _written_out(options: str) -> Iterator[str]:
    """ "ro,cache-size=500G" → --read-only --cache-size=500G."""
    for each in options.split(","):
        name, equals, value = each.partition("=")
        if each == "ro":
            yield "--read-only"
        elif each and not _IGNORED.fullmatch(each):
            yield f"--{name.replace('_', '-')}{equals}{value}"
