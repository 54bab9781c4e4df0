"""A model of the requests that are owed: docs/FASTPATH.md, "Requests are owed: slots", state by state.

A few requests go through the kernel, the fast path (C) and Python. Either process may be killed between any two writes
to what outlives it: the shared memory, the sockets, the kernel. `explore` visits all states and looks for violations.

Each operation of the fast path is a generator. It stands for the C function named in its docstring, and yields after
each write that a successor can see. One lock guards all slots, so operations do not overlap; those that run without the
lock work on slots of their own. So a kill at any moment is an operation that stops at one of its yields.

The kernel refuses a second answer to a request (ENOENT), and `State.answer` does the same.
"""

import itertools
import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass

FREE, READING, QUEUED, PASSING, PASSED, IN_DOUBT, ANSWERED, ANSWERING = range(8)  # shared.h: enum slot_state
NONE = -1  # no request, no slot
OURS = -2  # the message holds the unique that Python is given, not the kernel's
PARTS = 2  # of a split READ

Steps = Generator[None, None, bool | None]
Owed = tuple[int, int, int, int]
"""A message to Python: generation, slot, part, request. An answer has the same four."""


class Violation(Exception):
    """The protocol is wrong."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What may happen.

    `requests`: of each its kind. R: a READ. S: a READ that is passed on in parts. W: a WRITE, M: a MKDIR, which is a
    change of names. F: a FORGET, which has no answer.
    """

    requests: str
    slots: int = 2
    workers: int = 1
    fastpath_kills: int = 1
    daemon_kills: int = 1
    room: int = 2  # messages that fit into the socket to Python
    share: int = 9  # requests that one owner may have at Python; more wait in the lot
    places: int = 9  # in the lot
    fetches: bool = False
    gives_up: bool = False
    signals: bool = False
    mutant: str = ""


class Slot:
    """struct slot_head, and the request in the slot's memory."""

    __slots__ = ("attempts", "generation", "length", "message", "parts", "state", "unique")

    def __init__(self) -> None:
        self.state, self.generation, self.message, self.unique = FREE, 0, NONE, NONE
        self.length = self.parts = self.attempts = 0

    def copy(self) -> "Slot":
        new = object.__new__(Slot)
        new.state, new.generation, new.message, new.unique = self.state, self.generation, self.message, self.unique
        new.length, new.parts, new.attempts = self.length, self.parts, self.attempts
        return new

    def key(self) -> tuple[int, ...]:
        return (self.state, self.message, self.unique, self.length, self.parts, self.attempts)


class FastPath:
    """What dies with the process: struct relay, the threads that own slots, interrupt.c."""

    __slots__ = ("counted", "fetching", "free", "given_up", "going", "interrupted", "lot_found", "own", "python",
                 "queue", "serving", "splits", "work")  # fmt: skip

    def __init__(self, workers: int) -> None:
        self.python = 0  # 0: nobody there; 1: the daemon that lives; 2: one that died
        self.going = self.given_up = False
        self.lot_found = False  # before, relay->lot is empty, whatever its predecessor left
        self.free: list[int] = []
        self.queue: list[tuple[int, int]] = []  # slot, generation
        self.work: list[int] = []
        self.splits: dict[int, tuple[int, tuple[int, ...]]] = {}  # slot → parts sent, parts answered
        self.counted: set[int] = set()  # counted_passed
        self.own = [NONE] * workers  # the slot of each worker
        self.serving = [NONE] * workers  # the slot whose request it serves
        self.fetching: set[int] = set()
        self.interrupted: tuple[int, ...] = ()

    def copy(self) -> "FastPath":
        new = object.__new__(FastPath)
        new.python, new.going, new.given_up, new.interrupted = self.python, self.going, self.given_up, self.interrupted
        new.free, new.queue, new.work, new.splits = self.free[:], self.queue[:], self.work[:], dict(self.splits)
        new.counted, new.own, new.serving = set(self.counted), self.own[:], self.serving[:]
        new.fetching, new.lot_found = set(self.fetching), self.lot_found
        return new


class Daemon:
    """A Python and its end of the socket."""

    __slots__ = ("answers", "attached", "executing", "messages")

    def __init__(self) -> None:
        self.attached = False  # launcher.py: FastPath._was_attached
        self.messages: list[Owed] = []
        self.answers: list[Owed] = []
        self.executing: tuple[Owed, ...] = ()

    def copy(self) -> "Daemon":
        new = object.__new__(Daemon)
        new.attached, new.executing = self.attached, self.executing
        new.messages, new.answers = self.messages[:], self.answers[:]
        return new


