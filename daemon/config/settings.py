"""The options of a mount, and where their values come from.

The command line overrides the configuration file, which overrides the profile, which overrides the defaults.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from daemon.config import config_file
from daemon.config.config import DEFAULT, MountConfig, Setting, Size
from daemon.config.parameters import Place

COMMAND_LINE = "command line"
WORKSPACE = "workspace"
PROFILES: dict[str, dict[str, Any]] = {
    "training": {},
    WORKSPACE: {},
    "inference": {"read_only": True, "revalidate": "never"},
    "changing": {"cache": "none", "attr_timeout": 1.0, "prefetch": "none"},
}
"""By parameter name."""
RELOADABLE = {"cache-size": "cache_size_bytes", "log-level": "log_level"}
"""Options that SIGHUP may change, and the fields of MountConfig that hold their values."""
RELOADABLE_OPTIONS = {"source-timeout": "source_timeout_s", "reconnect-timeout": "reconnect_timeout_s"}
"""The same for fields of Options."""


def use_profile(context: click.Context, _: click.Parameter, name: str) -> str:
    """The callback of `--profile`: its values replace the defaults; the file's values replace those of the profile."""
    context.default_map = {**PROFILES[name], **(context.default_map or {})}
    return name


def settings(context: click.Context, computed: dict[str, Any]) -> dict[str, Setting]:
    """The settings of a mount by option name.

    `computed`: values for parameters that were not given.
    """
    found = {}
    for parameter in context.command.params:
        name = str(parameter.name)
        key = config_file.key_of(parameter)
        if not config_file.may_be_in_file(parameter):
            continue
        value = context.params[name]
        if value is None:
            value = computed.get(name)
        if hasattr(value, "read"):
            value = value.name
        elif isinstance(value, Size):
            value = value.text
        elif isinstance(value, Path):
            value = str(value)
        origin = _origin(context, name)
        if origin == COMMAND_LINE and isinstance(parameter.type, Place | click.Path | click.File):
            value = os.path.abspath(value)  # a file made of this works in any directory
        found[key] = Setting(list(value) if isinstance(value, tuple) else value, origin)
    return found


def _origin(context: click.Context, name: str) -> str:
    source = context.get_parameter_source(name)
    if source is ParameterSource.COMMANDLINE:
        return COMMAND_LINE
    if source is ParameterSource.DEFAULT_MAP:
        return config_file.origin(context, name) or f"profile {context.params['profile']}"
    return DEFAULT


def as_toml(settings: dict[str, Setting]) -> Iterator[str]:
    """The lines of a configuration file, with origins as comments. Defaults are commented out."""
    for key, setting in settings.items():
        line = f"{key} = {_toml(setting.value)}"
        if setting.origin == DEFAULT or setting.value is None:
            line = "#" + line
        yield f"{line:<52}  # {setting.origin}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # a basic string of TOML
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return "" if value is None else str(value)


def context_of(mount: click.Command, file: Path, places: Sequence[str] = ()) -> click.Context:
    """The context of the command with the options of a file. Raises click.UsageError, which names the file."""
    try:
        return mount.make_context("mount", ["--config", str(file), "--", *places])
    except click.MissingParameter as error:
        name = error.param.name if error.param is not None else "place"
        raise config_file.InvalidFile(file, None, f"sets no {name}") from None


def reread(mount: click.Command, running: MountConfig) -> tuple[MountConfig, list[str]]:
    """Read the configuration file again. Returns the configuration with the options that may change while mounted, and
    the names of other options that have changed.

    Raises click.UsageError if the file is invalid.
    """
    if running.config_file is None:
        return running, []
    places = {"source": running.source, "mountpoint": running.mountpoint}
    from_command_line = [place for key, place in places.items() if running.settings[key].origin == COMMAND_LINE]
    with context_of(mount, running.config_file, from_command_line) as context:
        config_file.check_not_empty(context)
        now = settings(context, {})
    reloaded = [key for key in (*RELOADABLE, *RELOADABLE_OPTIONS) if running.settings[key].origin != COMMAND_LINE]
    merged = running.settings | {key: now[key] for key in reloaded}
    values = {key: context.params[key.replace("-", "_")] for key in reloaded}
    of_mount = {field: values[key] for key, field in RELOADABLE.items() if key in values}
    of_options = {field: values[key] for key, field in RELOADABLE_OPTIONS.items() if key in values}
    changed = replace(running, options=replace(running.options, **of_options), settings=merged, **of_mount)
    return changed, [key for key in merged if key in now and _differs(merged[key], now[key])]


def _differs(running: Setting, now: Setting) -> bool:
    """Has the file changed an option? A value of None is computed at mount time."""
    if running.origin == COMMAND_LINE or (now.value is None and running.origin == DEFAULT):
        return False
    return bool(now.value != running.value)
