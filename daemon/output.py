"""What the command line prints: lines, JSON, tables and sizes, and errors as one line without a traceback.

Names are escaped in lines; JSON escapes them itself.
"""

import errno
import io
import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import click

from cachefs.errors import CacheFsError
from cachefs.printable import one_line

INTERRUPTED = 128 + signal.SIGINT
"""The exit status after Ctrl-C."""
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


class Interrupted(CacheFsError):
    """Ctrl-C has ended a command that has something to say about it."""


def say(line: str, *, err: bool = False) -> None:
    """Print one line, with unsafe characters in names escaped."""
    click.echo(one_line(line), err=err)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print valid JSON: infinity, which JSON does not have, becomes "inf", as options accept it."""
    click.echo(json.dumps(_finite(value), indent=indent, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def readable_size(size_bytes: float) -> str:
    """In the units that options take, powers of 1024: 500 << 30 → "500 GiB"."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} byte{'' if size_bytes == 1 else 's'}"
    for unit in _UNITS:
        size_bytes /= 1024
        if size_bytes < 1023.95 or unit == _UNITS[-1]:
            break
    return f"{size_bytes:,.1f}".removesuffix(".0") + f" {unit}"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an error as one line on stderr, and exit with 1; after Ctrl-C with 130. A closed pipe ends it silently."""
    try:
        yield
    except CacheFsError as error:
        _fail(str(error), INTERRUPTED if isinstance(error, Interrupted) else 1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:
        if error.errno == errno.EPIPE:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGPIPE)
        what = f"{error.filename}: " if error.filename else ""
        _fail(f"{what}{error.strerror or error}", 1)


def _fail(reason: str, status: int) -> NoReturn:
    with suppress(OSError):
        say(f"cachefs: {reason}", err=True)
    sys.exit(status)


class _StandardOutput(io.FileIO):
    """Standard output, whose errors say that they are of it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # The interpreter flushes again when it ends, and would print a traceback.
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, self.fileno())
            os.close(null)
            raise OSError(error.errno, error.strerror, "standard output") from None


def name_output_in_errors() -> None:
    """Called once by the program: afterwards a full disk under its output is an error that names the output."""
    before = sys.stdout
    if before is not sys.__stdout__ or before is None:  # a test has replaced it, or it is closed
        return
    before.flush()
    raw = _StandardOutput(before.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw), before.encoding, before.errors, line_buffering=before.line_buffering
    )