class State:
    """Everything at one moment."""

    __slots__ = ("answered", "arrived", "daemon", "daemon_kills", "dead", "doubted", "dying", "executed", "fastpath",
                 "fastpath_kills", "generation", "heard", "lot", "of", "slots", "unread")  # fmt: skip

    def __init__(self, scenario: Scenario) -> None:
        count = len(scenario.requests)
        self.of = scenario
        self.slots = [Slot() for _ in range(scenario.slots)]
        self.lot: list[int] = []
        self.generation = 0
        self.unread = [*range(count)]  # in /dev/fuse
        self.arrived = [False] * count
        self.answered = [""] * count
        self.dying = [False] * count  # its caller was sent SIGKILL
        self.heard = [False] * count  # and the fast path has read the INTERRUPT
        self.executed = [0] * count
        self.doubted = [False] * count
        self.fastpath: FastPath | None = None
        self.daemon: Daemon | None = Daemon()
        self.dead: Daemon | None = None  # its socket, of which the fast path holds both ends
        self.fastpath_kills, self.daemon_kills = scenario.fastpath_kills, scenario.daemon_kills

    def copy(self) -> "State":
        new = object.__new__(State)
        new.of, new.generation = self.of, self.generation
        new.slots = [slot.copy() for slot in self.slots]
        new.lot, new.unread, new.arrived, new.answered = self.lot[:], self.unread[:], self.arrived[:], self.answered[:]
        new.dying, new.heard, new.executed, new.doubted = (
            self.dying[:],
            self.heard[:],
            self.executed[:],
            self.doubted[:],
        )
        new.fastpath = self.fastpath and self.fastpath.copy()
        new.daemon, new.dead = self.daemon and self.daemon.copy(), self.dead and self.dead.copy()
        new.fastpath_kills, new.daemon_kills = self.fastpath_kills, self.daemon_kills
        return new

    def key(self) -> tuple[object, ...]:
        """The same for states that differ only in numbers of generations."""
        names: dict[int, int] = {}

        def name(generation: int) -> int:
            return names.setdefault(generation, len(names))

        def owed(messages: list[Owed] | tuple[Owed, ...]) -> tuple[Owed, ...]:
            return tuple((name(generation), slot, part, request) for generation, slot, part, request in messages)

        slots = tuple((name(slot.generation), *slot.key()) for slot in self.slots)
        daemons = tuple(
            daemon and (daemon.attached, owed(daemon.messages), owed(daemon.answers), owed(sorted(daemon.executing)))
            for daemon in (self.daemon, self.dead)
        )
        f = self.fastpath
        volatile = f and (
            f.python, f.going, f.given_up, tuple(f.free),
            tuple((slot, name(generation)) for slot, generation in f.queue),
            tuple(f.work), tuple(sorted(f.splits.items())), tuple(sorted(f.counted)), tuple(f.own), tuple(f.serving),
            tuple(sorted(f.fetching)), f.interrupted,
        )  # fmt: skip
        return (
            slots, tuple(self.lot), tuple(self.unread), tuple(self.arrived), tuple(self.answered), tuple(self.dying),
            tuple(self.heard), tuple(self.executed), tuple(self.doubted), daemons, volatile, self.fastpath_kills,
            self.daemon_kills,
        )  # fmt: skip

    def seen(self) -> tuple[object, ...]:
        """What can be seen of the relay in C that is in this state: relay.py, Relay.seen."""
        names: dict[int, int] = {}

        def name(generation: int) -> int:
            return names.setdefault(generation, len(names))

        f, volatile = self.fastpath, None
        if f:
            slots = []
            for slot in self.slots:
                rest = (slot.message, slot.unique, bool(slot.length), slot.parts, slot.attempts)
                slots.append((name(slot.generation), slot.state, *(() if slot.state == FREE else rest)))
            volatile = (
                tuple(slots), tuple(self.lot), bool(f.python), f.going, f.given_up, tuple(f.free),
                tuple(entry[0] for entry in f.queue), tuple(f.work), tuple(sorted(f.splits)),
                tuple(sorted(f.counted)), tuple(one for one in f.interrupted if self.reads(one)), tuple(f.own),
                tuple(f.serving), tuple(sorted(f.fetching)),
            )  # fmt: skip
        sockets = []
        for python in (self.daemon, self.dead):
            if python:
                answers = tuple((name(one[0]), *one[1:]) for one in python.answers)
                executing = tuple((name(one[0]), *one[1:]) for one in python.executing)
                messages = tuple((name(one[0]), *one[1:3]) for one in python.messages)
                sockets.append((python.attached, messages, answers, executing))
            else:
                sockets.append(None)
        return volatile, tuple(self.answered), tuple(self.unread), tuple(sockets)

    # --- helpers ------------------------------------------------------------------------------------------------------

    @property
    def f(self) -> FastPath:
        assert self.fastpath
        return self.fastpath

    @property
    def socket(self) -> Daemon | None:
        """That of the Python which the fast path is attached to."""
        return (None, self.daemon, self.dead)[self.f.python]

    def mutant(self, name: str) -> bool:
        return self.of.mutant == name

    def kind(self, request: int) -> str:
        if request < 0:
            raise Violation("a slot counts as a request's and has none")
        return self.of.requests[request]

    def changes(self, request: int) -> bool:
        """protocol.c: request_changes."""
        return self.kind(request) == "M"

    def reads(self, request: int) -> bool:
        """protocol.c: request_is."""
        return self.kind(request) in "RS"

    def answer(self, request: int, what: str) -> None:
        """reply.c: the kernel takes the first answer and refuses others."""
        if request in (NONE, OURS):
            raise Violation("an answer to no request")
        if self.answered[request] or self.kind(request) == "F":
            return
        self.answered[request] = what
        if (
            what in ("EIO", "EAGAIN")
            and self.executed[request]
            and self.kind(request) == "M"
            and not self.doubted[request]
        ):
            raise Violation(f"request {request} was made, is answered {what}, and is not in doubt")

    def kill_fastpath(self) -> "State":
        self.fastpath = self.dead = None
        self.fastpath_kills -= 1
        return self

    # --- slots: relay/slots.c -----------------------------------------------------------------------------------------

    def set_state(self, slot: int, state: int) -> Steps:
        """slots.c: set_state_locked."""
        self.slots[slot].state = state
        yield

    def renew(self, slot: int, state: int) -> Steps:
        """slots.c: renew_locked. One write to the slot's word."""
        self.generation += 1
        if not self.mutant("no new generation"):
            self.slots[slot].generation = self.generation
        self.slots[slot].state = state
        yield

    def ready(self, slot: int) -> Steps:
        """slots.c: relay_ready_slot."""
        head = self.slots[slot]
        head.message = NONE
        yield
        if not self.mutant("the last unique stays"):
            head.unique = NONE
            yield
        head.length = head.parts = head.attempts = 0
        yield

    def fill(self, slot: int, request: int) -> Steps:
        """slots.c: relay_fill_slot."""
        self.slots[slot].unique = request
        yield
        self.slots[slot].length = 1
        yield

    def take_slot(self, worker: int) -> Steps:
        """lot.c: relay_take_slot."""
        slot = self.f.free.pop()
        if self.mutant("renewed before it is ready"):
            yield from self.renew(slot, READING)
            yield from self.ready(slot)
        else:
            yield from self.ready(slot)
            yield from self.renew(slot, READING)
        self.f.own[worker] = slot

    def free_slot(self, slot: int) -> Steps:
        """lot.c: free_locked."""
        self.f.splits.pop(slot, None)
        yield from self.renew(slot, FREE)
        if not self.mutant("a slot that is lost"):
            self.f.free.append(slot)
        if slot in self.f.counted:
            self.f.counted.discard(slot)
            yield from self.unpark()

    def fail(self, slot: int, what: str) -> Steps:
        """lot.c: fail_locked."""
        if not self.mutant("refused, and done afterwards"):
            yield from self.set_state(slot, IN_DOUBT)
        self.answer(self.slots[slot].unique, what)
        yield
        yield from self.free_slot(slot)

    # --- the lot: relay/lot.c -----------------------------------------------------------------------------------------

    def has_enough(self, slot: int) -> bool:
        """passing.c: has_enough_locked. All requests have one owner here."""
        return slot not in self.f.counted and len(self.f.counted) >= self.of.share

    def park(self, slot: int) -> Steps:
        """lot.c: park_locked."""
        request = self.slots[slot].unique
        if len(self.lot) < self.of.places:
            if self.mutant("out of its slot before it is in the lot"):
                yield from self.ready(slot)
            self.lot.append(request)
            yield
        elif self.kind(request) != "F":
            if not self.mutant("refused, and done afterwards"):
                yield from self.set_state(slot, IN_DOUBT)
            self.answer(request, "EAGAIN")
            yield
            yield from self.set_state(slot, FREE)
        yield from self.ready(slot)
        yield from self.set_state(slot, READING)
        if slot in self.f.counted:
            self.f.counted.discard(slot)
            yield from self.unpark()

    def unpark(self) -> Steps:
        """lot.c: unpark_locked."""
        f = self.f
        while f.lot_found and self.lot and f.free and len(f.counted) < self.of.share:
            request, slot = self.lot[0], f.free.pop()
            yield from self.ready(slot)
            yield from self.renew(slot, READING)
            if self.mutant("out of the lot before it is in a slot"):
                self.lot.remove(request)
                yield
            self.slots[slot].message = request
            yield
            yield from self.fill(slot, request)
            if request in self.lot:
                self.lot.remove(request)
                yield
            f.counted.add(slot)
            f.work.append(slot)

    # --- passing on: relay/passing.c ----------------------------------------------------------------------------------

    def send(self, message: Owed) -> bool:
        """split.c: send_message."""
        socket = self.socket
        assert socket is not None
        if self.f.going or len(socket.messages) >= self.of.room:
            return False
        socket.messages.append(message)
        return True

    def send_slot(self, slot: int) -> Steps:
        """passing.c: send_locked, and split.c: split_begin_locked, split_send_locked."""
        f, head = self.f, self.slots[slot]
        request = head.message
        if not head.length or request < 0:
            yield from self.fail(slot, "EIO")
            return True
        if self.kind(request) == "S" and slot not in f.splits:
            f.splits[slot] = (0, ())
            head.parts = PARTS
            yield
        if not self.mutant("sent before it is passing"):
            yield from self.set_state(slot, PASSING)
        if slot in f.splits:
            sent, done = f.splits[slot]
            while sent < PARTS and self.send((head.generation, slot, sent, request)):
                sent += 1
                f.splits[slot] = (sent, done)
                yield
            passed = sent == PARTS
        else:
            head.message = OURS
            yield
            passed = self.send((head.generation, slot, 0, request))
            if passed:
                yield
            head.message = head.unique
            yield
        if not passed:
            yield from self.set_state(slot, QUEUED)
            return False
        if self.kind(request) == "F":
            yield from self.free_slot(slot)
        else:
            yield from self.set_state(slot, PASSED)
        return True

    def enqueue(self, slot: int) -> Steps:
        """passing.c: enqueue_locked, compact_locked."""
        if len(self.f.queue) == len(self.slots):
            self.f.queue = [entry for entry in self.f.queue if self.is_current(entry)]
        yield from self.set_state(slot, QUEUED)
        self.f.queue.append((slot, self.slots[slot].generation))

    def is_current(self, entry: tuple[int, int]) -> bool:
        """passing.c: is_current_locked."""
        head = self.slots[entry[0]]
        return head.state == QUEUED and head.generation == entry[1]

    def doubt(self, slot: int) -> Steps:
        """passing.c: doubt_locked."""
        self.doubted[self.slots[slot].unique] = True
        self.answer(self.slots[slot].unique, "EIO")
        yield
        yield from self.set_state(slot, IN_DOUBT)

    def repeat(self, slot: int, *, unseen: bool) -> Steps:
        """passing.c: repeat_locked."""
        head = self.slots[slot]
        request = head.unique
        if not head.length:
            yield from self.fail(slot, "EIO")
        elif not unseen and self.changes(request) and not self.mutant("a change is passed on again"):
            yield from self.doubt(slot)
        elif not unseen and self.kind(request) == "F" and not self.mutant("a FORGET is passed on again"):
            yield from self.free_slot(slot)
        elif not unseen and head.state == ANSWERING and not self.reads(request):
            yield from self.doubt(slot)
        else:
            head.message = head.unique
            yield
            self.f.splits.pop(slot, None)
            yield from self.renew(slot, QUEUED)
            yield from self.enqueue(slot)

    def pass_on(self, slot: int) -> Steps:
        """passing.c: relay_pass. False: the slot is the caller's own again."""
        f = self.f
        if not f.python and self.kind(self.slots[slot].unique) == "F":
            yield from self.free_slot(slot)
        elif f.given_up:
            yield from self.fail(slot, "EIO")
        elif self.has_enough(slot):
            yield from self.park(slot)
            return False
        else:
            f.counted.add(slot)
            if not f.python or f.queue or not (yield from self.send_slot(slot)):
                yield from self.enqueue(slot)
        return True

    def run_sender(self) -> Steps:
        """passing.c: relay_run_sender, once."""
        f = self.f
        if not self.is_current(f.queue[0]) or (yield from self.send_slot(f.queue[0][0])):
            f.queue.pop(0)

    # --- answers: relay.c ---------------------------------------------------------------------------------------------

    def deliver(self, answer: Owed) -> Steps:
        """relay.c: deliver, and split.c: split_answer_locked."""
        generation, slot, part, request = answer
        f, head = self.f, self.slots[slot]
        known = head.generation == generation and (
            head.state in (PASSED, ANSWERED, ANSWERING)
            or (head.state == QUEUED and slot in f.splits and not self.mutant("a part is answered before all are sent"))
        )
        if not known:
            return
        if head.unique != request:
            raise Violation(f"the answer of request {request} reaches request {head.unique}")
        if slot in f.splits:
            sent, done = f.splits[slot]
            done = (*done, part)
            f.splits[slot] = (sent, done)
            if len(done) < PARTS:
                return
            if head.state != ANSWERED:
                if set(done) != {*range(PARTS)}:
                    raise Violation("a READ is answered without a part of it")
                self.answer(head.unique, "ok")
                yield
        elif head.state != ANSWERED:
            if not self.mutant("answered while it counts as passed"):
                yield from self.set_state(slot, ANSWERING)
            self.answer(head.unique, "ok")
            yield
        yield from self.free_slot(slot)

    def run_receiver(self) -> Steps:
        """relay.c: run_receiver, one answer."""
        socket = self.socket
        assert socket
        answer = socket.answers[0]
        if self.mutant("taken before it is delivered"):
            socket.answers.pop(0)
            yield
            yield from self.deliver(answer)
        else:
            yield from self.deliver(answer)
            yield
            socket.answers.pop(0)

    def settle(self) -> Steps:
        """relay.c: repeat_unanswered_locked."""
        f = self.f
        unread = set()
        while f.python and self.dead and self.dead.messages:
            generation, slot, _, _ = self.dead.messages.pop(0)
            if self.slots[slot].generation == generation:
                unread.add(slot)
            yield
        for slot, head in enumerate(self.slots):
            if head.state == ANSWERED:
                yield from self.free_slot(slot)
            elif head.state in (PASSED, PASSING, ANSWERING):
                yield from self.repeat(slot, unseen=slot in unread or self.mutant("all was unseen"))
            elif (
                head.state == QUEUED
                and slot in f.splits
                and not self.mutant("the next Python gets the rest of the parts")
            ):
                yield from self.repeat(slot, unseen=True)

    def python_gone(self) -> Steps:
        """relay.c: run_receiver at the end of the socket: repeat_unanswered_locked, close_python_locked."""
        yield from self.settle()
        self.dead = None
        self.f.python = 0
        self.f.going = False

    # --- coming and going ---------------------------------------------------------------------------------------------

    def start(self) -> Steps:
        """relay.c: relay_init, and lot.c: lot_init_locked."""
        self.fastpath = f = FastPath(self.of.workers)
        for slot in reversed(range(len(self.slots))):
            head = self.slots[slot]
            if head.state not in (FREE, READING):
                f.counted.add(slot)
            if head.state == FREE or (head.state == READING and head.message == NONE):
                yield from self.free_slot(slot)
            elif head.state == READING:
                yield from self.take_over(slot)
            elif head.state == PASSING:
                yield from self.repeat(slot, unseen=self.mutant("PASSING is passed on again"))
            elif head.state in (PASSED, ANSWERING) and head.parts:
                yield from self.repeat(slot, unseen=False)
            elif head.state == QUEUED and head.parts and not self.mutant("the successor sends parts of the same life"):
                yield from self.repeat(slot, unseen=True)
            elif head.state == QUEUED:
                head.message = head.unique
                yield
                yield from self.enqueue(slot)
            elif head.state == IN_DOUBT:
                self.doubted[head.unique] = True
                self.answer(head.unique, "EIO")
                yield
        for request in self.lot[:]:
            if any(head.unique == request and head.state != FREE for head in self.slots):
                self.lot.remove(request)
                yield
        f.lot_found = True
        yield from self.unpark()
        if not self.mutant("interrupts die with the fast path"):
            f.interrupted = tuple(
                sorted({*self.lot, *(h.unique for h in self.slots if h.state != FREE and h.unique >= 0)})
            )

    def take_over(self, slot: int) -> Steps:
        """relay.c: relay_init, a request that had only been read."""
        head = self.slots[slot]
        first = head.attempts == 0
        if self.mutant("tried before it is written down"):
            head.attempts += 1
            yield
        if first or not self.mutant("tried before it is written down"):
            head.unique = head.message
            yield
            head.length = 1
            yield
        if not self.mutant("tried before it is written down"):
            head.attempts += 1
            yield
        if first:
            self.f.work.append(slot)
        else:
            self.f.counted.add(slot)
            yield from self.enqueue(slot)

    def attach(self) -> Steps:
        """control.c: receive, CONTROL_ATTACH; relay.c: relay_attach."""
        daemon, f = self.daemon, self.f
        assert daemon
        if not daemon.attached:
            yield from self.settle()
        f.python = 1
        f.given_up = False
        yield
        daemon.attached = True

    def tell(self) -> Steps:
        """control.c: send_doubts, one of them."""
        slot = next(slot for slot, head in enumerate(self.slots) if head.state == IN_DOUBT)
        yield from self.free_slot(slot)

    def hang_up(self) -> Steps:
        """control.c: process_gone; relay.c: relay_hang_up."""
        self.f.going = True
        yield from ()

    def give_up(self) -> Steps:
        """relay.c: relay_tick, fail_passed_locked."""
        f = self.f
        f.given_up = True
        while f.queue:
            if self.is_current(f.queue[0]):
                yield from self.fail(f.queue[0][0], "EIO")
            f.queue.pop(0)
        for slot, head in enumerate(self.slots):
            if head.state not in (PASSED, ANSWERING):
                continue
            if self.changes(head.unique) or head.state == ANSWERING:
                yield from self.doubt(slot)
            else:
                yield from self.fail(slot, "EIO")

    # --- threads that own slots: serve.c, miss_threads.c, interrupt.c -------------------------------------------------

    def listen(self, worker: int) -> Steps:
        """serve.c: serve_run reads a request."""
        if self.f.own[worker] == NONE:
            yield from self.take_slot(worker)
        slot = self.f.own[worker]
        yield from self.ready(slot)
        request = self.unread.pop(0)
        self.arrived[request] = True
        self.slots[slot].message = request
        yield
        yield from self.fill(slot, request)
        self.f.serving[worker] = slot

    def next_work(self, worker: int) -> Steps:
        """serve.c: serve_work, its beginning; lot.c: relay_next_work."""
        yield from self.ready(self.f.own[worker])
        self.f.serving[worker] = self.f.work.pop(0)

    def serve_hit(self, worker: int) -> Steps:
        """serve.c: serve, ANSWERED. A slot of work is freed (serve_work), the worker's own is kept."""
        slot = self.f.serving[worker]
        self.answer(self.slots[slot].unique, "ok")
        yield
        self.f.serving[worker] = NONE
        if slot in self.f.counted:  # lot.c: relay_unclaim
            self.f.counted.discard(slot)
            yield from self.unpark()
        if slot != self.f.own[worker]:
            yield from self.free_slot(slot)

    def serve_pass(self, worker: int) -> Steps:
        """serve.c: serve, PASS; serve_work frees a slot whose request was put into the lot."""
        f = self.f
        slot = f.serving[worker]
        f.serving[worker] = NONE
        given = yield from self.pass_on(slot)
        if slot != f.own[worker]:
            if not given:
                yield from self.free_slot(slot)
        elif given:
            f.own[worker] = NONE

    def serve_miss(self, worker: int) -> Steps:
        """miss.c: a READ waits for a fetch; its slot is the fetch's."""
        f = self.f
        slot = f.serving[worker]
        f.serving[worker] = NONE
        f.fetching.add(slot)
        if slot == f.own[worker]:
            f.own[worker] = NONE
        yield from ()

    def fetched(self, slot: int, what: str) -> Steps:
        """miss_threads.c: finish_waiters; miss.c: miss_interrupt, miss_tick."""
        self.f.fetching.discard(slot)
        self.answer(self.slots[slot].unique, what)
        yield
        yield from self.free_slot(slot)

    def fetch_failed(self, slot: int) -> Steps:
        """miss_threads.c: finish_waiters, what the source refused."""
        self.f.fetching.discard(slot)
        if not (yield from self.pass_on(slot)):
            yield from self.free_slot(slot)

    def interrupt(self, request: int) -> Steps:
        """interrupt.c: try_interrupt; relay.c: relay_interrupt; lot.c: interrupt_parked_locked; miss.c: miss_interrupt.

        Python's and the fetches' requests are answered EINTR; of what a thread has in hand it is asked again.
        """
        f = self.f
        f.interrupted = tuple(sorted({*f.interrupted, request}))
        self.heard[request] = True
        # caller_of: the message of a slot without a request has no process
        holder = next((h for h in self.slots if h.unique == request and h.state != FREE), None)
        if holder.message == NONE if holder else request not in self.lot:
            f.interrupted = tuple(one for one in f.interrupted if one != request)
            return
        for slot, head in enumerate(self.slots):
            if head.unique == request and slot in f.fetching:
                yield from self.fetched(slot, "EINTR")
            elif head.unique == request and self.reads(request) and head.state == QUEUED:
                yield from self.fail(slot, "EINTR")
            elif head.unique == request and self.reads(request) and head.state == PASSED:
                self.answer(request, "EINTR")
                yield
                yield from self.set_state(slot, ANSWERED)
            else:
                continue
            break
        else:
            if request not in self.lot or not self.reads(request):
                return
            self.answer(request, "EINTR")
            yield
            self.lot.remove(request)
        f.interrupted = tuple(one for one in f.interrupted if one != request)

    # --- Python -------------------------------------------------------------------------------------------------------

    def execute(self) -> None:
        """pyfuse3 reads a request and makes it; changes of one file are made in the order in which they arrive."""
        daemon = self.daemon
        assert daemon
        message = daemon.messages.pop(0)
        request = message[3]
        self.executed[request] = min(2, self.executed[request] + 1)
        kind = self.kind(request)
        if kind in "MF" and self.executed[request] > 1:
            raise Violation(f"{'MF'[kind == 'F']} {request} is made twice")
        if kind == "W" and self.answered[request]:
            raise Violation(f"WRITE {request} is made after it was answered {self.answered[request]}")
        if kind == "M" and self.answered[request] and not self.doubted[request]:
            raise Violation(f"MKDIR {request} is made after it was answered {self.answered[request]}")
        if kind != "F":
            daemon.executing = (*daemon.executing, message)

    def reply(self, message: Owed) -> None:
        daemon = self.daemon
        assert daemon
        daemon.executing = tuple(one for one in daemon.executing if one != message)
        daemon.answers.append(message)

    def kill_daemon(self) -> None:
        if self.fastpath and self.fastpath.python == 1:
            self.dead, self.fastpath.python = self.daemon, 2
            assert self.dead
            self.dead.executing = ()
        self.daemon = None
        self.daemon_kills -= 1

    def start_daemon(self) -> None:
        self.daemon = Daemon()


