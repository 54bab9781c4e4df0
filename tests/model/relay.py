"""The relay in C, one operation at a time, in this process: what `slots.py` is a model of.

`Relay` has the same operations as the model, and the kernel, the sockets and Python around it. A kill ends an operation
before any of its writes to the shared memory, or before any of its system calls (harness/seams.c).
"""

import ctypes
import os
import socket
import struct
import subprocess
from pathlib import Path

from cachefs.contract import c_header
from tests.model.slots import ANSWERING, FREE, NONE, OURS, Scenario

HARNESS = Path(__file__).parent / "harness"
SOURCES = Path(__file__).parents[2] / "cachefs" / "fastpath" / "c"
SLOTS, PLACES = 5, 4  # more slots than requests: as in shared.h, some are left for threads
NO_SLOT = 2**32 - 1
DONE, BLOCKED, KILLED = range(3)
SENT, UNREAD, DELIVERED, ANSWER, ARRIVED = range(5)
FIRST_UNIQUE = 1000  # of the kernel's; ours are above 2^24
ERRORS = {0: "ok", 4: "EINTR", 5: "EIO", 11: "EAGAIN"}
FORGET, MKDIR, READ, WRITE = 2, 9, 15, 16
_HEADER = struct.Struct("<2I2Q4I")  # struct fuse_in_header: length, opcode, unique, nodeid, uid, gid, pid, padding
_ANSWER = struct.Struct("<IiQ")  # struct fuse_out_header
_PART_BYTES = 128 << 10


class Event(ctypes.Structure):
    _fields_ = [("what", ctypes.c_uint64), ("unique", ctypes.c_uint64), ("error", ctypes.c_int64)]


class SlotView(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("word", "message", "unique")),
        *((name, ctypes.c_uint32) for name in ("length", "parts", "attempts", "split", "counted")),
    ]


class View(ctypes.Structure):
    _fields_ = [
        ("slots", SlotView * SLOTS),
        ("lot", ctypes.c_uint64 * PLACES),
        ("free_count", ctypes.c_uint32),
        ("free", ctypes.c_uint32 * SLOTS),
        ("queue_count", ctypes.c_uint32),
        ("queue", ctypes.c_uint32 * SLOTS),
        ("work_count", ctypes.c_uint32),
        ("work", ctypes.c_uint32 * SLOTS),
        *((name, ctypes.c_uint32) for name in ("has_python", "going", "given_up", "interrupt_count")),
        ("interrupted", ctypes.c_uint64 * 256),
    ]


