"""Notifications that make the kernel drop what it caches (FUSE_NOTIFY_INVAL_INODE, FUSE_NOTIFY_INVAL_ENTRY)."""

import errno
import fcntl
import logging
import os
import socket
import struct
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import trio

from cachefs.contract.index import Table
from cachefs.fuse.notifier_process import PACKET_BYTES
from cachefs.store.index.index import Index
from cachefs.system import children
from cachefs.system.clock import SYSTEM
from cachefs.system.descriptors import closing_on_error

log = logging.getLogger(__name__)

# struct fuse_out_header, fuse_notify_inval_inode_out, fuse_notify_inval_entry_out
_NOTIFY_HEAD = struct.Struct("<IiQ")
_NOTIFY_INODE = struct.Struct("<Qqq")
_NOTIFY_ENTRY = struct.Struct("<QII")
_NOTIFY_INVAL_INODE, _NOTIFY_INVAL_ENTRY = 2, 3
_FUSE_DEV_IOC_CLONE = 0x8004E500

_KEY = b"notify:"
_FLAGS = bytes(4)  # not PINNED: the value is for this mount only
_RESTART_PAUSE_S = 1.0
_END_PATIENCE_S = 1.0
_ANSWER_BYTES = 16
DELIVERED_WITHIN_S = 5.0
"""How long notifications wait for answers: the fast path may have been stopped."""
MOST_REMEMBERED = 4096
"""How many inodes `dropped_between` knows about; the oldest ones are forgotten first."""


