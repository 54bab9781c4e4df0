"""Unix sockets at any path: an address has at most 107 bytes, and the path of a runtime directory may be longer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cachefs.system.descriptors import closing


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """A short name for `path`, to bind or connect to while the block runs. Raises OSError without its directory."""
    with closing(os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        yield f"/proc/self/fd/{directory}/{path.name}"
