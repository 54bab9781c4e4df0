"""Where the values of a mount's options come from.

What is on the command line wins over the configuration file, that over the profile, and that over the defaults.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from daemon.config import config_file
from daemon.config.config import MountConfig, Setting, format_size
from daemon.config.parameters import Size

COMMAND_LINE, DEFAULT = "command line", "default"
PROFILES: dict[str, dict[str, Any]] = {
    "training": {},
    "inference": {"read_only": True, "revalidate": "never"},
    "changing": {"cache": "none", "attr_timeout": 1.0, "prefetch": "none"},
}
"""Options by the names of their parameters."""
RELOADABLE = ("cache_size", "source_timeout", "reconnect_timeout", "log_level")
"""What SIGHUP may change: parameters that are fields of a MountConfig or its Options, by another name some of them."""


def use_profile(context: click.Context, _: click.Parameter, name: str) -> str:
    """The callback of `--profile`: its values take the place of the defaults, the file's take the place of those."""
    context.default_map = {**PROFILES[name], **(context.default_map or {})}
    return name


def settings(context: click.Context, computed: dict[str, Any]) -> dict[str, Setting]:
    """The settings of a mount by the names of its options.

    `computed`: what the parameters without a value come to.
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
        if isinstance(parameter.type, Size) and isinstance(value, int):
            value = format_size(value)
        if isinstance(value, Path):
            value = str(value)
        found[key] = Setting(list(value) if isinstance(value, tuple) else value, _origin(context, name))
    return found


def _origin(context: click.Context, name: str) -> str:
    source = context.get_parameter_source(name)
    if source is ParameterSource.COMMANDLINE:
        return COMMAND_LINE
    if source is ParameterSource.DEFAULT_MAP:
        return config_file.origin(context, name) or f"profile {context.params['profile']}"
    return DEFAULT


def as_toml(settings: dict[str, Setting]) -> Iterator[str]:
    """Lines of a configuration file, each with its origin; defaults are commented out."""
    for key, setting in settings.items():
        line = f"{key} = {_toml(setting.value)}"
        if setting.origin == DEFAULT or setting.value is None:
            line = "#" + line
        yield f"{line:<52}  # {setting.origin}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return config_file.quoted(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return "" if value is None else str(value)


def reread(mount: click.Command, running: MountConfig) -> tuple[MountConfig, list[str]]:
    """The configuration with what its file says now, as far as that may change while mounted; the other options that
    have changed in it.

    Raises click.UsageError where the file makes no sense, or could not be mounted.
    """
    if running.config_file is None:
        return running, []
    places = {"source": running.source, "mountpoint": running.mountpoint}
    from_command_line = [place for key, place in places.items() if running.settings[key].origin == COMMAND_LINE]
    try:
        context = mount.make_context("mount", ["--config", str(running.config_file), "--", *from_command_line])
    except click.MissingParameter as error:
        name = error.param.name if error.param is not None else "place"
        raise config_file.InvalidFile(running.config_file, None, f"there is no {name} in it") from None
    with context:
        config_file.check_not_empty(context)
        now = settings(context, {})
    values: dict[str, Any] = {}
    merged = dict(running.settings)
    for name in RELOADABLE:
        key = name.replace("_", "-")
        if running.settings[key].origin != COMMAND_LINE:
            values[name] = context.params[name]
            merged[key] = now[key]
    options = running.options
    if "source_timeout" in values:
        options = replace(options, source_timeout_s=values["source_timeout"])
    if "reconnect_timeout" in values:
        options = replace(options, reconnect_timeout_s=values["reconnect_timeout"])
    changed = replace(
        running,
        options=options,
        cache_size_bytes=values.get("cache_size", running.cache_size_bytes),
        log_level=values.get("log_level", running.log_level),
        settings=merged,
    )
    return changed, [key for key in merged if _differs(merged[key], now[key])]


def _differs(running: Setting, now: Setting) -> bool:
    """Does the file say something else of an option? A value of None is computed when it is mounted."""
    if running.origin == COMMAND_LINE or (now.value is None and running.origin == DEFAULT):
        return False
    return bool(now.value != running.value)