class KernelNotifier:
    """Sends notifications by a process of their own, one at a time (hazard 1).

    A notification blocks in the kernel until requests on the same directory have been answered, and a thread that waits
    there cannot be killed. A thread of the daemon would keep a dying daemon alive, with its /dev/fuse, sockets and
    locks, while only this daemon or its successor can answer those requests. So a child process notifies
    (notifier_process.py), and a daemon that is killed, or leaves, ends at once. The child ends when it has sent what it
    was given. The fast path or a successor answers the requests that it waits for. If no process serves the mount any
    more, the child itself fails these requests.

    The child writes to /dev/fuse directly, not through the fast path, which answers requests that it waits for.
    """

    def __init__(self, device: int, served: int | None = None) -> None:
        """`device`: the mount's /dev/fuse. `served`: a file of which all processes that may serve the mount share one
        open file description. None: there is no other such process."""
        # dependencies
        self._device = device
        self._served = os.memfd_create("cachefs-served") if served is None else served
        fcntl.flock(self._served, fcntl.LOCK_SH)  # until the last such process has closed it
        self._code = Path(__file__).with_name("notifier_process.py").read_text()  # an upgrade may replace the file
        self.answers_delivered: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        """Returns when the kernel has each answer that was given before: it must not take over a name after it has
        dropped it. Set where answers take another way than notifications."""
        # state
        self._dropped_ns: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Inode number → when the kernel dropped its attributes last: certainly (it knew the inode), and perhaps."""
        self._names = _Lane(self._dropped)
        self._pages = _Lane(self._dropped)
        self._process: subprocess.Popen[bytes] | None = None
        self.started = trio.Event()
        """Set when the process runs, or could not be started."""
        self._is_over = False

    def drop_soon(self, entries: Sequence[tuple[int, bytes]], numbers: Sequence[int] = ()) -> None:
        """Names first, then inodes."""
        self._names.add(_messages(entries, numbers))

    async def drop(self, entries: Sequence[tuple[int, bytes]], numbers: Sequence[int]) -> None:
        try:
            if self._names.waits:
                with trio.move_on_after(DELIVERED_WITHIN_S):
                    await self.answers_delivered()
        finally:  # also if the caller does not wait any longer
            sent = self._names.add(_messages(entries, numbers))
        await self._names.wait(sent)

    def attributes(self, number: int) -> bool:
        """Drop the attributes, and no page. Returns whether the kernel knows the inode.

        This notification waits for nothing. So a request may send it, directly.
        """
        try:
            os.write(self._device, _message(_NOTIFY_INVAL_INODE, _NOTIFY_INODE.pack(number, -1, 0)))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return False
            _warn(error.errno or 0)
        else:
            self._dropped(number, was_known=True)
        return True

    def dropped_between(self, number: int, since_ns: int, until_ns: int) -> bool:
        certainly_ns, perhaps_ns = self._dropped_ns.get(number, (0, 0))
        is_about_to = self._names.is_about_to_drop(number) or self._pages.is_about_to_drop(number)
        return since_ns <= certainly_ns and perhaps_ns <= until_ns and not is_about_to

    def _dropped(self, number: int, *, was_known: bool = False) -> None:
        certainly_ns, now_ns = self._dropped_ns.get(number, (0, 0))[0], SYSTEM.monotonic_ns()
        self._dropped_ns[number] = (now_ns if was_known else certainly_ns), now_ns
        self._dropped_ns.move_to_end(number)
        if len(self._dropped_ns) > MOST_REMEMBERED:
            self._dropped_ns.popitem(last=False)

    async def pages(self, numbers: Iterable[int]) -> None:
        """Drop the pages of these inodes, and their attributes. Returns when the kernel has.

        In a lane of its own: the kernel waits for READs of the same pages, which may wait for the source.
        """
        await self._pages.wait(self._pages.add(_messages((), numbers)))

    def leave_to_successor(self) -> None:
        """From now on nothing waits for a notification: what is not confirmed at the end is left to a successor."""
        self._names.stop_waiting()
        self._pages.stop_waiting()

    def save(self, index: Index) -> None:
        """Leave what is not confirmed to a successor. A notification that is sent twice does no harm."""
        with index.update() as update:
            for number, packet in enumerate([*self._names.unconfirmed(), *self._pages.unconfirmed()]):
                update.put(Table.META, _KEY + number.to_bytes(4, "big"), _FLAGS + packet)

    def end(self) -> None:
        """The mount has ended: when `run` is cancelled, kill the process if it does not end by itself."""
        self._is_over = True

    def kill(self) -> None:
        """Kill the process: what is not confirmed has been saved for the successor."""
        if self._process is not None:
            self._process.kill()

    def restore(self, index: Index) -> None:
        """Send what a predecessor has saved."""
        with index.update() as update:
            saved = list(update.scan(Table.META, _KEY))
            for key, _ in saved:
                update.delete(Table.META, key)
        self._names.add([value[len(_FLAGS) :] for _, value in saved])

    # --- the process -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """The task, for ever: run a process that notifies. If it is killed, the next sends what was not confirmed."""
        while True:
            started = trio.current_time()
            try:
                await self._run_process()
                log.warning("the process that notifies the kernel has ended; starting another")
            except OSError as error:
                log.warning("the process that notifies the kernel cannot be started: %s", error)
                self.started.set()
            await trio.sleep_until(started + _RESTART_PAUSE_S)

    async def _run_process(self) -> None:
        """Run one process, and return when it has ended. When cancelled: end it as if the daemon had been killed."""
        lanes = (self._names, self._pages)
        ours, process = self._start_process(len(lanes))
        self._process = process
        self.started.set()
        try:
            async with trio.open_nursery() as nursery:
                for lane, end in zip(lanes, ours, strict=True):
                    nursery.start_soon(lane.run, end)
                await children.wait(process)
                nursery.cancel_scope.cancel()
        finally:
            for end in ours:
                end.close()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _END_PATIENCE_S):
                await children.wait(process)
            if self._is_over:
                process.kill()

    def _start_process(self, lanes: int) -> tuple[list[trio.socket.SocketType], subprocess.Popen[bytes]]:
        """Our ends of the lanes, and the process, which gets no other descriptors of the daemon."""
        with ExitStack() as ours, ExitStack() as theirs:
            pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(lanes)]
            for our_end, their_end in pairs:
                ours.enter_context(our_end)
                theirs.enter_context(their_end)
            device = _clone(self._device)
            theirs.callback(os.close, device)
            served = os.open(f"/proc/self/fd/{self._served}", os.O_RDWR | os.O_CLOEXEC)
            theirs.callback(os.close, served)
            fds = [device, served, *(their_end.fileno() for _, their_end in pairs)]
            process = children.start(
                lambda numbers: [os.readlink("/proc/self/exe"), "-I", "-S", "-c", self._code, *map(str, numbers)],
                fds,
                stderr=subprocess.DEVNULL,
                executable="/proc/self/exe",  # the running interpreter, even if its file was moved
            )
            ours.pop_all()
            return [trio.socket.from_stdlib_socket(our_end) for our_end, _ in pairs], process


class _Packet(NamedTuple):
    content: bytes
    confirmed: trio.Event
    inodes: list[int]
    """Their attributes are dropped."""


class _Lane:
    """Notifications that are sent one after the other, in packets of several."""

    def __init__(self, dropped: Callable[[int], None]) -> None:
        """`dropped`: called for each inode whose attributes the kernel has dropped, if it knew the inode."""
        self._dropped = dropped
        self._unconfirmed: deque[_Packet] = deque()
        """The first may be under way."""
        self._added = trio.Event()
        self.waits = True

    def add(self, messages: Iterable[bytes]) -> Sequence[_Packet]:
        packets = [_Packet(content, trio.Event(), _inodes(content)) for content in _packets(messages)]
        self._unconfirmed += packets
        self._added.set()
        return packets

    def is_about_to_drop(self, number: int) -> bool:
        return any(number in packet.inodes for packet in self._unconfirmed)

    async def wait(self, packets: Sequence[_Packet]) -> None:
        """Return when the kernel has acted on them."""
        if packets and self.waits:
            await packets[-1].confirmed.wait()

    def stop_waiting(self) -> None:
        self.waits = False
        for packet in self._unconfirmed:
            packet.confirmed.set()

    def unconfirmed(self) -> list[bytes]:
        return [packet.content for packet in self._unconfirmed]

    async def run(self, end: trio.socket.SocketType) -> None:
        """Return when the process at the other end has gone. What it has not confirmed stays in `_unconfirmed`."""
        with suppress(OSError):
            while True:
                while not self._unconfirmed:
                    self._added = trio.Event()
                    await self._added.wait()
                packet = self._unconfirmed[0]
                await end.send(packet.content)
                answer = await end.recv(_ANSWER_BYTES)
                if not answer:
                    return
                self._unconfirmed.popleft()
                for number in packet.inodes:
                    self._dropped(number)
                packet.confirmed.set()
                if int(answer):
                    _warn(int(answer))


def _packets(messages: Iterable[bytes]) -> Iterator[bytes]:
    packet = b""
    for message in messages:
        if len(packet) + len(message) > PACKET_BYTES:
            yield packet
            packet = b""
        packet += message
    if packet:
        yield packet


def _inodes(packet: bytes) -> list[int]:
    """The inodes that the notifications in a packet name, without those that only a directory entry leads to."""
    found, at = [], 0
    while at < len(packet):
        length, code, _ = _NOTIFY_HEAD.unpack_from(packet, at)
        if code == _NOTIFY_INVAL_INODE:
            found.append(_NOTIFY_INODE.unpack_from(packet, at + _NOTIFY_HEAD.size)[0])
        at += length
    return found


def _clone(device: int) -> int:
    """Another descriptor of the same connection. Requests that were read by the one do not end with the other."""
    with closing_on_error(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)) as clone:
        fcntl.ioctl(clone, _FUSE_DEV_IOC_CLONE, device.to_bytes(4, sys.byteorder))
    return clone


def _warn(number: int) -> None:
    log.warning("cannot invalidate in the kernel: %s", os.strerror(number))


def _message(code: int, body: bytes) -> bytes:
    return _NOTIFY_HEAD.pack(_NOTIFY_HEAD.size + len(body), code, 0) + body


def _messages(entries: Iterable[tuple[int, bytes]], numbers: Iterable[int]) -> list[bytes]:
    messages = [
        _message(_NOTIFY_INVAL_ENTRY, _NOTIFY_ENTRY.pack(parent, len(name), 0) + name + b"\0")
        for parent, name in entries
    ]
    return messages + [_message(_NOTIFY_INVAL_INODE, _NOTIFY_INODE.pack(number, 0, 0)) for number in numbers]
