"""Does a mount answer? Asked by a child process: whoever touches a mount that hangs, hangs (hazard 20).

An extended attribute that the daemon itself answers is read: a way through the kernel, the fast path and Python, which
the kernel does not cache and which asks nothing of the source.
"""

import os
import subprocess
import sys

import trio

from cachefs.contents import ALIVE

_CHILD = """
import os, sys
while os.read(0, 1):
    try:
        answer = b"1" if os.getxattr(sys.argv[1], sys.argv[2]) else b"0"
    except OSError:
        answer = b"0"
    os.write(1, answer)
"""


class Probe:
    def __init__(self, mountpoint: str) -> None:
        self._mountpoint = mountpoint
        self._process: trio.Process | None = None
        self._asked = False

    async def answers(self, timeout_s: float) -> bool:
        """Within so many seconds. A question that was not answered is not asked again while it waits."""
        with trio.move_on_after(timeout_s):
            try:
                if self._process is None or self._process.poll() is not None:
                    self._process, self._asked = await self._start(), False
                assert self._process.stdin is not None and self._process.stdout is not None
                if not self._asked:
                    self._asked = True
                    await self._process.stdin.send_all(b"?")
                answer = await self._process.stdout.receive_some(1)
            except (OSError, trio.BrokenResourceError):  # no room for another process; or it was killed
                answer = b""
            self._asked = False
            return bytes(answer) == b"1"
        return False

    async def _start(self) -> trio.Process:
        """It ends when our end of its input is closed: with us."""
        command = [sys.executable, "-I", "-S", "-c", _CHILD, self._mountpoint, os.fsdecode(ALIVE)]
        return await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/"
        )
