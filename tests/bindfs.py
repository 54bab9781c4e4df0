"""A FUSE source that can be killed and mounted again."""

import os
import select
import signal
import subprocess
from pathlib import Path

from tests.conftest import Mount, cachefs, mounted_on, wait_for


class Bindfs:
    """A FUSE mount of a directory, such as ceph-fuse makes: it can be killed, and mounted again at the same path."""

    def __init__(self, root: Path, path: Path, options: str = "rw") -> None:
        self.root, self.path, self.options = root, path, options
        self._pid_file = path.with_name("bindfs.pid")
        path.mkdir(exist_ok=True)
        # A child of this process closes copies of its files, and waits for that. The shell has none.
        self._shell = subprocess.Popen(["bash"], stdin=subprocess.PIPE, text=True)
        self.mount()

    def _run(self, command: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(command + "\n")
        self._shell.stdin.flush()

    def mount(self, root: Path | None = None) -> None:
        self._pid_file.write_text("")
        self._run(f"bindfs -f -o {self.options} '{root or self.root}' '{self.path}' & echo $! > '{self._pid_file}'")
        wait_for(lambda: mounted_on(self.path), bool)
        wait_for(self._pid_file.read_text, lambda text: text.endswith("\n"))

    def kill(self) -> None:
        """The mount stays behind, and answers ENOTCONN."""
        ended = os.pidfd_open(self.pid())
        signal.pidfd_send_signal(ended, signal.SIGKILL)
        assert select.select([ended], [], [], 20)[0]
        os.close(ended)

    def pid(self) -> int:
        return int(self._pid_file.read_text())

    def again(self, root: Path | None = None) -> None:
        self._run(f"umount -l '{self.path}'")
        wait_for(lambda: mounted_on(self.path), lambda types: not types)
        self.mount(root)

    def close(self) -> None:
        self._run(f"kill -9 $(cat '{self._pid_file}'); umount -l '{self.path}'; exit")
        self._shell.communicate(timeout=20)


def take_over(m: Mount, how: str) -> None:
    """By a successor of the daemon. `how`: "restart", or anything else for a kill."""
    if how == "restart":
        cachefs("restart", m.path)
        m.pid = int(m.status()["pid"])
    else:
        m.kill()
        m.start()
