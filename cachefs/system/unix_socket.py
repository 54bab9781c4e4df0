"""Unix sockets at any path: an address is 107 bytes at most, and a user's runtime directory may be longer than that."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """A short name for `path`, to bind or connect to while the block runs. Raises OSError without its directory."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
