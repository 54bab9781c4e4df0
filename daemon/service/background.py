"""Running in the background: the command waits until the mount answers, or receives the error.

The process forks before it starts threads and opens LMDB, which must not be carried across a fork.
"""

import contextlib
import logging
import logging.handlers
import os
import select
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from cachefs.errors import CacheFsError
from cachefs.printable import one_line
from cachefs.system import private_files
from cachefs.system.descriptors import closing
from daemon.output import Interrupted

_READY = b"\n"
LOG_NAME = "daemon.log"
LOG_BYTES = 10 << 20
LOG_FILES = 2
_END_PATIENCE_S = 2.0
"""How long the command waits for the end of a daemon that failed: until then it holds its locks."""
_NO_MESSAGE = (
    "the daemon was killed before it was ready, or ended without a message: see daemon.log in its cache, and the "
    "kernel's log if memory is limited"
)
LOG_LEVELS = ("debug", "info", "warning", "error")
SHORT_FORMAT = "cachefs: %(message)s"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_stderr(level: str) -> None:
    """Log plain lines, or lines for the journal if stderr leads there (sd-daemon(3))."""
    handler = logging.StreamHandler(sys.stderr)
    stderr = os.fstat(sys.stderr.fileno())
    is_journal = os.environ.get("JOURNAL_STREAM") == f"{stderr.st_dev}:{stderr.st_ino}"
    handler.setFormatter(_Journal() if is_journal else _Lines(SHORT_FORMAT))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


def log_to_file(path: Path, level: str) -> None:
    logging.raiseExceptions = False  # a log that cannot be written must not break what it reports
    handler = _PrivateLog(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES - 1, delay=True)
    handler.setFormatter(_Lines(LOG_FORMAT))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


class _PrivateLog(logging.handlers.RotatingFileHandler):
    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=private_files.opener)


class _Lines(logging.Formatter):
    """A message is one line, with unsafe characters in names escaped. A traceback has its own lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(one_line, super().formatException(ei).split("\n")))


class _Journal(_Lines):
    """Each line begins with its priority; the journal adds time and name."""

    def format(self, record: logging.LogRecord) -> str:
        priority = next(p for level, p in _PRIORITIES if record.levelno >= level)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))


Serve = Callable[[Callable[[], None], Callable[[Path], None]], None]
"""serve(ready, claimed): calls `claimed` with the cache directory when that is locked."""


def run_in_background(serve: Serve, log_level: str, *, ends_with_command: bool) -> int:
    """Run `serve` in a daemon process that logs to its cache directory. Returns its pid once it has called `ready`.

    Raises CacheFsError with the reason if it ends before that. `ends_with_command`: SIGINT or SIGTERM to this command
    ends a daemon that is not ready. Otherwise the daemon continues.
    """
    receiving, sending = os.pipe()
    # `serve` handles signals that arrive before it is ready for them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    pid = os.fork()
    if pid == 0:
        os.close(receiving)
        # stderr stays until there is a log: the command may show it.
        os.setsid()
        for number in (signal.SIGINT, signal.SIGHUP):  # from the terminal that it has just left
            if number in signal.sigpending():
                signal.sigwait({number})
        os.chdir("/")
        _to_null(0, 1)
        os._exit(_child(serve, sending, log_level))
    os.close(sending)

    received: set[int] = set()

    def pass_on(number: int, _: object) -> None:
        received.add(number)
        if ends_with_command:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # a stopped daemon receives no signal
        else:
            raise Interrupted("interrupted; the new daemon continues in the background")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with os.fdopen(receiving, "rb") as pipe:
        said = pipe.read()
    if said.endswith(_READY):
        return int(said)
    with closing(os.pidfd_open(pid)) as daemon:  # it may wait in the kernel, for a source that hangs
        select.select([daemon], [], [], _END_PATIENCE_S)
    os.waitpid(pid, os.WNOHANG)
    failed = Interrupted if signal.SIGINT in received else CacheFsError
    raise failed(said.decode(errors="replace") or _NO_MESSAGE)


def _to_null(*fds: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(null, fd)
    os.close(null)


def _child(serve: Serve, sending: int, log_level: str) -> int:
    told = False

    def ready() -> None:
        nonlocal told
        told = True
        tell(str(os.getpid()).encode() + _READY)
        os.close(sending)

    def tell(what: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the command was killed; the mount stays
            os.write(sending, what)

    has_log = False

    def claimed(cache_dir: Path) -> None:
        nonlocal has_log
        has_log = True
        log_to_file(cache_dir / LOG_NAME, log_level)
        _to_null(2)

    try:
        serve(ready, claimed)
        return 0
    except CacheFsError as error:
        reason = str(error)
    except BaseException as error:
        logging.getLogger(__name__).exception("the daemon has failed")
        reason = f"{type(error).__name__}: {error}"
    if not told:
        tell(one_line(reason).encode())
    if has_log:
        logging.getLogger(__name__).error("%s", reason)
    return 1
