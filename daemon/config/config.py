"""The configuration of a mount: values as users write them, and the file that stores them for the next daemon."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from cachefs.client import locations
from cachefs.errors import CacheFsError
from cachefs.options import CacheLevel, Options, Revalidate
from cachefs.system import private_files
from policies.globs import Globs

CONFIG_NAME = "mount.json"
DEFAULT = "default"
"""The origin of a value that neither the user nor a profile has set."""
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40, "P": 50}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:i?B)?", re.IGNORECASE)
MAX_SIZE_BYTES = 1 << 60


class Size(int):
    """A number of bytes, and the text that it was given as."""

    text: str

    def __new__(cls, size_bytes: int, text: str = "") -> "Size":
        made = super().__new__(cls, size_bytes)
        made.text = text
        return made


def parse_size(value: str | float) -> Size:
    """ "10G", "1.5T", "512MiB", "4096", 4096 → bytes; units are powers of 1024. Raises ValueError."""
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(f"{value!r} is not a size: use a number with K, M, G, T or P, such as 500G")
    size = float(match[1]) * (1 << _UNITS[match[2].upper()])
    if size > MAX_SIZE_BYTES:  # also infinity
        raise ValueError(f"{value!r} is larger than any disk")
    return Size(int(size), str(value).strip())


def format_size(size: int) -> str:
    """The shortest text that `parse_size` reads as this size: 536870912000 → "500G"."""
    unit = max(
        (u for u, bits in _UNITS.items() if size and size % (1 << bits) == 0), key=_UNITS.__getitem__, default=""
    )
    return f"{size >> _UNITS[unit]}{unit}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One option of a mount, and where it comes from."""

    value: Any
    """As in a configuration file; None: not set."""
    origin: str


@dataclass(frozen=True, slots=True)
class MountConfig:
    """Everything that `cachefs mount` was given."""

    source: str
    mountpoint: str
    options: Options
    cache_dir: Path | None = None
    metadata_snapshot: Path | None = None
    """Fills a new cache."""
    cache_size_bytes: int | None = None
    """None: 90 % of the free space."""
    allow_other: bool = True
    noexec: bool = False
    nosymfollow: bool = False
    foreground: bool = False
    log_level: str = "info"
    metrics: str | None = None
    """Address that metrics are served on: see `parse_address`."""
    config_file: Path | None = None
    settings: dict[str, Setting] = field(default_factory=dict)
    """By option name."""
    command: tuple[str, ...] = ()
    """The command that mounted, which a daemon that takes over shows in ps."""

    @property
    def cache_place(self) -> Path:
        """The cache directory: the given one, or the default."""
        return self.cache_dir or locations.default_cache_dir(self.source)

    def given(self) -> Iterator[tuple[str, Any]]:
        """The options that are not defaults, and their values."""
        for name, setting in self.settings.items():
            if name not in ("source", "mountpoint") and setting.origin != DEFAULT:
                yield name, setting.value

    @property
    def own_places(self) -> dict[str, Path]:
        """What the daemon writes, by a name for error messages."""
        found = {"cache directory": self.cache_place}
        with suppress(FileNotFoundError):  # only before the first mount
            found["runtime directory"] = locations.runtime_root()
        if self.metrics is not None and self.metrics.startswith("/"):
            found["metrics socket"] = Path(self.metrics)
        return found


RESTORED = {"graph": tuple, "cache": CacheLevel, "revalidate": Revalidate, "mutable": Globs, "immutable": Globs}
"""Fields of Options that JSON keeps as text."""


def save(mount_config: MountConfig, path: Path) -> None:
    """Store the configuration for the next daemon of the mount."""
    private_files.write_file(path, json.dumps(asdict(mount_config), default=_plain, indent=2).encode())


def load(path: Path) -> MountConfig:
    """Raises CacheFsError if there is no configuration that this version understands."""
    try:
        with open(path, encoding="utf-8", opener=private_files.opener) as file:
            fields = json.load(file)
        for name, restore in RESTORED.items():
            if name in fields["options"]:
                fields["options"][name] = restore(fields["options"][name])
        for name in ("cache_dir", "config_file", "metadata_snapshot"):
            if fields.get(name) is not None:
                fields[name] = Path(fields[name])
        fields["options"] = Options(**fields["options"])
        fields["command"] = tuple(fields.get("command", ()))
        fields["settings"] = {name: Setting(**setting) for name, setting in fields.get("settings", {}).items()}
        return MountConfig(**fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CacheFsError(f"cannot read the mount's options ({path}: {error}): unmount, and mount again") from error


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Globs):
        return value.patterns
    return str(value)  # a path
