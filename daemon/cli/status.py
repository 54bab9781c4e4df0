"""`cachefs status`: one mount, or a list of all mounts of this machine; once, or again and again."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from threading import Thread
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cachefs.client import locations, mount_table
from cachefs.client.client import TIMEOUT_S, Client, DaemonDied, DaemonOfOtherVersion
from cachefs.errors import CacheFsError
from cachefs.printable import one_line
from daemon.cli.display import hit_ratio, print_status, print_table, share
from daemon.config.parameters import Mountpoint, json_option
from daemon.kernel import detached
from daemon.output import print_json, readable_size, say

LIST_TIMEOUT_S = 5.0
"""How long the list waits for the daemons, all together."""
INTERVAL_S, JSON_INTERVAL_S = 2.0, 1.0


_MAX_NESTING = 8
_STRANGE = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What an answer may cause that is not one of this version: another user may want to mislead root."""


@dataclass(slots=True)
class Listed:
    """A row of the list."""

    mountpoint: str
    source: str
    user: int
    state: str = "no answer"
    """"alive", "dead" (it has no daemon), "detached", "no answer", "another version", or "private" (only its user may
    ask)."""
    held_by: str | None = None
    """What holds a detached mount."""
    status: dict[str, Any] | None = None
    """As of `cachefs status MOUNTPOINT --json`."""

    def ask(self) -> None:
        try:
            answer = client_of(self.mountpoint, timeout_s=LIST_TIMEOUT_S).status()
            _check_nesting(answer)  # the daemon of another user may answer anything
            _figures(answer)
            self.state, self.status = "alive", answer
        except DaemonDied:
            self.state = "dead"
        except CacheFsError:
            pass
        except _STRANGE:
            self.state = "another version"


def _check_nesting(answer: object) -> None:
    """Raises ValueError for values that could not be printed."""
    layer = [answer]
    for _ in range(_MAX_NESTING):
        values = [each.values() if isinstance(each, dict) else each for each in layer if isinstance(each, dict | list)]
        layer = list(chain.from_iterable(values))
    if layer:
        raise ValueError("nested too deeply")


def _figures(status: dict[str, Any]) -> tuple[str, str]:
    """The hit ratio, and how full the cache is. Raises _STRANGE."""
    used, size = status["blob_bytes"], status["cache_size_bytes"]
    return hit_ratio(status), f"{share(used, size)} of {readable_size(size)}"


def client_of(mountpoint: str, timeout_s: float | None = None) -> Client:
    """A client for requests that do no harm whatever the daemon answers. Root may ask the daemons of other users."""
    top = mount_table.top_mount(mountpoint)
    directory, owner = None, None
    if top is not None and top.fstype == mount_table.FSTYPE and locations.is_root() and top.user != 0:
        directory, owner = locations.directory_of_user(top), top.user
    more = {} if timeout_s is None else {"timeout_s": timeout_s}
    return Client(mountpoint, directory=directory, owner=owner, **more)


def all_mounts() -> list[Listed]:
    """Asks all daemons at once."""
    found: dict[str, Listed] = {}
    devices: set[str] = set()
    for mount in mount_table.mounts():
        found.pop(mount.mountpoint, None)  # it is covered by this one
        if mount.fstype == mount_table.FSTYPE and mount.device not in devices:
            devices.add(mount.device)  # other mountpoints of it are bind mounts
            found[mount.mountpoint] = Listed(mount.mountpoint, mount.source, mount.user)
    rows = sorted(found.values(), key=lambda row: row.mountpoint)
    asked = []
    for row in rows:
        if locations.is_root() or row.user == locations.user():
            asked.append(Thread(target=row.ask, daemon=True))
            asked[-1].start()
        else:
            row.state = "private"
    ends_s = time.monotonic() + LIST_TIMEOUT_S
    for thread in asked:
        thread.join(max(0.0, ends_s - time.monotonic()))
    return rows + [
        Listed(each.mountpoint, each.source, locations.user(), "detached", each.holders) for each in detached.find()
    ]