Operation = tuple[str, tuple[object, ...]]
"""Of the fast path: the name of a method of State, and its arguments."""


def operations(state: State) -> Iterator[Operation]:
    """What the fast path may do next."""
    of, f = state.of, state.fastpath
    if f is None:
        if state.daemon:
            yield "start", ()
        return
    for worker in range(of.workers):
        slot = f.serving[worker]
        if slot != NONE:
            kind = state.kind(state.slots[slot].unique)
            yield "serve_pass", (worker,)
            if kind == "R":
                yield "serve_hit", (worker,)
            if kind == "R" and of.fetches:
                yield "serve_miss", (worker,)
        elif state.unread and (f.own[worker] != NONE or f.free):
            yield "listen", (worker,)
        if slot == NONE and f.work and f.own[worker] != NONE:
            yield "next_work", (worker,)
        elif slot == NONE and f.work and f.free:
            yield "take_slot", (worker,)
    for slot in sorted(f.fetching):
        yield "fetched", (slot, "ok")
        yield "fetch_failed", (slot,)
    socket = state.socket
    if socket and not f.going and f.queue and (not state.is_current(f.queue[0]) or len(socket.messages) < of.room):
        yield "run_sender", ()
    if socket and socket.answers:
        yield "run_receiver", ()
    elif f.python == 2 and f.going:
        yield "python_gone", ()
    elif f.python == 2:
        yield "hang_up", ()
    if state.daemon and not f.python:
        yield "attach", ()
    if f.python == 1 and state.daemon and state.daemon.attached and any(s.state == IN_DOUBT for s in state.slots):
        yield "tell", ()
    if of.gives_up and not f.python and not f.given_up and not state.daemon:
        yield "give_up", ()
    for request, dying in enumerate(state.dying):
        if dying and state.reads(request) and (not state.heard[request] or request in f.interrupted):
            yield "interrupt", (request,)


