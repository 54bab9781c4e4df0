"""Starting the fast path, attaching pyfuse3 to it, and starting another when it dies.

The daemon holds everything that a successor needs: /dev/fuse, the shared memory, both ends of the socket that carries
the FUSE protocol between the fast path and pyfuse3. When the fast path is killed no message is lost, because the socket
lives on. When the daemon is killed the fast path holds the same things, and hands them over to the next daemon
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
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import trio

from cachefs.contract.messages import ATTACH_SAME_PYTHON, Message
from cachefs.errors import CacheFsError
from cachefs.fastpath.connection import MESSAGE_BYTES, parse, send
from cachefs.fastpath.mount_descriptors import MountDescriptors, is_unmounted
from cachefs.fastpath.processes import LOOK_S, PROGRAM, STOP_TIMEOUT_S, is_running, memory_name, running
from cachefs.system.private_files import opener
from cachefs.system.threads import is_refused
from cachefs.system.unix_socket import socket_address

T = TypeVar("T")
log = logging.getLogger(__name__)

SOCKET_BUFFER_BYTES = 4 << 20
_SETTLED_S = 0.2
"""A fast path that lived this long is started again at once; younger ones after a pause that grows."""
_MAX_PAUSE_S = 5.0
_FIRST_STARTS = 5
"""So often it may end by itself before a new mount gives up: a library is missing, or the like."""
_SHORTAGES = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ETOOMANYREFS})
"""What a machine answers that has no process, memory or descriptor to give at the moment."""
_SHORTAGE_PAUSE_S = 0.1
_PATIENCE_S = 10.0


async def _end_of(pid: int, pidfd: int) -> None:
    """Return when a process is dead. A thread that the source holds (FUSE, NFS) outlives it, and no event says so."""
    while is_running(pid):
        with trio.move_on_after(LOOK_S):
            await trio.lowlevel.wait_readable(pidfd)


class FastPath:
    """The running program of one mount."""

    def __init__(
        self,
        held: MountDescriptors,
        path: Path,
        *,
        session: Path,
        durable: Path,
        log_path: Path | None,
        received: Callable[[Message, int, int, bytes], None],
        attached: Callable[[], None],
        died: Callable[[], None],
        unmounted: Callable[[], None],
    ) -> None:
        """`path`: of the listening socket. `received`: told of each message (type, a, b, data).

        `attached`: the program that runs, or another one than before, is there.
        `died`: the program has ended, in whatever it was doing. `unmounted`: the mount is gone.
        """
        # dependencies
        self._held = held
        self._path = path
        self._session = session
        self._durable = durable
        self._log_path = log_path
        self._received = received
        self._on_attached = attached
        self._died = died
        self._unmounted = unmounted
        # state
        self._pid = held.pid
        self._process: subprocess.Popen[bytes] | None = None
        self._zombies: list[subprocess.Popen[bytes]] = []
        """Dead, but for a thread that the source holds."""
        self._connection: socket.socket | None = None
        self._attached = False
        self._stopping = False
        self._ended = trio.Event()
        self.starts = 0
        """How often the program was started."""
        # Both ends: a message that either side has not read yet outlives both.
        self._ours, self._python = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        force = getattr(socket, "SO_SNDBUFFORCE", 32)
        for end in (self._ours, self._python):
            try:
                end.setsockopt(socket.SOL_SOCKET, force, SOCKET_BUFFER_BYTES)
            except PermissionError:  # what there is must do: no message is larger than 160 KiB (hazard 5)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)

    @property
    def pid(self) -> int:
        return self._pid

    def descriptor_for_pyfuse3(self) -> int:
        """From which requests are read. The caller closes it."""
        return os.dup(self._python.fileno())

    async def replace(self) -> None:
        """End the program that runs, and start the one that is installed. Its requests go on with that.

        The new one starts first and waits. If any process is killed meanwhile, another one still holds the mount.
        """
        before = self._pid

        async def spawn() -> None:
            self._spawn(after=before)

        pidfd = await self._until_granted(self._open_process, patient=False)
        if pidfd is None:
            return
        try:
            await self._until_granted(spawn, patient=False)
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, number)
                    signal.pidfd_send_signal(pidfd, signal.SIGCONT)  # one that was stopped hears nothing
                with trio.move_on_after(STOP_TIMEOUT_S):
                    await _end_of(before, pidfd)
                    return
            os.kill(self._pid, signal.SIGKILL)
            raise CacheFsError(f"the fast path (pid {before}) cannot be ended: it waits in the kernel")
        finally:
            os.close(pidfd)

    async def _open_process(self) -> int | None:
        """A pidfd of the program that runs. None: none does."""
        try:
            return os.pidfd_open(self._pid) if self._pid else None
        except ProcessLookupError:  # inherited, and dead by now
            self._pid = 0
            return None

    async def run(self, *, new: bool, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep a fast path running until the mount is gone. Started when one is attached, or the mount gone.

        `new`: nobody uses the mount yet. Raises CacheFsError if the first ones end as soon as they are started.
        """
        try:
            if not await self._run(task_status, _FIRST_STARTS if new else math.inf):
                task_status.started()
        finally:
            self._ended.set()
        if not self._stopping:
            self._unmounted()

    async def _run(self, task_status: trio.TaskStatus[None], most_starts: float) -> bool:
        """Was one attached?"""
        pause_s = 0.0
        told = False
        while not self._stopping and not is_unmounted(self._held.device):
            started = trio.current_time()
            pidfd = await self._until_granted(self._running_process, patient=told)
            if pidfd is None:
                break
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._until_death, pidfd, nursery.cancel_scope)
                    try:
                        await self._until_granted(self._attach, patient=True)
                        if not told:
                            told = True
                            task_status.started()
                        while True:
                            self._received(*await self._next())
                    except (EOFError, OSError):
                        pass  # it is about to die
                    except Exception:  # a mount does not end for a bug of ours
                        log.exception("bug in a report of the fast path; starting another")
                        os.kill(self._pid, signal.SIGKILL)
                    await trio.sleep_forever()
            finally:
                os.close(pidfd)
            status = self._bury()
            killed = status == -signal.SIGKILL
            if self._stopping or is_unmounted(self._held.device):
                break
            if not told and not killed and self.starts >= most_starts:
                raise CacheFsError(f"the fast path ends as soon as it is started, with status {status}: see the log")
            log.warning("the fast path has ended; starting another")
            lived = trio.current_time() - started
            # Only what ends by itself is kept from doing so all the time.
            pause_s = 0.0 if killed or lived > _SETTLED_S else min(max(0.05, 2 * pause_s), _MAX_PAUSE_S)
            await trio.sleep(pause_s)
        return told

    async def _running_process(self) -> int:
        """A pidfd of the program, which is started if none runs."""
        pidfd = await self._open_process()
        if pidfd is None:
            try:
                await trio.to_thread.run_sync(self._end_others)
            except RuntimeError as error:
                if not is_refused(error):
                    raise
                raise OSError(errno.EAGAIN, str(error)) from error
            self._spawn()
            pidfd = os.pidfd_open(self._pid)  # our child: there until it is waited for
        return pidfd

    async def _until_granted(self, attempt: Callable[[], Awaitable[T]], *, patient: bool) -> T | None:
        """Try until the machine has what that needs: a process, descriptors, memory. None: the mount has ended before.

        `patient`: for as long as the mount lives, which does not end for that. Else the error is raised after a while.
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
            if self._stopping or is_unmounted(self._held.device):
                return None

    def _end_others(self) -> None:
        """Two on the same memory would answer the same requests. One that was stopped does not end with its daemon."""
        for other in running(memory_name(f"/proc/self/fd/{self._held.shared.fd}")):
            log.warning("a fast path of this mount (pid %d) does not answer: ending it", other.pid)
            if not other.kill():
                raise CacheFsError(f"the fast path (pid {other.pid}) cannot be ended: it waits in the kernel")

    def _spawn(self, *, after: int = 0) -> None:
        """`after`: the pid of another one, for the end of which it waits."""
        held = self._held
        fds = {
            "--device": held.device,
            "--shared": held.shared.fd,
            "--source": held.source,
            "--blob": held.blob,
            "--listener": held.listener.fileno(),
        }
        command = [str(PROGRAM)]
        for name, fd in fds.items():
            command += (name, str(fd))
        command += ("--session", str(self._session), "--durable", str(self._durable), "--after", str(after))
        with open(self._log_path, "ab", opener=opener) if self._log_path else contextlib.nullcontext() as log_file:
            self._process = subprocess.Popen(
                command,
                pass_fds=tuple(fds.values()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log_file,
                start_new_session=True,
            )
        self._pid = self._process.pid
        self.starts += 1

    async def _until_death(self, pidfd: int, scope: trio.CancelScope) -> None:
        await _end_of(self._pid, pidfd)
        scope.cancel()

    async def _attach(self) -> None:
        if self._connection is not None:  # of an attempt for which the machine had not all that it needs
            self._connection.close()
            self._connection = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        while True:
            try:
                with socket_address(self._path) as address:
                    self._connection.connect(address)
                break
            except BlockingIOError:  # a predecessor died before it accepted: the queue is full until the next one does
                await trio.sleep(0.01)
        send(
            self._connection,
            Message.ATTACH,
            a=ATTACH_SAME_PYTHON if self._attached else 0,
            fds=(self._ours.fileno(), self._python.fileno()),
        )
        while (message := await self._next())[0] is not Message.ATTACHED:
            self._received(*message)  # its threads were at work before it saw us
        self._attached = True
        self._on_attached()

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
        """False where it has died; the next one asks again."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                send(self._connection, kind, a, data=data, fds=fds)
                return True
        return False

    def _bury(self) -> int | None:
        """Its exit status, negative for a signal; None if it was started by another daemon."""
        status = None
        if self._process is not None:
            status = self._process.poll()
            if status is None:  # a thread of it waits for the source
                self._zombies.append(self._process)
                status = -signal.SIGKILL
        self._zombies = [process for process in self._zombies if process.poll() is None]
        self._process = None
        self._pid = 0
        if self._connection is not None:
            with contextlib.suppress(OSError):  # what it said last
                while data := self._connection.recv(MESSAGE_BYTES):
                    self._received(*parse(data))
            self._connection.close()
            self._connection = None
        self._died()
        return status

    async def stop(self) -> None:
        """Let the program finish what it has to append, and end it."""
        self._stopping = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._ended.is_set():
                break
            if self._pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, number)
                    os.kill(self._pid, signal.SIGCONT)  # one that was stopped hears nothing
            with trio.move_on_after(STOP_TIMEOUT_S):
                await self._ended.wait()

    def close(self) -> None:
        self._ours.close()
        self._python.close()
