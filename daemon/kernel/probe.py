"""Does a mount answer, does a source? Asked by a child process: whoever touches one that hangs, hangs (hazard 20).

An extended attribute that the daemon itself answers is read: a way through the kernel, the fast path and Python, which
the kernel does not cache and which asks nothing of the source. Its name is in the namespace "security", of which the
kernel does not ask who may read it: for one of "user" it would look at the root's mode, which it asks for, and on a
read-write mount the source may have to say that.
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
_ASK_ONCE = ASK + "os.write(1, b'%d' % ask())"


def answer_of_child(code: str, *arguments: str, timeout_s: float) -> bytes | None:
    """What a child writes to standard output that runs this code. None: it takes too long, and is left behind.

    It is killed then and not waited for: it ends when what it waits for does. It is forked, and starts no program: the
    interpreter may lie where the user who runs us cannot read.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for source, target in ((null, 0), (writer, 1), (null, 2)):
                os.dup2(source, target)
            os.closerange(3, 1 << 20)  # nobody is to wait for us, nor any lock or pipe of the parent
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
    """The canonical path. Raises CacheFsError where one on the way does not answer."""
    answer = answer_of_child(_REALPATH, path, timeout_s=timeout_s)
    if not answer:
        raise CacheFsError(f"{path} does not answer")
    return os.fsdecode(answer)


def mode_of(path: str, *, timeout_s: float) -> int:
    """st_mode of what lies there. Raises OSError; TimeoutError also where it does not answer."""
    answer = int(answer_of_child(_MODE, path, timeout_s=timeout_s) or -errno.ETIMEDOUT)
    if answer < 0:
        raise OSError(-answer, os.strerror(-answer))
    return answer


def has_died(mountpoint: str) -> bool:
    """Has the daemon behind this mountpoint gone, and its fast path? Only the kernel says ENOTCONN to this question."""
    answer = answer_of_child(_ASK_ONCE, mountpoint, os.fsdecode(ALIVE), timeout_s=DIED_TIMEOUT_S)
    return answer is not None and answer in (b"%d" % errno.ENOTCONN, b"%d" % errno.ECONNABORTED)