def run(state: State, operation: Operation) -> State:
    """The state afterwards."""
    new = state.copy()
    for _ in getattr(new, operation[0])(*operation[1]):
        pass
    return new


def killed(state: State, operation: Operation) -> Iterator[State]:
    """The states after a kill in the middle of it."""
    new = state.copy()
    steps = getattr(new, operation[0])(*operation[1])
    for _ in steps:
        yield new.copy().kill_fastpath()


Edge = tuple[str, State]


def progress(state: State) -> Iterator[Edge]:
    """What happens by itself."""
    for operation in operations(state):
        yield operation[0], run(state, operation)
    daemon = state.daemon
    if daemon is None:
        new = state.copy()
        new.start_daemon()
        yield "start_daemon", new
        return
    if daemon.messages:
        new = state.copy()
        new.execute()
        yield "execute", new
    for message in daemon.executing:
        new = state.copy()
        new.reply(message)
        yield "reply", new


def faults(state: State) -> Iterator[Edge]:
    """What somebody does to it."""
    if state.of.signals:
        for request, dying in enumerate(state.dying):
            if not dying and state.arrived[request] and not state.answered[request] and state.reads(request):
                new = state.copy()
                new.dying[request] = True
                yield "kill_caller", new
    if state.daemon_kills and state.daemon:
        new = state.copy()
        new.kill_daemon()
        yield "kill_daemon", new
    if state.fastpath_kills and state.fastpath:
        yield "kill_fastpath", state.copy().kill_fastpath()
    if state.fastpath_kills:
        for operation in operations(state):
            for new in killed(state, operation):
                yield f"{operation[0]}, killed", new


