"""`cachefs verify` and `cachefs gc`: maintenance of caches on the local disk."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from cachefs.client import mount_table
from cachefs.client.client import Client
from cachefs.client.locations import cache_root
from cachefs.errors import CacheFsError
from cachefs.printable import one_line
from cachefs.system import private_files
from cachefs.system.claims import is_locked
from daemon.config.parameters import json_option, mountpoint_argument
from daemon.output import print_json, readable_size, say


@click.command()
@mountpoint_argument
@click.option("--repair", is_flag=True, help="Drop corrupt records. They are fetched again when they are read.")
@json_option
def verify(mountpoint: str, repair: bool, as_json: bool) -> None:
    """Verify the checksums of a mount's cache. The mount stays in use.

    Every read checks what it reads; this command finds a failing disk earlier. The exit status is 1 if there are
    corrupt records and --repair was not given.

    \b
    Example:
      cachefs verify /data/imagenet --repair
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from cachefs.store.verify import BadRecord, Verified, verify

    client = Client(mount_table.containing(mountpoint))
    directory = client.cache_dir()
    client.flush()
    bad: list[BadRecord] = []
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=client.status()["cached_bytes"])
        done = Verified()
        for found in verify(directory, done, lambda: bar.update(task, completed=done.bytes)):
            bad.append(found)
            bar.console.print(
                one_line(f"inode {found.inode}, bytes from {found.offset:,}: {found.reason}"),
                highlight=False,
                markup=False,
            )
    if bad and repair:
        client.drop([(each.inode, each.offset, each.blob_offset) for each in bad])
    if as_json:
        corrupt = [{"inode": each.inode, "offset": each.offset, "reason": each.reason} for each in bad]
        counts = {"records": done.records, "bytes": done.bytes, "without_file": done.orphans}
        print_json({**counts, "corrupt": corrupt, "dropped": len(bad) if repair else 0})
    else:
        found_bytes = readable_size(done.bytes)
        say(f"{done.records:,} records, {found_bytes}: {len(bad):,} corrupt, {done.orphans:,} of files that are gone")
        if bad and repair:
            say(f"{len(bad):,} dropped; they will be fetched again when they are read")
    if bad and not repair:
        sys.exit(1)


MAX_IDENTITY_BYTES = 64 << 10


def caches(root: Path) -> Iterator[tuple[Path, str, int]]:
    """(path, source, size in bytes) of the caches beneath a directory.

    Directories that another user made are left out: their content may be anything.
    """
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        try:
            if path.is_symlink():
                continue
            private_files.check_own(path)
            with open(private_files.open_given(path / "cache.json"), "rb") as file:
                source = str(json.loads(file.read(MAX_IDENTITY_BYTES))["source"])
            size = sum(each.lstat().st_blocks * 512 for each in path.rglob("*"))
        except (CacheFsError, OSError, ValueError, KeyError, TypeError):
            continue
        yield path, source, size


def is_in_use(path: Path) -> bool:
    try:
        return is_locked(path / "lock")
    except FileNotFoundError:
        return False


@click.command()
@click.option("--delete", is_flag=True, help="Delete the caches instead of listing them.")
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Search this directory. [default: /var/cache/cachefs for root, $XDG_CACHE_HOME/cachefs for users]",
)
@json_option
def gc(delete: bool, root: Path | None, as_json: bool) -> None:
    """List or delete caches whose source does not exist.

    A source that is not mounted looks the same as one that was deleted: check the list before you use --delete.

    \b
    Example:
      cachefs gc
      cachefs gc --delete
    """
    found: list[dict[str, Any]] = []
    for path, source, size in caches(root or cache_root()):
        if os.path.isdir(source) or is_in_use(path):
            continue
        if not as_json:
            say(f"{path}: {readable_size(size)}, source {source} does not exist")
        if delete:
            try:
                shutil.rmtree(path)
            except OSError as error:
                raise CacheFsError(f"cannot delete {path}: {error.strerror or error}") from error
        found.append({"path": str(path), "source": source, "bytes": size})
    if as_json:
        print_json({"caches": found, "deleted": delete})
        return
    done = "deleted" if delete else "run with --delete to delete them"
    freed = readable_size(sum(each["bytes"] for each in found))
    say(f"{len(found)} caches, {freed}: {done}" if found else "nothing to delete: no source is missing")
