"""A real mount, driven by the machine: system calls of this process, and commands over its control socket."""

import errno
import json
import os
import select
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cachefs.client.client import Client
from cachefs.errors import CacheFsError
from tests.conftest import REPOSITORY, drop_caches_of

OURS = [sys.executable, "-m", "daemon"]


class Mounted:
    def __init__(self, program: list[str], source: Path, place: Path, arguments: list[str]) -> None:
        """`program`: the command line of a cachefs. `place`: an empty directory."""
        self._program = program
        self._source, self._cache, self._arguments = source, place / "cache", arguments
        self._at = place / "mnt"
        self._at.mkdir()
        self.start()

    def _run(self, *arguments: object) -> None:
        done = subprocess.run(
            [*self._program, *map(str, arguments)], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{arguments} exited {done.returncode}: {done.stderr}"

    # --- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._run("mount", self._source, self._at, "--cache-dir", self._cache, *self._arguments)

    def stop(self) -> None:
        self._run("umount", self._at)

    def remount(self) -> None:
        self.stop()
        self.start()

    def crash(self) -> None:
        """The daemon is killed, and replaced; the mount lives on where there is a fast path."""
        pid = int(self._status()["pid"])
        fd = os.pidfd_open(pid)
        os.kill(pid, 9)
        select.select([fd], [], [])
        os.close(fd)
        self.start()

    def lose_index(self) -> None:
        self.stop()
        shutil.rmtree(self._cache / "index")
        self.start()

    def end(self) -> None:
        with suppress(AssertionError):
            self.stop()
            return
        subprocess.run(["umount", "--lazy", self._at], check=False)

    def _status(self) -> dict[str, Any]:
        command = [*self._program, "status", "--json", str(self._at)]
        return dict(json.loads(subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout))

    # --- commands --------------------------------------------------------------------------------------------------

    def _command(self, name: str, path: str) -> None:
        """Fails with ENOENT, whatever the reason: what is not known cannot be evicted."""
        try:
            if self._program == OURS:
                getattr(Client(self._at), name)([self._at / path])
            else:
                self._run(name, self._at / path)
        except (CacheFsError, AssertionError) as error:
            raise FileNotFoundError(errno.ENOENT, str(error)) from error

    def invalidate(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._command("invalidate", path)

    def evict(self, path: str) -> None:
        self._command("evict", path)

    def unpin(self, path: str) -> None:
        self._command("unpin", path)

    def shrink(self, _: float) -> None:
        drop_caches_of(self._at)

    def pass_time(self, seconds: float) -> None:
        time.sleep(seconds)

    # --- system calls ----------------------------------------------------------------------------------------------

    def stat(self, path: str) -> tuple[int, int]:
        found = os.lstat(self._at / path)
        return found.st_mode, found.st_size

    def open(self, path: str, flags: int) -> int:
        """Of a file: a directory is EISDIR, however it is opened."""
        fd = os.open(self._at / path, flags, 0o644)
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.close(fd)
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return fd

    def read(self, file: int, offset: int, length: int) -> bytes:
        return os.pread(file, length, offset)

    def write(self, file: int, offset: int, data: bytes) -> int:
        return os.pwrite(file, data, offset)

    def close(self, file: int) -> None:
        os.close(file)

    def listdir(self, path: str) -> list[str]:
        """A listing that has found its directory replaced gets ESTALE, and no path is walked again for it."""
        try:
            return os.listdir(self._at / path)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        return os.listdir(self._at / path)

    def truncate(self, path: str, size: int) -> None:
        os.truncate(self._at / path, size)

    def mkdir(self, path: str) -> None:
        os.mkdir(self._at / path)

    def unlink(self, path: str) -> None:
        os.unlink(self._at / path)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at / path)

    def rename(self, old: str, new: str) -> None:
        os.rename(self._at / old, self._at / new)

    def link(self, old: str, new: str) -> None:
        os.link(self._at / old, self._at / new)