def check(state: State) -> None:
    """What holds whenever no operation is under way."""
    f = state.fastpath
    if f is None:
        return
    owned = [slot for slot in (*f.own, *f.serving) if slot != NONE]
    owned = [*dict.fromkeys(owned), *f.free, *f.work, *f.fetching]
    if len(owned) != len(set(owned)):
        raise Violation(f"a slot has two owners: {owned}")
    for slot, head in enumerate(state.slots):
        if (head.state in (FREE, READING)) != (slot in owned):
            raise Violation(f"slot {slot} in state {head.state} has no owner, or one too many")
        if head.state == QUEUED and (slot, head.generation) not in f.queue:
            raise Violation(f"slot {slot} is queued in no queue")
    for request, heard in enumerate(state.heard):
        if not heard or state.answered[request] or request in f.interrupted or not state.arrived[request]:
            continue
        raise Violation(f"the death of the caller of request {request} is forgotten")


def check_end(state: State) -> None:
    """What holds when nothing happens any more."""
    f = state.fastpath
    for request, answered in enumerate(state.answered):
        if not answered and state.kind(request) != "F":
            raise Violation(f"request {request} is never answered")
        if answered == "ok" and state.kind(request) == "M" and state.executed[request] != 1:
            raise Violation(f"MKDIR {request} is answered, and was made {state.executed[request]} times")
    assert f
    kept = [slot for slot, head in enumerate(state.slots) if head.state != FREE and slot not in f.own]
    if kept or state.lot or len(f.free) + len([slot for slot in f.own if slot != NONE]) != len(state.slots):
        raise Violation(f"slots {kept} or requests {state.lot} stay for ever")