def build(directory: Path, sources: Path = SOURCES) -> ctypes.CDLL:
    """Compile the relay with its seams."""
    flags = [*["-std=gnu11", "-O1", "-g", "-fPIC", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror"]]
    flags += [f"-I{directory}", f"-I{sources}"]
    c_header.write(directory)
    flags += [f"-DSLOT_COUNT={SLOTS}", f"-DPARKED_COUNT={PLACES}"]
    seams = ["-fsanitize=thread", "-include", str(HARNESS / "seams.h")]
    parts = [HARNESS / "turns.c", *(sources / "relay" / f"{name}.c" for name in ("slots", "split", "lot", "passing"))]
    parts += [HARNESS / "callers.c", sources / "kernel" / "reply.c"]
    plain = [HARNESS / "seams.c", sources / "common" / "shares.c"]
    plain += [sources / "kernel" / f"{name}.c" for name in ("protocol", "complaint")]
    objects = []
    for source in (*parts, *plain):
        objects.append(str(directory / f"{source.stem}.o"))
        extra = seams if source in parts else []
        subprocess.run(["cc", *flags, *extra, "-c", str(source), "-o", objects[-1]], check=True)
    library = directory / "relay.so"
    subprocess.run(["cc", "-shared", *objects, "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.kill_before_write.argtypes = [ctypes.c_int64]
    loaded.interrupt_.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_bool]
    loaded.event_list.restype = ctypes.POINTER(Event)
    loaded.last_result.restype = ctypes.c_uint32
    return loaded


def message(kind: str, request: int) -> bytes:
    """As the kernel sends it."""
    opcode, body = {
        "R": (READ, struct.pack("<2Q2I2Q", 7, 0, 4096, 0, 0, 0)[:40]),
        "S": (READ, struct.pack("<2Q2I2Q", 7, 0, 2 * _PART_BYTES, 0, 0, 0)[:40]),
        "W": (WRITE, struct.pack("<2Q2IQ2I", 7, 0, 1, 0, 0, 0, 0) + b"w"),
        "M": (MKDIR, struct.pack("<2I", 0o755, 0) + b"name\0"),
        "F": (FORGET, struct.pack("<Q", 1)),
    }[kind]
    length = _HEADER.size + len(body)
    return _HEADER.pack(length, opcode, FIRST_UNIQUE + request, request + 1, 0, 0, 1, 0) + body


class Python:
    """A daemon's two ends of the socket, and what lies in it."""

    def __init__(self) -> None:
        self.ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.attached = False
        self.messages: list[int] = []
        self.executing: list[tuple[int, int]] = []  # our unique, request
        self.answers: list[tuple[int, int]] = []

    def close(self) -> None:
        for end in self.ends:
            end.close()


class Relay:
    def __init__(self, library: ctypes.CDLL, scenario: Scenario) -> None:
        self._c = library
        self.of = scenario
        self.runs = False
        self.unread = [*range(len(scenario.requests))]
        self.answered = [""] * len(scenario.requests)
        self.own = [NONE] * scenario.workers
        self.serving = [NONE] * scenario.workers
        self.fetching: set[int] = set()
        self.daemon: Python | None = Python()
        self.dead: Python | None = None
        self._attached_to: Python | None = None
        assert library.begin(scenario.share, scenario.places)

    def close(self) -> None:
        self.end_process()
        if self.daemon:
            self.daemon.close()

    # --- the fast path ------------------------------------------------------------------------------------------------

    def end_process(self) -> None:
        self._c.end_process()
        self.runs = False
        self.dead = self._attached_to = None
        self.own, self.serving = [NONE] * self.of.workers, [NONE] * self.of.workers
        self.fetching = set()

    def run(self, name: str, arguments: tuple[int, ...] = (), kill_at: int = -1) -> bool:
        """False: it was killed before its write of that number."""
        socket_ = self._attached_to
        self._c.allow(self.of.room - len(socket_.messages) if socket_ else 0, 1)
        self._c.kill_before_write(kill_at)
        how = getattr(self, f"_{name}")(*arguments)
        self._c.kill_before_write(-1)
        self._take_events()
        if how == KILLED:
            self.end_process()
        return how != KILLED

    def _take_events(self) -> None:
        events = self._c.event_list()
        for number in range(self._c.events_taken()):
            event = events[number]
            python = self._attached_to
            if event.what == ANSWER:
                request = event.unique - FIRST_UNIQUE
                assert 0 <= request < len(self.answered), f"an answer to {event.unique}, which is no request"
                if not self.answered[request] and self.of.requests[request] != "F":
                    self.answered[request] = ERRORS[event.error]
            elif event.what == ARRIVED:
                self.unread.pop(0)
            elif python and event.what == SENT:
                python.messages.append(event.unique)
            elif python and event.what == UNREAD:
                python.messages.pop(0)
            elif python and event.what == DELIVERED:
                python.answers.pop(0)

    def _start(self) -> int:
        assert self._c.begin_process()
        self.runs = True
        return int(self._c.start())

    def _take_slot(self, worker: int) -> int:
        how = self._c.take_slot()
        self.own[worker] = self._c.last_result()
        return int(how)

    def _listen(self, worker: int) -> int:
        request = self.unread[0]
        own = self.own[worker]
        how = self._c.read_request(NO_SLOT if own == NONE else own, message(self.of.requests[request], request))
        if how == DONE:
            self.own[worker] = self.serving[worker] = self._c.last_result()
        return int(how)

    def _next_work(self, worker: int) -> int:
        how = self._c.next_work(self.own[worker])
        self.serving[worker] = self._c.last_result()
        return int(how)

    def _serve_hit(self, worker: int) -> int:
        slot = self.serving[worker]
        self.serving[worker] = NONE
        return int(self._c.serve_hit(slot, slot != self.own[worker]))

    def _serve_pass(self, worker: int) -> int:
        slot = self.serving[worker]
        is_work = slot != self.own[worker]
        self.serving[worker] = NONE
        how = self._c.serve_pass(slot, is_work)
        if not is_work and self._c.last_result():
            self.own[worker] = NONE
        return int(how)

    def _serve_miss(self, worker: int) -> int:
        slot = self.serving[worker]
        self.serving[worker] = NONE
        self.fetching.add(slot)
        if slot == self.own[worker]:
            self.own[worker] = NONE
        return DONE

    def _fetched(self, slot: int, _what: str) -> int:
        self.fetching.discard(slot)
        return int(self._c.fetched(slot))

    def _fetch_failed(self, slot: int) -> int:
        self.fetching.discard(slot)
        return int(self._c.serve_pass(slot, True))

    def _run_sender(self) -> int:
        return int(self._c.run_sender_())

    def _run_receiver(self) -> int:
        return int(self._c.run_receiver_())

    def _python_gone(self) -> int:
        how = int(self._c.run_receiver_())
        self._take_events()
        if how != KILLED:
            self.dead = self._attached_to = None
        return how

    def _hang_up(self) -> int:
        return int(self._c.hang_up())

    def _attach(self) -> int:
        assert self.daemon
        ours, pythons = (os.dup(end.fileno()) for end in self.daemon.ends)
        how = self._c.attach(ours, pythons, self.daemon.attached)
        if how == KILLED:
            os.close(ours)
            os.close(pythons)
        else:
            self.daemon.attached, self._attached_to = True, self.daemon
        return int(how)

    def _tell(self) -> int:
        return int(self._c.send_doubt())

    def _give_up(self) -> int:
        return int(self._c.give_up())

    def _interrupt(self, request: int) -> int:
        view = self.look()
        slot = next((s for s in self.fetching if view.slots[s].unique == FIRST_UNIQUE + request), NONE)
        again = FIRST_UNIQUE + request in view.interrupted[: view.interrupt_count]
        how = self._c.interrupt_(FIRST_UNIQUE + request, NO_SLOT if slot == NONE else slot, again)
        if slot != NONE:
            self.fetching.discard(slot)
        return int(how)

    # --- Python -------------------------------------------------------------------------------------------------------

    def execute(self) -> None:
        assert self.daemon
        data = self.daemon.ends[1].recv(1 << 20)
        _, _, unique, node, *_ = _HEADER.unpack_from(data)
        assert unique == self.daemon.messages.pop(0)
        if self.of.requests[node - 1] != "F":
            self.daemon.executing.append((unique, node - 1))

    def reply(self, number: int) -> None:
        """To the one that it has had for so long."""
        assert self.daemon
        answer = self.daemon.executing.pop(number)
        self.daemon.ends[1].send(_ANSWER.pack(_ANSWER.size, 0, answer[0]))
        self.daemon.answers.append(answer)

    def kill_daemon(self) -> None:
        assert self.daemon
        self.daemon.close()
        if self._attached_to is self.daemon:
            self.dead = self.daemon
        self.daemon.executing = []
        self.daemon = None

    def start_daemon(self) -> None:
        self.daemon = Python()

    # --- what can be seen ---------------------------------------------------------------------------------------------

    def look(self) -> View:
        view = View()
        self._c.look(ctypes.byref(view))
        return view

    def seen(self) -> tuple[object, ...]:
        """The same as `seen` of a model that is in this state."""
        names: dict[int, int] = {}

        def name(generation: int) -> int:
            return names.setdefault(generation, len(names))

        def request(unique: int) -> int:
            return unique - FIRST_UNIQUE if unique else NONE

        def place(unique: int) -> tuple[int, int, int]:
            return name(unique >> 24), unique & 0xFFFF, unique >> 16 & 0xFF

        volatile = None
        if self.runs:
            view = self.look()
            slots = []
            for slot in view.slots:
                state = slot.word & 0xFF
                known = OURS if slot.message >= 1 << 24 else request(slot.message)
                rest = (known, request(slot.unique), bool(slot.length), slot.parts, slot.attempts)
                slots.append((name(slot.word >> 8), state, *(() if state == FREE else rest)))
            volatile = (
                tuple(slots), tuple(request(unique) for unique in view.lot if unique),
                bool(view.has_python), bool(view.going), bool(view.given_up),
                tuple(view.free[: view.free_count]), tuple(view.queue[: view.queue_count]),
                tuple(view.work[: view.work_count]),
                tuple(number for number, slot in enumerate(view.slots) if slot.split),
                tuple(number for number, slot in enumerate(view.slots) if slot.counted),
                tuple(sorted({request(unique) for unique in view.interrupted[: view.interrupt_count]})),
                tuple(self.own), tuple(self.serving), tuple(sorted(self.fetching)),
            )  # fmt: skip
        sockets = []
        for python in (self.daemon, self.dead):
            if python:
                answers = tuple((*place(unique), number) for unique, number in python.answers)
                executing = tuple((*place(unique), number) for unique, number in python.executing)
                sockets.append((python.attached, tuple(map(place, python.messages)), answers, executing))
            else:
                sockets.append(None)
        return volatile, tuple(self.answered), tuple(self.unread), tuple(sockets)


assert ANSWERING == 7  # shared.h: the last one
