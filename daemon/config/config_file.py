"""The configuration file: options of `cachefs mount` in TOML, by name.

    source = "/ceph/imagenet"
    mountpoint = "/data/imagenet"
    read-only = true
    cache-size = "500G"
    retention = "lru"
    mutable = ["runs/**", "*.log"]

The command line overrides the file (settings.py). An unknown key, and a value that the option refuses, are errors that
name the line.
"""

import difflib
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

_PLACE, _VALUES = f"{__name__}.place", f"{__name__}.values"
MAX_CHARACTERS = 1 << 20
COMMAND_LINE_ONLY = "foreground"
"""An option of the process that mounts, not of the mount."""
INTEGERS = 1 << 63
"""Those of TOML have 64 bits."""


class InvalidFile(click.UsageError):
    def __init__(self, path: Path, line: int | None, message: str) -> None:
        super().__init__(f"{path}{f', line {line}' if line else ''}: {message}")


def use(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """The callback of `--config`: the file's values replace the defaults."""
    if path is not None:
        values = read(path, context)
        context.meta[_PLACE] = path.absolute()
        context.meta[_VALUES] = values
        context.default_map = {**(context.default_map or {}), **values}


def place(context: click.Context) -> Path | None:
    """The file that was read; None: there was none."""
    path: Path | None = context.meta.get(_PLACE)
    return path


def check_not_empty(context: click.Context) -> None:
    """Raises InvalidFile if the file has no options: an editor may be about to write it."""
    if not context.meta[_VALUES]:
        raise InvalidFile(context.meta[_PLACE], None, "contains no options")


def origin(context: click.Context, name: str) -> str | None:
    """The line of the file that sets a parameter. None: no line does."""
    if name not in context.meta.get(_VALUES, {}):
        return None
    path: Path = context.meta[_PLACE]
    key = next(key_of(parameter) for parameter in context.command.params if parameter.name == name)
    return f"{path}, line {_line_of(path.read_text(encoding='utf-8'), key)}"


def read(path: Path, context: click.Context) -> dict[str, Any]:
    """The values of a file by parameter name. Raises InvalidFile."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
        if len(text) > MAX_CHARACTERS:
            raise InvalidFile(path, None, "is too long for a configuration file")
        values = _parse(text)
    except OSError as error:
        raise InvalidFile(path, None, error.strerror or str(error)) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidFile(path, None, str(error)) from None
    parameters = {key_of(parameter): parameter for parameter in context.command.params if may_be_in_file(parameter)}
    found: dict[str, Any] = {}
    for key, value in values.items():
        parameter = parameters.get(key)
        if key == COMMAND_LINE_ONLY:
            raise InvalidFile(path, _line_of(text, key), f"{key}: must be given on the command line (--{key})")
        if parameter is None:
            raise InvalidFile(path, _line_of(text, key), f"{key!r} is not an option{_hint(key, sorted(parameters))}")
        try:
            _check(parameter, value, context)
        except click.BadParameter as error:
            raise InvalidFile(path, _line_of(text, key), f"{key}: {error.message}") from None
        found[str(parameter.name)] = value
    return found


def _parse(text: str) -> dict[str, Any]:
    """Raises tomllib.TOMLDecodeError, also for what tomllib has no error for."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python converts no number of more than 4,300 digits
        raise tomllib.TOMLDecodeError("contains a number that is too long") from None


def _hint(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key.replace("_", "-").lower(), known, n=1)
    return f": did you mean {close[0]!r}?" if close else f"; the options are {', '.join(known)}"


def may_be_in_file(parameter: click.Parameter) -> bool:
    """--config and -o have no value of their own, and hidden options are not for users."""
    is_for_users = parameter.expose_value and not getattr(parameter, "hidden", False)
    return is_for_users and parameter.name != COMMAND_LINE_ONLY


def key_of(parameter: click.Parameter) -> str:
    """The key of `--cache-size` is `cache-size`, and that of an argument is its name."""
    longest = max((name for name in parameter.opts if name.startswith("--")), key=len, default=f"--{parameter.name}")
    return longest.removeprefix("--")


def _check(parameter: click.Parameter, value: Any, context: click.Context) -> None:
    """Raises click.BadParameter."""
    if isinstance(parameter, click.Option) and parameter.is_flag:
        if not isinstance(value, bool):
            raise click.BadParameter("must be true or false")
    elif parameter.multiple:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise click.BadParameter('must be a list of strings, such as ["*.log"]')
    elif isinstance(value, bool) or not isinstance(value, str | int | float):
        raise click.BadParameter("must be a string or a number")
    elif isinstance(value, float) and isinstance(parameter.type, click.types.IntParamType):
        raise click.BadParameter("must be a whole number, such as 100")
    elif isinstance(value, int) and not -INTEGERS <= value < INTEGERS:
        raise click.BadParameter("the number is too large")
    if any("\0" in each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)):
        raise click.BadParameter("contains a NUL character, which no path and no name can contain")
    try:
        parameter.type_cast_value(context, value)
    except (TypeError, ValueError, OverflowError):  # a number where click expects a path; an infinite one
        raise click.BadParameter(f"{value!r} is not a value of this option; put text in quotes") from None


def _line_of(text: str, key: str) -> int | None:
    pattern = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*(=|\.)|\s*\[+\s*{re.escape(key)}")
    return next((number for number, line in enumerate(text.splitlines(), 1) if pattern.match(line)), None)