@dataclass(slots=True)
class Found:
    states: int
    transitions: int
    ends: int


def explore(scenario: Scenario) -> Found:
    """All states. Raises Violation with the way that leads there.

    What happens by itself makes no circle, and wherever it stops everything is done: so every fair run comes to a good
    end.
    """
    first = State(scenario)
    keys: dict[object, int] = {first.key(): 0}
    came_from: list[tuple[int, str]] = [(0, "")]
    forward: list[list[int]] = []
    todo = deque([first])
    transitions = ends = 0

    def way(number: int) -> str:
        names = []
        while number:
            number, name = came_from[number]
            names.append(name)
        return " → ".join(reversed(names))

    while todo:
        state, number = todo.popleft(), len(forward)
        forward.append([])
        name = ""
        try:
            check(state)
            by_itself = 0
            for is_fault, edges in ((False, progress(state)), (True, faults(state))):
                for name, new in edges:
                    transitions += 1
                    key = new.key()
                    to = keys.get(key)
                    if to is None:
                        to = keys[key] = len(came_from)
                        came_from.append((number, name))
                        todo.append(new)
                    if not is_fault and to != number:
                        forward[number].append(to)
                        by_itself += 1
            name = ""
            if not by_itself:
                ends += 1
                check_end(state)
        except Violation as found:
            raise Violation(f"{found}\n{scenario}\n{way(number)} → {name}") from None
    if left := circle(forward):
        raise Violation(f"it may go on for ever\n{scenario}\n{way(left)}")
    return Found(len(forward), transitions, ends)


