"""`cachefs snapshot`: the metadata of a mount, for other nodes."""

import os
import time
from pathlib import Path

import click

from cachefs.client.client import Client
from cachefs.errors import CacheFsError
from daemon.config.parameters import json_option, mountpoint_argument
from daemon.output import print_json, say


@click.group()
def snapshot() -> None:
    """Export the metadata of a mount. Other nodes read them from one file, instead of asking the metadata server.

    \b
    Example:
      cachefs snapshot export /data/imagenet /ceph/imagenet.snapshot
    """


@snapshot.command()
@mountpoint_argument
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@json_option
def export(mountpoint: str, file: Path, as_json: bool) -> None:
    """Write the pinned metadata of a mount to FILE. Run `cachefs warmup --metadata-only` first.

    A mount with --metadata-snapshot FILE uses the metadata as of the export: export again when the dataset changes.
    Each fetch compares the file with the snapshot; if it differs, the read fails with ESTALE and the metadata are
    refreshed.

    \b
    Example:
      cachefs warmup /data/imagenet --metadata-only
      cachefs snapshot export /data/imagenet /ceph/imagenet.snapshot
      cachefs mount /ceph/imagenet /data/imagenet --read-only --metadata-snapshot /ceph/imagenet.snapshot
    """
    from cachefs.store.snapshot import export as export_index  # numpy is slow to load

    client = Client(mountpoint)
    client.flush()
    started = time.monotonic()
    index = client.cache_dir() / "index"
    if not os.access(index, os.R_OK):
        raise CacheFsError(f"cannot read {index}: only root and the user who mounted may")
    names = export_index(index, file.absolute(), client.status()["source"])
    seconds = time.monotonic() - started
    if as_json:
        print_json({"file": str(file), "names": names, "bytes": file.stat().st_size, "seconds": round(seconds, 3)})
        return
    each = f", {file.stat().st_size / names:.1f} bytes each" if names else ""
    say(f"{file}: {names:,} names{each}, {seconds:.1f} s")
