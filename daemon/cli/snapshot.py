"""`cachefs snapshot`: the metadata of a mount, for other nodes."""

import os
import time
from pathlib import Path

import click

from cachefs.client.client import Client
from cachefs.errors import CacheFsError
from daemon.config.parameters import Place, one_line_errors
from daemon.output import say


@click.group()
def snapshot() -> None:
    """Metadata of a mount as one file: a thousand nodes read that instead of asking the metadata server each.

    \b
    Example:
      cachefs snapshot export /data/imagenet /ceph/imagenet.snapshot
    """


@snapshot.command()
@click.argument("mountpoint", type=Place())
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@one_line_errors
def export(mountpoint: str, file: Path) -> None:
    """Write what is pinned of a mount to FILE. Run `cachefs warmup --metadata-only` before.

    A node that mounts with it believes it as if it had seen it at that moment: make a new one when the dataset changes.
    What is fetched is compared with it; a file that differs fails with ESTALE and is looked at again.

    \b
    Example:
      cachefs warmup /data/imagenet --metadata-only
      cachefs snapshot export /data/imagenet /ceph/imagenet.snapshot
      cachefs mount /ceph/imagenet /data/imagenet --read-only --metadata-snapshot /ceph/imagenet.snapshot
    """
    from cachefs.store.snapshot import export as export_index  # numpy takes its time to load

    client = Client(mountpoint)
    settings = client.settings()
    client.flush()
    started = time.monotonic()
    index = Path(settings["cache-dir"]["value"]) / "index"
    if not os.access(index, os.R_OK):
        raise CacheFsError(f"{index} cannot be read: only root and the user who mounted may")
    names = export_index(index, file.absolute(), settings["source"]["value"])
    size = file.stat().st_size
    each = f", {size / names:.1f} bytes each" if names else ""
    say(f"{file}: {names:,} names{each}, {time.monotonic() - started:.1f} s")
