"""`python -m tests.walks.traced LOG PROGRAM ARGUMENT…` is `cachefs ARGUMENT…`, and writes each function of ours that it
enters to LOG, a line each: FILE FUNCTION. PROGRAM is the fast path, which does the same with FASTPATH_TRACE."""

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from cachefs.fastpath import launcher, processes
from daemon.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[2]
ROOMS = tuple(f"{REPOSITORY / room}/" for room in ("cachefs", "daemon", "policies"))


def trace(log: str) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOMS):
            os.write(fd, f"{code.co_filename.removeprefix(f'{REPOSITORY}/')} {code.co_qualname}\n".encode())

    threading.setprofile(note)
    sys.setprofile(note)


if __name__ == "__main__":
    processes.PROGRAM = launcher.PROGRAM = Path(sys.argv[2])
    trace(sys.argv[1])
    main(sys.argv[3:], "cachefs")
