"""`-o ro,cache-size=500G`: options of `cachefs mount` as mount(8) writes them.

Options are those of `cachefs mount`, by name; `ro` is --read-only. What mount(8) and fstab may pass beside them is
honoured, or refused with one line. Options that are written out (--cache-size) override those of -o.
"""

import difflib
import re
from collections.abc import Collection, Iterator

import click

from cachefs.printable import one_line

_WITHOUT_EFFECT = re.compile(
    r"defaults|(no)?auto|nouser|owner|group|_netdev|nofail"  # of mount(8) and systemd
    r"|nosuid|nodev|async|default_permissions|nonempty|silent|loud|nomand|noiversion"  # true of every cachefs
    r"|(no)?(dir|rel)?atime|nostrictatime|(no)?lazytime"  # a read changes no atime (NP-3)
    r"|(x-|comment=|fsname=|subtype=).*"
)
_FLAGS = {
    "noexec": "--noexec", "exec": "--exec", "nosymfollow": "--nosymfollow", "symfollow": "--symfollow",
    "user": "--noexec", "users": "--noexec",
}  # fmt: skip
"""mount(8): user and users imply noexec, unless exec follows."""
_ALWAYS_SYNC = "changes reach the source at once, and are durable after fsync, as without it"
_REFUSED = {
    "remount": "a cachefs cannot be remounted: unmount it (cachefs umount), and mount it with the new options",
    "suid": "a cachefs is always nosuid",
    "dev": "a cachefs is always nodev",
    "sync": _ALWAYS_SYNC,
    "dirsync": _ALWAYS_SYNC,
    "strictatime": "reading from a cachefs changes no atime",
    "mand": "mandatory locks do not exist on a cachefs",
}
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
        given = ",".join(self.make_parser(ctx).parse_args(list(args))[0].get(_NAME, ()))
        known = {name.removeprefix("--") for each in self.params for name in each.opts if name.startswith("--")}
        known |= {name.removeprefix("--") for each in self.params for name in each.secondary_opts}
        return super().parse_args(ctx, [*_written_out(given.split(","), known), *args])


def _written_out(options: list[str], known: Collection[str]) -> Iterator[str]:
    """ "ro,cache-size=500G" → --read-only --cache-size=500G. Raises click.UsageError."""
    for number, each in enumerate(options):
        name, equals, value = each.partition("=")
        key = name.replace("_", "-")
        if each == "ro":
            if "rw" not in options[number:]:
                yield "--read-only"
        elif name in _FLAGS and (not equals or name == "user"):
            yield _FLAGS[name]
        elif each in _REFUSED:
            raise click.UsageError(f"-o {each}: {_REFUSED[each]}")
        elif name.startswith("X-"):
            raise click.UsageError(
                f"-o {name}: mount(8) does that, and cachefs mount does not: use mount -t fuse.cachefs"
            )
        elif key in known:
            yield f"--{key}{equals}{value}"
        elif each not in ("", "rw") and not _WITHOUT_EFFECT.fullmatch(each):
            close = difflib.get_close_matches(key, known, n=1)
            raise click.UsageError(
                f"-o {one_line(name)}: no such option{f'; did you mean {close[0]}?' if close else ''}"
            )
