"""Types of command-line parameters, and how errors reach the user: as one line, without a traceback."""

import errno
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import click

from cachefs.contract.shared import SETTLE_NS
from cachefs.errors import CacheFsError
from cachefs.system.clock import NANOSECONDS
from daemon.config.config import parse_size
from daemon.output import say

T = TypeVar("T")

MAX_PORT = (1 << 16) - 1
MAX_SECONDS = 1e9
"""More than 30 years. System calls accept little more."""
LOOPBACK = "127.0.0.1"
_HOST_AND_PORT = re.compile(r"(?:(localhost|[\d.]+|\[[^\]]+\]):)?(\d{1,5})")
"""9123, localhost:9123, 0.0.0.0:9123, [::]:9123."""


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
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if math.isnan(seconds) or seconds < 0 or (math.isinf(seconds) and not allow_infinity):
        raise ValueError(f"{value!r} is not a number of seconds")
    if MAX_SECONDS < seconds < math.inf:
        raise ValueError(f"must not be more than {MAX_SECONDS:,.0f}")
    if seconds == 0 and not allow_zero:
        raise ValueError("must be more than 0")
    return seconds


def _minimum_age(value: Any) -> float:
    """How old files must be to be cached: never longer than the rule of age.py, and never 0."""
    seconds = _seconds(value)
    if not 0.001 <= seconds <= SETTLE_NS / NANOSECONDS:
        raise ValueError(f"must be between 0.001 and {SETTLE_NS / NANOSECONDS:g}")
    return seconds


SIZE = Parsed("SIZE", parse_size)
PLACE = Parsed("PATH", os.fsdecode)
"""A path that is not accessed. click.Path accesses it, and a mount without a daemon does not answer."""
METRICS_ADDRESS = Parsed("ADDRESS", _address)
SECONDS = Parsed("S", _seconds)
POSITIVE_SECONDS = Parsed("S", partial(_seconds, allow_zero=False))
SECONDS_OR_INFINITY = Parsed("S", partial(_seconds, allow_infinity=True))
MINIMUM_AGE = Parsed("S", _minimum_age)

mountpoint_argument = click.argument("mountpoint", type=PLACE)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an error as one line on stderr, and exit with 1."""
    try:
        yield
    except CacheFsError as error:
        say(f"cachefs: {error}", err=True)
        sys.exit(1)
    except OSError as error:
        if error.errno == errno.EPIPE:  # click exits silently
            raise
        what = f"{error.filename}: " if error.filename else ""
        say(f"cachefs: {what}{error.strerror or error}", err=True)
        sys.exit(1)
