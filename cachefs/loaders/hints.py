"""Announces files to the cachefs mounts that they lie on. Files elsewhere are passed over."""

import os
from collections.abc import Iterable

from cachefs.client import Client, mount_table
from cachefs.errors import CacheFsError

TIMEOUT_S = 5.0
"""Reading waits for the daemon's answer, at most this long, once for each mount that does not answer."""


class Hints:
    def __init__(self) -> None:
        self._announced: set[str] = set()
        self._refused: set[str] = set()
        """Mounts whose daemon does not take hints of this user, or does not answer. Reading works without hints."""

    def announce(self, paths: Iterable[str]) -> None:
        """Each file once. The daemon fetches them after those that others announced."""
        by_mount: dict[str, list[str]] = {}
        for path in paths:
            if path not in self._announced:
                self._announced.add(path)
                real = os.path.realpath(path)  # the daemon does not follow symlinks
                try:
                    by_mount.setdefault(mount_table.split(real)[0], []).append(real)
                except (CacheFsError, OSError):
                    continue
        for mountpoint, files in by_mount.items():
            if mountpoint not in self._refused:
                try:
                    Client(mountpoint, timeout_s=TIMEOUT_S).will_read(files, replace=False)
                except CacheFsError:
                    self._refused.add(mountpoint)
