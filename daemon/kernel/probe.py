"""Probes whether a mount or a source answers, in a child process: a process that accesses one that hangs, hangs as well
(hazard 20).

A mount is probed by an extended attribute that the daemon itself answers. The request goes through the kernel, the fast
path and Python; the kernel does not cache it, and the source is not asked. The name is in the namespace "security", for
which the kernel checks no permissions. For a name in "user" it would check the mode of the root, which on a read-write
mount may need an answer of the source.
"""

import errno
import os
import select
import signal
import sys
import time

from cachefs.client.client import ALIVE
from cachefs.errors import CacheFsError

DIED_TIMEOUT_S = 10.0
ASK = """
import os, sys
def ask():
    try:
        os.getxattr(sys.argv[1], sys.argv[2])
        return 0
    except OSError as error:
        return error.errno
"""
_REALPATH = "import os, sys; os.write(1, os.fsencode(os.path.realpath(sys.argv[1])))"
_MODE = """
import os, sys
try:
    os.write(1, b"%d" % os.stat(sys.argv[1]).st_mode)
except OSError as error:
    os.write(1, b"-%d" % error.errno)
"""
_MKDIR = """
import os, sys
try:
    os.mkdir(sys.argv[1])
    os.chmod(sys.argv[1], 0o755)
    os.write(1, b"0")
except OSError as error:
    os.write(1, b"-%d" % error.errno)
"""
_ASK_ONCE = ASK + "os.write(1, b'%d' % ask())"


def answer_of_child(code: str, *arguments: str, timeout_s: float) -> bytes | None:
    """Run code in a child, and return what it writes to standard output. None: it takes too long, and is abandoned.

    An abandoned child is killed and not waited for: it ends when its system call does. The child is forked, and
    executes no program, because the user may not be able to read the interpreter.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for source, target in ((null, 0), (writer, 1), (null, 2)):
                os.dup2(source, target)
            os.closerange(3, 1 << 20)  # keep no lock or pipe of the parent open
            sys.argv = ["-c", *arguments]
            exec(code, {})
        finally:
            os._exit(0)
    os.close(writer)
    answer = b""
    ends_s = time.monotonic() + timeout_s
    with open(reader, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, ends_s - time.monotonic()))[0]:
            piece = pipe.read(1 << 16)
            if not piece:
                os.waitpid(child, 0)
                return answer
            answer += piece
    os.kill(child, signal.SIGKILL)
    return None


def realpath(path: str, *, timeout_s: float) -> str:
    """The canonical path. Raises CacheFsError if a directory on the way does not answer."""
    answer = answer_of_child(_REALPATH, path, timeout_s=timeout_s)
    if not answer:
        raise CacheFsError(f"{path} does not answer")
    return os.fsdecode(answer)


def mode_of(path: str, *, timeout_s: float) -> int:
    """st_mode of a path. Raises OSError, and TimeoutError if it does not answer."""
    return _number(_MODE, path, timeout_s)


def make_directory(path: str, *, timeout_s: float) -> None:
    """With mode 0755. Raises as `mode_of`."""
    _number(_MKDIR, path, timeout_s)


def _number(code: str, path: str, timeout_s: float) -> int:
    answer = int(answer_of_child(code, path, timeout_s=timeout_s) or -errno.ETIMEDOUT)
    if answer < 0:
        raise OSError(-answer, os.strerror(-answer))
    return answer


def has_died(mountpoint: str) -> bool:
    """Are the daemon of this mountpoint and its fast path gone? Only the kernel answers this request with ENOTCONN."""
    answer = answer_of_child(_ASK_ONCE, mountpoint, os.fsdecode(ALIVE), timeout_s=DIED_TIMEOUT_S)
    return answer is not None and answer in (b"%d" % errno.ENOTCONN, b"%d" % errno.ECONNABORTED)
