"""`cachefs trace`: record what a job reads, for `cachefs simulate`."""

import signal
import time
from contextlib import closing
from pathlib import Path

import click

from cachefs.client import mount_table
from cachefs.errors import CacheFsError
from cachefs.tools.recorder import TraceRecorder
from cachefs.tools.trace import TraceWriter
from daemon.config.parameters import SECONDS_OR_INFINITY, SIZE, mountpoint_argument
from daemon.kernel import mounts
from daemon.output import say


@click.group()
def trace() -> None:
    """Record which files jobs read. `cachefs simulate` replays them with other cache sizes and policies.

    \b
    Example:
      cachefs trace record /data/imagenet --output job.trace
    """


@trace.command()
@mountpoint_argument
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default="cachefs.trace",
    help="Write the trace here. When it is full, it is renamed to PATH.1, and a new one begins.",
)
@click.option("--max-size", type=SIZE, default="1G", help="Limit the size of both files together.")
@click.option("--seconds", type=SECONDS_OR_INFINITY, default="inf", help="Stop after S seconds.")
def record(mountpoint: str, output: Path, max_size: int, seconds: float) -> None:
    """Record which files are opened on a mount, until Ctrl-C, SIGTERM or unmount. Needs root.

    \b
    Example:
      cachefs trace record /data/imagenet --output job.trace
      cachefs simulate job.trace --cache 100G,200G,500G
    """
    place = mount_table.absolute(mountpoint)
    mounts.check_mounted(place)
    stopped = []  # by a signal, which may arrive in the handler of another one: an Event has a lock
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(number))
    until = time.monotonic() + seconds
    try:
        writer = TraceWriter(output, max_bytes=max_size)
        with closing(TraceRecorder(place, writer)) as recorder:
            say(f"recording {place}", err=True)
            recorder.run(lambda: not stopped and time.monotonic() < until and mount_table.is_mounted(place))
            recorder.record_waiting()
            writer.close()
    except OSError as error:
        raise CacheFsError(f"cannot write {output}: {error.strerror}") from error
    lost = f"; the kernel dropped events {recorder.lost} times" if recorder.lost else ""
    say(f"{writer.accesses:,} files opened, in {output}{lost}")
