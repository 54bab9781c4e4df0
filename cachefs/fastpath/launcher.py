"""Starting the fast path, attaching pyfuse3 to it, and starting another one when it dies.

The daemon has everything open that a new fast path needs: /dev/fuse, the shared memory, and both ends of the socket for
FUSE messages between the fast path and pyfuse3. If the fast path is killed, no message is lost, because the socket
stays open. If the daemon is killed, the fast path has the same descriptors, and hands them over to the next daemon
(`MountDescriptors.ask`), which attaches a new pyfuse3.
"""

import contextlib
import errno
import logging
import math
import os
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import trio

from cachefs.contract.messages import ATTACH_SAME_PYTHON, Message
from cachefs.errors import CacheFsError
from cachefs.fastpath.answers import Answers
from cachefs.fastpath.connection import MESSAGE_BYTES, parse, send
from cachefs.fastpath.mount_descriptors import MountDescriptors, is_unmounted
from cachefs.fastpath.processes import LOOK_S, PROGRAM, STOP_TIMEOUT_S, is_running, memory_name, running
from cachefs.system import children
from cachefs.system.clock import NANOSECONDS
from cachefs.system.descriptors import closing
from cachefs.system.private_files import opener
from cachefs.system.threads import refusal_is_shortage
from cachefs.system.unix_socket import socket_address

T = TypeVar("T")
log = logging.getLogger(__name__)

SOCKET_BUFFER_BYTES = 4 << 20
_SHORT_LIFE_S = 0.2
"""A fast path that ends sooner is started again after a growing pause; others at once."""
_MAX_PAUSE_S = 5.0
_FIRST_STARTS = 5
"""After so many starts that fail, perhaps because a library is missing, a new mount gives up."""
_SHORTAGES = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ETOOMANYREFS})
"""Errors of a machine that has no process, memory or descriptor left at the moment."""
_SHORTAGE_PAUSE_S = 0.1
_PATIENCE_S = 10.0


async def _end_of(pid: int, pidfd: int) -> None:
    """Return when a process is dead. A thread that waits for the source (FUSE, NFS) may outlive it without an event."""
    while is_running(pid):
        with trio.move_on_after(LOOK_S):
            await trio.lowlevel.wait_readable(pidfd)
            return


