"""The command line for tests, without the start of an interpreter, which costs a test more than most of what it tests.

A process that has imported the program forks for each command. Tests of how the program starts, and of the environment
it starts in, start it themselves.
"""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
MAX_REQUEST_BYTES = 1 << 20


_INHERITED = ("Umask", "Uid", "Gid", "Groups", "SigIgn", "CapPrm", "CapBnd", "NoNewPrivs")


def inherited() -> tuple[object, ...]:
    """What a command inherits from its starter, besides what a request contains."""
    status = Path("/proc/self/status").read_text().splitlines()
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "net", "user", "pid_for_children", "time")]
    lines = [line for line in status if line.split(":")[0] in _INHERITED]
    return *lines, *spaces, Path("/proc/self/limits").read_text(), os.environ.get("LD_PRELOAD")


class CommandServer:
    def __init__(self) -> None:
        self._inherited = inherited()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())], pass_fds=[theirs.fileno()], cwd=REPOSITORY
            )

    def is_as_started_here(self) -> bool:
        """Would a command that this process starts itself inherit the same?"""
        return inherited() == self._inherited

    def run(self, arguments: list[str], timeout_s: float) -> "subprocess.CompletedProcess[str]":
        """As subprocess.run() with `capture_output` and `text`."""
        answers, theirs = socket.socketpair()
        outputs = [os.memfd_create("stdout"), os.memfd_create("stderr")]
        try:
            with theirs:
                request = json.dumps({"arguments": arguments, "environment": dict(os.environ)}).encode()
                socket.send_fds(self._socket, [request], [theirs.fileno(), *outputs])
            with answers, answers.makefile() as lines:
                pid = int(lines.readline())
                answers.settimeout(timeout_s)
                try:
                    status = int(lines.readline())
                except TimeoutError:
                    os.kill(pid, signal.SIGKILL)
                    raise subprocess.TimeoutExpired(arguments, timeout_s) from None
            said = [os.pread(fd, os.fstat(fd).st_size, 0).decode() for fd in outputs]
        finally:
            for fd in outputs:
                os.close(fd)
        return subprocess.CompletedProcess(arguments, status, *said)


@cache
def shared() -> CommandServer:
    """One for all tests of this process; ends with it."""
    return CommandServer()


# --- the server ------------------------------------------------------------------------------------------------------


def main(fd: int) -> None:
    import daemon.cli.main
    import daemon.session  # noqa: F401

    with socket.socket(fileno=fd) as requests:
        requests.set_inheritable(False)
        while True:
            request, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 3)
            if not request:
                return
            if os.fork() == 0:
                requests.close()
                os._exit(_serve(json.loads(request), *fds))
            for each in fds:
                os.close(each)
            while _reap():
                pass


def _reap() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _serve(request: dict[str, object], answer: int, stdout: int, stderr: int) -> int:
    """Tell the pid of the command, then its exit status."""
    pid = os.fork()
    if pid == 0:
        os.close(answer)
        os._exit(_command(request, stdout, stderr))
    os.write(answer, b"%d\n" % pid)
    os.write(answer, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return 0


def _command(request: dict[str, object], stdout: int, stderr: int) -> int:
    from cachefs.system.clock import TIME_OF_DAY
    from daemon.__main__ import main as command

    TIME_OF_DAY.start()
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    null = os.open(os.devnull, os.O_RDONLY)
    for ours, standard in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(ours, standard)
        os.close(ours)
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(standard, "w", closefd=False)) for standard in (1, 2))
    sys.argv = ["cachefs", *request["arguments"]]  # type: ignore[misc]
    try:
        command()
        status: object = 0
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return int(status or 0)  # type: ignore[call-overload, no-any-return]


if __name__ == "__main__":
    main(int(sys.argv[1]))
