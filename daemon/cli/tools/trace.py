"""`cachefs trace`: what a job reads, for `cachefs simulate`."""

import signal
import time
from pathlib import Path
from types import FrameType

import click

from cachefs.client import mount_table
from cachefs.errors import CacheFsError
from cachefs.tools.recorder import TraceRecorder
from cachefs.tools.trace import TraceWriter
from daemon.config.parameters import Place, Seconds, Size, one_line_errors
from daemon.kernel import mounts
from daemon.output import say


@click.group()
def trace() -> None:
    """Traces of what jobs read: what would a cache of another size, or another policy, have done for them?

    \b
    Example:
      cachefs trace record /data/imagenet --output job.trace
    """


@trace.command()
@click.argument("mountpoint", type=Place())
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default="cachefs.trace",
    show_default=True,
    help="The trace; when it is full it goes on anew, and the one before is kept beside it.",
)
@click.option("--max-size", type=Size(), default="1G", show_default=True, help="Of both together.")
@click.option("--seconds", type=Seconds(allow_infinity=True), default="inf", metavar="S", help="Stop after so long.")
@one_line_errors
def record(mountpoint: str, output: Path, max_size: int, seconds: float) -> None:
    """Record which files are opened on a mount, until Ctrl-C, SIGTERM or the unmount. Needs root.

    \b
    Example:
      cachefs trace record /data/imagenet --output job.trace
      cachefs simulate job.trace --cache 100G,200G,500G
    """
    place = mount_table.absolute(mountpoint)
    mounts.check_mounted(place)
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    until = time.monotonic() + seconds
    try:
        writer = TraceWriter(output, max_bytes=max_size)
        with TraceRecorder(place, writer) as recorder:
            say(f"recording {place}", err=True)
            recorder.run(lambda: not stopped and time.monotonic() < until and mount_table.is_mounted(place))
            recorder.record_waiting()
            writer.close()
    except OSError as error:
        raise CacheFsError(f"cannot write {output}: {error.strerror}") from error
    lost = f"; {recorder.lost} times the kernel had more than could be recorded" if recorder.lost else ""
    say(f"{writer.accesses:,} files opened, in {output}{lost}")
