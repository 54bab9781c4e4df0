"""What the commands' parameters may be, and how their errors reach the user: one line, no traceback."""

import errno
import math
import os
import re
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from cachefs.contract.shared import SETTLE_NS
from cachefs.errors import CacheFsError
from cachefs.system.clock import NANOSECONDS
from daemon.config import config
from daemon.output import say


class Size(click.ParamType[int]):
    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return config.parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Place(click.ParamType[str]):
    """A path that is not looked at: click.Path would, and a mount without a daemon does not answer."""

    name = "PATH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return os.fsdecode(value)


class MetricsAddress(click.ParamType[str]):
    name = "ADDRESS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        port = LOOPBACK.fullmatch(text)
        if not text.startswith("/") and (port is None or int(port[2]) > MAX_PORT):
            self.fail(f"{text!r} is neither the path of a socket nor a port of the loopback interface", param, ctx)
        return text


LOOPBACK = re.compile(r"(?:(127(?:\.\d+){3}|localhost|\[::1\]):)?(\d{1,5})")
"""A port of this machine alone: 9123, 127.0.0.1:9123, [::1]:9123."""


MAX_PORT = (1 << 16) - 1
MAX_SECONDS = 1e9
"""More than 30 years; system calls take no more than some 10^9."""


class Seconds(click.ParamType[float]):
    name = "S"

    def __init__(self, *, allow_infinity: bool, allow_zero: bool = True) -> None:
        self._allow_infinity = allow_infinity
        self._allow_zero = allow_zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if math.isnan(seconds) or seconds < 0 or (math.isinf(seconds) and not self._allow_infinity):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        if MAX_SECONDS < seconds < math.inf:
            self.fail(f"must not be more than {MAX_SECONDS:,.0f}", param, ctx)
        if seconds == 0 and not self._allow_zero:
            self.fail("must be more than 0", param, ctx)
        return seconds


class MinimumAge(Seconds):
    """How old files must be to be cached. More than the rule of age.py has no use, and none at all is none."""

    def __init__(self) -> None:
        super().__init__(allow_infinity=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = super().convert(value, param, ctx)
        if not 0.001 <= seconds <= SETTLE_NS / NANOSECONDS:
            self.fail(f"must be between 0.001 and {SETTLE_NS / NANOSECONDS:g}", param, ctx)
        return seconds


def one_line_errors(function: Callable[..., None]) -> Callable[..., None]:
    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except CacheFsError as error:
            say(f"cachefs: {error}", err=True)
            sys.exit(1)
        except OSError as error:
            if error.errno == errno.EPIPE:  # click ends without a word
                raise
            what = f"{error.filename}: " if error.filename else ""
            say(f"cachefs: {what}{error.strerror or error}", err=True)
            sys.exit(1)

    return wrapped
