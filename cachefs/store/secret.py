"""The seed of all checksums of a cache, in its file `secret`. Without it the blob cannot be verified."""

import secrets
from pathlib import Path

from cachefs.system import private_files


def read_seed(directory: Path) -> int | None:
    """None: it is lost, or was never made."""
    try:
        secret = bytes.fromhex((directory / "secret").read_text().strip())
    except (OSError, ValueError):
        return None
    return _seed_of(secret) if len(secret) == 16 else None


def make_seed(directory: Path) -> int:
    """Make another one. What has checksums with the last one is lost."""
    secret = secrets.token_bytes(16)
    private_files.write_file(directory / "secret", secret.hex().encode())
    return _seed_of(secret)


def _seed_of(secret: bytes) -> int:
    return int.from_bytes(secret[:8], "little")
