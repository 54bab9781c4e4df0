"""Where the suites run: the disk, another FUSE filesystem, and mounts of cachefs."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MODES: dict[str, tuple[str, ...]] = {"none": ("--cache", "none"), "full": (), "mutable": ("--mutable", "**")}
PYTHON = "-python"
"""Ends the names of places without the fast path."""
CHANGED = "-changed"
"""Ends the names of places whose source is changed directly meanwhile."""


@dataclass(frozen=True)
class Place:
    root: Path
    beneath: Path | None
    """Where the source has it."""
    abort: Callable[[], None]
    """Ends what waits for it in the kernel."""


@contextlib.contextmanager
def opened(name: str, base: Path) -> Iterator[Place]:
    """A fresh one, in `base`."""
    source, mounted = base / f"{name}-source", base / f"{name}-mount"
    source.mkdir()
    if name == "disk":
        yield Place(source, None, lambda: None)
        return
    mounted.mkdir()
    cachefs = [sys.executable, "-m", "daemon"]
    if name == "bindfs":
        up = ["bindfs", str(source), str(mounted)]
        down = ["umount", str(mounted)]
    else:
        mode = name.removesuffix(CHANGED).removesuffix(PYTHON)
        without = ["--no-fastpath"] if PYTHON in name else []
        cache = base / f"{name}-cache"
        sizes = ["--cache-dir", str(cache), "--cache-size", "100M"]
        up = [*cachefs, "mount", str(source), str(mounted), *sizes, *MODES[mode], *without]
        down = [*cachefs, "umount", str(mounted)]
    subprocess.run(up, check=True)
    connection = Path(f"/sys/fs/fuse/connections/{os.minor(mounted.stat().st_dev)}")

    def abort() -> None:
        if not connection.exists():
            subprocess.run(["mount", "-t", "fusectl", "none", connection.parent], check=False)
        (connection / "abort").write_text("1")

    try:
        yield Place(mounted, source, abort)
    finally:
        if subprocess.run(down, check=False).returncode:
            subprocess.run(["umount", "-l", mounted], check=False)