def list_table(rows: Sequence[Listed]) -> RenderableType:
    if not rows:
        return Text("no cachefs is mounted")
    table = Table(box=None, pad_edge=False)
    for heading in ("mountpoint", "source", "state", "hit ratio", "cache"):
        table.add_column(heading, overflow="fold", justify="left")
    several_users = len({row.user for row in rows}) > 1
    if several_users:
        table.add_column("user")
    for row in rows:
        ratio, filled = ("-", "-") if row.status is None else _figures(row.status)
        state = row.state if row.held_by is None else f"{row.state}, still held by {row.held_by}"
        values = [row.mountpoint, row.source, state, ratio, filled]
        table.add_row(*(Text(one_line(value)) for value in values), *([str(row.user)] if several_users else []))
    return table


@click.command()
@click.argument("mountpoint", required=False, type=Mountpoint())
@json_option
@click.option(
    "--watch", "watched", is_flag=True, help="Show a live screen until Ctrl-C; with --json, print a line each time."
)
@click.option(
    "--interval",
    type=click.FloatRange(0.1),
    metavar="S",
    help=f"Refresh interval of --watch. [default: {INTERVAL_S:g}; with --json: {JSON_INTERVAL_S:g}]",
)
def status(mountpoint: str | None, as_json: bool, watched: bool, interval: float | None) -> None:
    """Show the state of a mount, or list all mounts. Includes hits, misses, cached data, and calls to the source.

    MOUNTPOINT may be any path on a mount. Without it all mounts are listed, alive or dead; root sees those of all
    users.

    \b
    Examples:
      cachefs status
      cachefs status /data/imagenet --watch
      cachefs status /data/imagenet --json
    """
    if interval is not None and not watched:
        raise click.UsageError("--interval needs --watch")
    client = _client_at(mountpoint) if mountpoint is not None else None
    if as_json and watched:
        _print_lines(partial(_as_json, client), interval or JSON_INTERVAL_S)
    elif as_json:
        print_json(_as_json(client))
    elif watched:
        with suppress(KeyboardInterrupt):
            _watch(client, interval or INTERVAL_S)
    elif client is not None:
        try:
            print_status(_checked(client))
        except _STRANGE:
            raise DaemonOfOtherVersion(client.mountpoint) from None
    else:
        _print_list(all_mounts())


def _client_at(path: str) -> Client:
    """Of the mount that a path lies on, or of a detached one that was mounted there."""
    try:
        return client_of(mount_table.containing(path))
    except CacheFsError:
        for held in detached.find(mount_table.absolute(path)):
            say(f"cachefs: {held}", err=True)
            return Client(held.mountpoint, directory=held.directory)
        raise


def _answer(client: Client) -> dict[str, Any]:
    """The daemon of another user may send its answer slowly, for ever."""
    answers: list[dict[str, Any] | CacheFsError] = []

    def ask() -> None:
        try:
            answers.append(client.status())
        except CacheFsError as error:
            answers.append(error)

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if not answers:
        raise CacheFsError(f"the daemon of {client.mountpoint} does not answer: timed out")
    if isinstance(answers[0], CacheFsError):
        raise answers[0]
    return answers[0]


def _checked(client: Client) -> dict[str, Any]:
    answer = _answer(client)
    try:
        _check_nesting(answer)
        _figures(answer)
    except _STRANGE:
        raise DaemonOfOtherVersion(client.mountpoint) from None
    if "latencies" not in answer:
        raise DaemonOfOtherVersion(client.mountpoint)
    return answer


def _as_json(client: Client | None) -> Any:
    return _checked(client) if client is not None else [asdict(row) for row in all_mounts()]


def _print_list(rows: Sequence[Listed]) -> None:
    print_table(list_table(rows), folds=False)
    for row in rows:
        if row.state == "dead":
            say(f"cachefs: {DaemonDied(row.mountpoint)}", err=True)


def _print_lines(ask: Callable[[], Any], interval_s: float) -> None:
    """A line of JSON each time, for ever. A daemon that is being replaced does not end it."""
    answer = ask()
    next_s = time.monotonic()
    while True:
        print_json(answer, indent=None)
        next_s += interval_s
        time.sleep(max(0.0, next_s - time.monotonic()))
        try:
            answer = ask()
        except CacheFsError as error:
            answer = {"error": str(error)}


def _watch(client: Client | None, interval_s: float) -> None:
    if client is not None:
        from daemon.cli.watch import watch

        _checked(client)
        watch(client, interval_s)
        return
    with Live(list_table(all_mounts()), console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(list_table(all_mounts()), refresh=True)