@dataclass(eq=False)
class FastPath:
    """The running program of one mount."""

    # dependencies
    mount: MountDescriptors
    path: Path
    """Of the listening socket."""
    _: KW_ONLY
    session: str
    """The parts of the index, as of `Environment.place`."""
    durable: str
    log_path: Path | None
    received: Callable[[Message, int, int, bytes], None]
    """Called with each message (type, a, b, data)."""
    attached: Callable[[], None]
    """Called after each attachment, to the first program or to another one."""
    died: Callable[[], None]
    """Called when the program has ended for any reason."""
    unmounted: Callable[[], None]
    """Called when the mount is gone."""

    def __post_init__(self) -> None:
        # state
        self.pid = self.mount.pid
        self._process: subprocess.Popen[bytes] | None = None
        self._zombies: list[subprocess.Popen[bytes]] = []
        """Dead, except for a thread that waits for the source."""
        self._connection: socket.socket | None = None
        self._was_attached = False
        self._stopping = False
        self._ended = trio.Event()
        self.starts = 0
        """The number of starts of the program."""
        # The daemon keeps both ends open, so that unread messages survive the death of either side.
        self._ours, self._python = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        force = getattr(socket, "SO_SNDBUFFORCE", 32)
        for end in (self._ours, self._python):
            try:
                end.setsockopt(socket.SOL_SOCKET, force, SOCKET_BUFFER_BYTES)
            except PermissionError:  # any size is enough for one message, at most 160 KiB (hazard 5)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)

    def answers(self) -> Answers:
        """Those of the daemon and of this program."""
        return Answers(self.mount.shared, self._python)

    def descriptor_for_pyfuse3(self) -> int:
        """The descriptor that pyfuse3 reads requests from. The caller closes it."""
        return os.dup(self._python.fileno())

    async def replace(self) -> None:
        """Replace the running program by the installed one, which continues with its requests.

        The new one starts first and waits. If any process is killed meanwhile, another one still has the mount open.
        """
        before = self.pid

        async def spawn() -> None:
            self._spawn(after=before)

        pidfd = await self._until_granted(self._open_process, patient=False)
        if pidfd is None:
            return
        with closing(pidfd):
            await self._until_granted(spawn, patient=False)
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, number)
                    signal.pidfd_send_signal(pidfd, signal.SIGCONT)  # a stopped process does not receive the signal
                with trio.move_on_after(STOP_TIMEOUT_S):
                    await _end_of(before, pidfd)
                    return
            os.kill(self.pid, signal.SIGKILL)
            raise CacheFsError(f"the fast path (pid {before}) cannot be ended: it waits in the kernel")

    async def _open_process(self) -> int | None:
        """A pidfd of the running program. None: none is running."""
        try:
            return os.pidfd_open(self.pid) if self.pid else None
        except ProcessLookupError:  # of a predecessor, and dead now
            self.pid = 0
            return None

    async def run(self, *, new: bool, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep a fast path running until the mount is gone. `task_status` starts when one is attached, or at the end.

        `new`: the mount is not in use yet. Raises CacheFsError if the first programs end immediately. A mount in use
        ends if all programs have ended immediately for `--reconnect-timeout`: no request waits for ever.
        """
        try:
            if not await self._run(task_status, new=new):
                task_status.started()
        finally:
            self._ended.set()
        if not self._stopping:
            self.unmounted()

    async def _run(self, task_status: trio.TaskStatus[None], *, new: bool) -> bool:
        """Returns whether one was attached."""
        pause_s = 0.0
        has_started = False
        failing_since: float | None = None
        while not self._stopping and not is_unmounted(self.mount.device):
            pidfd = await self._until_granted(self._running_process, patient=has_started)
            if pidfd is None:
                break
            started = trio.current_time()
            is_attached = False
            with closing(pidfd):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._until_death, pidfd, nursery.cancel_scope)
                    try:
                        await self._until_granted(self._attach, patient=True)
                        is_attached = True
                        if not has_started:
                            has_started = True
                            task_status.started()
                        while True:
                            self.received(*await self._next())
                    except (EOFError, OSError):
                        pass  # it is dying
                    except Exception:  # a bug of ours must not end the mount
                        log.exception("bug in a report of the fast path; starting another")
                        os.kill(self.pid, signal.SIGKILL)
                    await trio.sleep_forever()
            status = self._bury()
            killed = status == -signal.SIGKILL
            if self._stopping or is_unmounted(self.mount.device):
                break
            now = trio.current_time()
            is_short = now - started <= _SHORT_LIFE_S
            if killed or status == os.EX_TEMPFAIL or (is_attached and not is_short):
                failing_since = None
            elif failing_since is None:
                failing_since = started
            reason = f"the fast path ends as soon as it is started, with status {status}: see the log"
            if new and not has_started:
                if not killed and self.starts >= _FIRST_STARTS:
                    raise CacheFsError(reason)
            elif failing_since is not None and now - failing_since > self._timeout_s():
                log.error("the mount ends, because %s", reason)
                break
            log.warning("the fast path has ended; starting another")
            # No pause after a kill, which does not happen in a loop.
            pause_s = 0.0 if killed or not is_short else min(max(0.05, 2 * pause_s), _MAX_PAUSE_S)
            await trio.sleep(pause_s)
        return has_started

    def _timeout_s(self) -> float:
        """How long requests wait for a fast path that cannot start (`--reconnect-timeout`)."""
        return self.mount.shared["reconnect_timeout_ns"] / NANOSECONDS

    async def _running_process(self) -> int:
        """A pidfd of the program, which is started if it is not running."""
        pidfd = await self._open_process()
        if pidfd is None:
            with refusal_is_shortage():
                await trio.to_thread.run_sync(self._end_others)
            self._spawn()
            pidfd = os.pidfd_open(self.pid)  # our child: exists until it is waited for
        return pidfd

    async def _until_granted(self, attempt: Callable[[], Awaitable[T]], *, patient: bool) -> T | None:
        """Retry until the machine has a process, descriptors, memory for it. None: the mount has ended meanwhile.

        `patient`: retry as long as the mount lives. False: raise the error after a while.
        """
        give_up_at = trio.current_time() + (math.inf if patient else _PATIENCE_S)
        said = False
        while True:
            try:
                return await attempt()
            except OSError as error:
                if error.errno not in _SHORTAGES or trio.current_time() >= give_up_at:
                    raise
                if not said:
                    log.warning("the fast path cannot be started or reached, trying again: %s", error.strerror)
                    said = True
            await trio.sleep(_SHORTAGE_PAUSE_S)
            if self._stopping or is_unmounted(self.mount.device):
                return None

    def _end_others(self) -> None:
        """End other programs with the same memory: two would answer the same requests. A stopped one may be left."""
        for other in running(memory_name(f"/proc/self/fd/{self.mount.shared.fd}")):
            log.warning("a fast path of this mount (pid %d) does not answer: ending it", other.pid)
            if not other.kill():
                raise CacheFsError(f"the fast path (pid {other.pid}) cannot be ended: it waits in the kernel")

    def _spawn(self, *, after: int = 0) -> None:
        """`after`: the pid of another program, whose end it waits for."""
        fds = {
            "--device": self.mount.device,
            "--shared": self.mount.shared.fd,
            "--source": self.mount.source,
            "--blob": self.mount.blob,
            "--listener": self.mount.listener.fileno(),
        }

        def command(numbers: Sequence[int]) -> list[str]:
            named = [part for name, fd in zip(fds, numbers, strict=True) for part in (name, str(fd))]
            indexes = ["--session", self.session, "--durable", self.durable]
            return [str(PROGRAM), *named, *indexes, "--after", str(after)]

        with self._log_file() as log_file:
            stderr = None if log_file is None else log_file.fileno()
            self._process = children.start(command, tuple(fds.values()), stderr=stderr)
        self.pid = self._process.pid
        self.starts += 1

    @contextlib.contextmanager
    def _log_file(self) -> Iterator[BinaryIO | None]:
        """None: the daemon's stderr, /dev/null in the background. A log is no condition for serving the mount."""
        file = None
        if self.log_path is not None:
            try:
                file = open(self.log_path, "ab", opener=opener)  # noqa: SIM115
            except (OSError, CacheFsError) as error:
                log.warning("the fast path has no log: %s", error)
        with file or contextlib.nullcontext():
            yield file

    async def _until_death(self, pidfd: int, scope: trio.CancelScope) -> None:
        await _end_of(self.pid, pidfd)
        scope.cancel()

    async def _attach(self) -> None:
        if self._connection is not None:  # of a failed attempt
            self._connection.close()
            self._connection = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        while True:
            try:
                with socket_address(self.path) as address:
                    self._connection.connect(address)
                break
            except BlockingIOError:  # the queue is full because a predecessor died before it accepted
                await trio.sleep(0.01)
        send(
            self._connection,
            Message.ATTACH,
            a=ATTACH_SAME_PYTHON if self._was_attached else 0,
            fds=(self._ours.fileno(), self._python.fileno()),
        )
        while (message := await self._next())[0] is not Message.ATTACHED:
            self.received(*message)  # its threads were working before it was attached
        self._was_attached = True
        self.attached()

    async def _next(self) -> tuple[Message, int, int, bytes]:
        assert self._connection is not None
        while True:
            try:
                data = self._connection.recv(MESSAGE_BYTES)
                break
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._connection)
        if not data:
            raise EOFError
        return parse(data)

    def send(self, kind: Message, a: int = 0, data: bytes = b"", fds: tuple[int, ...] = ()) -> bool:
        """False: it has died; the next one asks again."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                send(self._connection, kind, a, data=data, fds=fds)
                return True
        return False

    def _bury(self) -> int | None:
        """Returns the exit status, negative for a signal; None if another daemon started it."""
        status = None
        if self._process is not None:
            status = self._process.poll()
            if status is None:  # one of its threads waits for the source
                self._zombies.append(self._process)
                status = -signal.SIGKILL
        self._zombies = [process for process in self._zombies if process.poll() is None]
        self._process = None
        self.pid = 0
        if self._connection is not None:
            with contextlib.suppress(OSError):  # its last messages
                while data := self._connection.recv(MESSAGE_BYTES):
                    self.received(*parse(data))
            self._connection.close()
            self._connection = None
        self.died()
        return status

    async def stop(self) -> None:
        """End the program, which first appends what it has fetched."""
        self._stopping = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._ended.is_set():
                break
            if self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)
                    os.kill(self.pid, signal.SIGCONT)  # a stopped process does not receive the signal
            with trio.move_on_after(STOP_TIMEOUT_S):
                await self._ended.wait()

    def close(self) -> None:
        self._ours.close()
        self._python.close()
