"""Types of command-line parameters: what they accept, and what the shell completes them with."""

import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from cachefs.client import mount_table
from cachefs.contract.shared import SETTLE_NS
from cachefs.system.clock import NANOSECONDS
from daemon.config.config import Size, parse_size

T = TypeVar("T")

MAX_PORT = (1 << 16) - 1
MAX_SECONDS = 1e9
"""More than 30 years. System calls accept little more."""
LOOPBACK = "127.0.0.1"
_HOST_AND_PORT = re.compile(r"(?:(localhost|[\d.]+|\[[^\]]+\]):)?(\d{1,5})")
"""9123, localhost:9123, 0.0.0.0:9123, [::]:9123."""
_TIME = re.compile(r"(\d+(?:\.\d+)?) *(ms|s|m|h|d)")
_TIME_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


class Parsed(click.ParamType[T]):
    """A parameter that a function parses, which raises ValueError with the reason for a value that it refuses."""

    def __init__(self, name: str, parse: Callable[[Any], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_address(text: str) -> Path | tuple[str, int]:
    """The address of `--metrics`: the path of a socket, or (host, port). Raises ValueError."""
    if text.startswith("/"):
        return Path(text)
    match = _HOST_AND_PORT.fullmatch(text)
    if match is not None and int(match[2]) <= MAX_PORT:
        host = (match[1] or "localhost").strip("[]")
        with suppress(ValueError):
            return LOOPBACK if host == "localhost" else str(ip_address(host)), int(match[2])
    raise ValueError(f"{text!r} is neither a socket (/run/x.sock), nor a port (9123), nor an address (0.0.0.0:9123)")


def _address(value: Any) -> str:
    parse_address(str(value))
    return str(value)


def _seconds(value: Any, *, allow_zero: bool = True, allow_infinity: bool = False) -> float:
    """A number of seconds, or "500ms", "5s", "2m", "1h", "1d"."""
    match = _TIME.fullmatch(str(value).strip())
    try:
        seconds = float(match[1]) * _TIME_UNITS_S[match[2]] if match else float(value)
    except ValueError:
        seconds = -1.0
    if math.isnan(seconds) or seconds < 0 or (math.isinf(seconds) and not allow_infinity):
        raise ValueError(f"{value!r} is not a time: use a number of seconds, or one with a unit, such as 5s or 2m")
    if MAX_SECONDS < seconds < math.inf:
        raise ValueError(f"must not be more than {MAX_SECONDS:,.0f}")
    if seconds == 0 and not allow_zero:
        raise ValueError("must be more than 0")
    return seconds


def _milliseconds(value: Any) -> float:
    seconds = _seconds(value)
    return seconds * 1000 if _TIME.fullmatch(str(value).strip()) else seconds


def _minimum_age(value: Any) -> float:
    """How old files must be to be cached: never longer than the rule of validity.py, and never 0."""
    seconds = _seconds(value)
    if not 0.001 <= seconds <= SETTLE_NS / NANOSECONDS:
        raise ValueError(f"must be between 0.001 and {SETTLE_NS / NANOSECONDS:g}")
    return seconds


def _path(value: Any) -> str:
    if not value:
        raise ValueError("the path is empty")  # as of an unset variable: it would mean the current directory
    return os.fsdecode(value)


class Place(Parsed[str]):
    """A path that is not accessed. click.Path accesses it, and a mount without a daemon does not answer."""

    def __init__(self, kind: str) -> None:
        """`kind`: what the shell completes it with: "file" (any path) or "dir"."""
        super().__init__("PATH", _path)
        self._kind = kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self._kind)]


class Mountpoint(Place):
    def __init__(self) -> None:
        super().__init__("dir")

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The mountpoints of cachefs; directories if none begins like this."""
        places = {mount.mountpoint for mount in mount_table.mounts() if mount.fstype == mount_table.FSTYPE}
        found = [CompletionItem(place) for place in sorted(places) if place.startswith(incomplete)]
        return found or super().shell_complete(ctx, param, incomplete)


def _cache_size(value: Any) -> Size:
    size = parse_size(value)
    if size == 0:
        raise ValueError("a cache needs room: use --cache metadata or --cache none for a mount that caches no data")
    return size


SIZE = Parsed("SIZE", parse_size)
CACHE_SIZE = Parsed("SIZE", _cache_size)
PLACE, DIRECTORY = Place("file"), Place("dir")
METRICS_ADDRESS = Parsed("ADDRESS", _address)
SECONDS = Parsed("S", _seconds)
MILLISECONDS = Parsed("MS", _milliseconds)
POSITIVE_SECONDS = Parsed("S", partial(_seconds, allow_zero=False))
SECONDS_OR_INFINITY = Parsed("S", partial(_seconds, allow_infinity=True))
MINIMUM_AGE = Parsed("S", _minimum_age)

mountpoint_argument = click.argument("mountpoint", type=Mountpoint())
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