def circle(forward: list[list[int]]) -> int:
    """A state on a circle; 0: there is none. (Nothing leads back to the first.)"""
    coming = [0] * len(forward)
    for to in itertools.chain.from_iterable(forward):
        coming[to] += 1
    todo = [number for number, count in enumerate(coming) if not count]
    done = 0
    while todo:
        done += 1
        for to in forward[todo.pop()]:
            coming[to] -= 1
            if not coming[to]:
                todo.append(to)
    return next((number for number, count in enumerate(coming) if count), 0) if done < len(forward) else 0


SCENARIOS = [
    Scenario("M", fastpath_kills=3, daemon_kills=2),
    Scenario("W", fastpath_kills=2, daemon_kills=2),
    Scenario("F", fastpath_kills=2, daemon_kills=2),
    Scenario("S", room=1, fastpath_kills=2, daemon_kills=1),
    Scenario("R", fetches=True, fastpath_kills=2, daemon_kills=1),
    Scenario("M", gives_up=True, fastpath_kills=2, daemon_kills=2),
    Scenario("MW", room=1, fastpath_kills=1, daemon_kills=1),
    Scenario("RR", workers=2, slots=3, share=1, signals=True, fastpath_kills=0, daemon_kills=0),
    Scenario("RM", share=1, fastpath_kills=1, daemon_kills=0),
    Scenario("MM", share=1, places=0, fastpath_kills=1, daemon_kills=0),
    Scenario("R", signals=True, fetches=True),
]

if __name__ == "__main__":
    for one in SCENARIOS:
        begun = time.monotonic()
        found = explore(one)
        print(
            f"{found.states:,} states, {found.transitions:,} transitions, {time.monotonic() - begun:.1f} s: {one}",
            flush=True,
        )
