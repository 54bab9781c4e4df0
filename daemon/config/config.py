"""What a mount was told: the values that users write, and the file that keeps them for the next daemon."""

import json
import re
from collections.abc import Callable
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
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40, "P": 50}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:i?B)?", re.IGNORECASE)


MAX_SIZE_BYTES = 1 << 60


def parse_size(text: str) -> int:
    """ "10G", "1.5T", "512MiB", "4096" → bytes; units are powers of 1024. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size: use a number with K, M, G, T or P, such as 500G")
    size = int(float(match[1]) * (1 << _UNITS[match[2].upper()]))
    if size > MAX_SIZE_BYTES:
        raise ValueError(f"{text!r} is more than any disk has")
    return size


def format_size(size: int) -> str:
    """What `parse_size` makes that number of: 536870912000 → "500G"."""
    unit = max(
        (u for u, bits in _UNITS.items() if size and size % (1 << bits) == 0), key=_UNITS.__getitem__, default=""
    )
    return f"{size >> _UNITS[unit]}{unit}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One option of a mount, and where it comes from."""

    value: Any
    """As a configuration file would have it; None: there is none."""
    origin: str


@dataclass(frozen=True, slots=True)
class MountConfig:
    """Everything `cachefs mount` was told."""

    source: str
    mountpoint: str
    options: Options
    cache_dir: Path | None = None
    metadata_snapshot: Path | None = None
    """What a new cache starts from."""
    cache_size_bytes: int | None = None
    """None: 90 % of what is free."""
    allow_other: bool = True
    foreground: bool = False
    log_level: str = "info"
    metrics: str | None = None
    """Where they are served: see `exporter.parse_address`."""
    config_file: Path | None = None
    settings: dict[str, Setting] = field(default_factory=dict)
    """By the names of the options."""

    @property
    def cache_place(self) -> Path:
        """The cache directory: as it was given, or where it is by default."""
        return self.cache_dir or locations.default_cache_dir(self.source)

    @property
    def own_places(self) -> dict[str, Path]:
        """What the daemon writes, by what it is called."""
        found = {"cache directory": self.cache_place, "runtime directory": locations.runtime_root()}
        if self.metrics is not None and self.metrics.startswith("/"):
            found["socket of the metrics"] = Path(self.metrics)
        return found


def save(mount_config: MountConfig, path: Path) -> None:
    """For whoever starts the mount's daemon again."""
    private_files.write_file(path, json.dumps(asdict(mount_config), default=_plain, indent=2).encode())


def load(path: Path) -> MountConfig:
    """Raises CacheFsError where there is none that this version understands."""
    try:
        with open(path, encoding="utf-8", opener=private_files.opener) as file:
            fields = json.load(file)
        options = {name: _RESTORE.get(name, _as_it_is)(value) for name, value in fields.pop("options").items()}
        places = [fields.pop(name, None) for name in ("cache_dir", "config_file", "metadata_snapshot")]
        cache_dir, config_file, snapshot = (Path(place) if place is not None else None for place in places)
        settings = {name: Setting(**setting) for name, setting in fields.pop("settings", {}).items()}
        return MountConfig(
            **fields,
            cache_dir=cache_dir,
            config_file=config_file,
            metadata_snapshot=snapshot,
            options=Options(**options),
            settings=settings,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CacheFsError(f"how it was mounted is not known ({path}: {error})") from error


def _as_it_is(value: Any) -> Any:
    return value


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Globs):
        return value.patterns
    return str(value)  # a path


_RESTORE: dict[str, Callable[[Any], Any]] = {
    "graph": tuple,
    "cache": CacheLevel,
    "revalidate": Revalidate,
    "mutable": Globs,
}
