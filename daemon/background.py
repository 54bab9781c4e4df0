"""Going to the background: the caller waits until the mount answers, or hears why it does not.

The process forks before any thread is started and before LMDB is opened, which must not be carried across a fork.
"""

import logging
import logging.handlers
import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path

from cachefs import private_files
from cachefs.errors import CacheFsError

_READY = b"\n"
LOG_NAME = "daemon.log"
LOG_BYTES = 10 << 20
LOG_FILES = 2
LOG_LEVELS = ("debug", "info", "warning", "error")
SHORT_FORMAT = "cachefs: %(message)s"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_stderr(level: str) -> None:
    """Lines for people, or for the journal where stderr leads there (sd-daemon(3))."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Journal() if _leads_to_journal(sys.stderr.fileno()) else logging.Formatter(SHORT_FORMAT))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


def log_to_file(path: Path, level: str) -> None:
    logging.raiseExceptions = False  # a log that cannot be written must not break what it reports
    handler = _PrivateLog(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES - 1, delay=True)
    logging.basicConfig(handlers=[handler], level=level.upper(), format=LOG_FORMAT, force=True)


class _PrivateLog(logging.handlers.RotatingFileHandler):
    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=private_files.opener)


def set_log_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())


class _Journal(logging.Formatter):
    """Each line begins with its priority; the journal has the time and the name."""

    def format(self, record: logging.LogRecord) -> str:
        priority = next(p for level, p in _PRIORITIES if record.levelno >= level)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))


def _leads_to_journal(fd: int) -> bool:
    found = os.fstat(fd)
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


Serve = Callable[[Callable[[], None], Callable[[Path], None]], None]
"""serve(ready, claimed): `claimed` is told the cache directory as soon as that is known to be ours."""


def run_in_background(serve: Serve, log_level: str) -> int:
    """Run `serve` in a daemon process that logs to its cache directory. Returns its pid once it has called `ready`.

    Raises CacheFsError with the reason where it ends before that.
    """
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receiving)
        _become_daemon()
        os._exit(_child(serve, sending, log_level))
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        said = pipe.read()
    if said.endswith(_READY):
        return int(said)
    os.waitpid(pid, 0)
    raise CacheFsError(said.decode(errors="replace") or "the daemon ended without a word")


def _become_daemon() -> None:
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def _child(serve: Serve, sending: int, log_level: str) -> int:
    told = False

    def ready() -> None:
        nonlocal told
        told = True
        os.write(sending, str(os.getpid()).encode() + _READY)
        os.close(sending)

    try:
        serve(ready, lambda cache_dir: log_to_file(cache_dir / LOG_NAME, log_level))
        return 0
    except CacheFsError as error:
        reason = str(error)
    except BaseException as error:
        logging.getLogger(__name__).exception("the daemon ends")
        reason = f"{type(error).__name__}: {error}"
    if not told:
        os.write(sending, reason.encode())
    logging.getLogger(__name__).error("%s", reason)
    return 1
