"""Probes for the watchdog of the service manager whether the mount still answers. One child does all probes.

Not in probe.py, because commands need that, and loading trio takes a third of their start-up time.
"""

import os
import subprocess
import sys

import trio

from cachefs.client.client import ALIVE
from daemon.kernel.probe import ASK

_ASK_OFTEN = ASK + "while os.read(0, 1): os.write(1, b'0' if ask() else b'1')"


class Probe:
    def __init__(self, mountpoint: str) -> None:
        self._mountpoint = mountpoint
        self._process: trio.Process | None = None
        self._asked = False

    async def answers(self, timeout_s: float) -> bool:
        """Does the mount answer in time? A probe that is not answered is not repeated while it waits."""
        with trio.move_on_after(timeout_s):
            try:
                if self._process is None or self._process.poll() is not None:
                    self._process, self._asked = await self._start(), False
                assert self._process.stdin is not None and self._process.stdout is not None
                if not self._asked:
                    self._asked = True
                    await self._process.stdin.send_all(b"?")
                answer = await self._process.stdout.receive_some(1)
            except (OSError, trio.BrokenResourceError):  # no memory for a child, or it was killed
                answer = b""
            self._asked = False
            return bytes(answer) == b"1"
        return False

    async def _start(self) -> trio.Process:
        """The child ends when its input is closed, which happens when this process ends."""
        command = [sys.executable, "-I", "-S", "-c", _ASK_OFTEN, self._mountpoint, os.fsdecode(ALIVE)]
        return await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/"
        )
