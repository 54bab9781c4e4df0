"""The relay in C does what the model of the slots does, killed or not.

RELAY_WALKS=N: that many random walks, drawn anew each time; without it they are always the same.
"""

import ctypes
import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.model import slots
from tests.model.relay import FIRST_UNIQUE, SLOTS, SOURCES, Relay, build
from tests.model.slots import NONE, Operation, Scenario, State

RUNS = int(os.environ.get("RELAY_WALKS", "300"))
STEPS = 60
MANY_WRITES = 40
Make = Callable[[Scenario], Relay]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("relay"))


def around(state: State) -> Iterator[Operation]:
    """What happens outside of the fast path."""
    daemon = state.daemon
    if daemon is None:
        yield "start_daemon", ()
        return
    if daemon.messages:
        yield "execute", ()
    for number in range(len(daemon.executing)):
        yield "reply", (number,)


def faults(state: State) -> Iterator[Operation]:
    if state.daemon:
        yield "kill_daemon", ()
    if state.fastpath:
        yield "kill_fastpath", ()
    for request, dying in enumerate(state.dying):
        if not dying and state.arrived[request] and not state.answered[request] and state.reads(request):
            yield "kill_caller", (request,)


def after(state: State, operation: Operation) -> State:
    """Of what is not the fast path's."""
    name, arguments = operation
    new = state.copy()
    if name == "reply":
        assert new.daemon
        new.reply(new.daemon.executing[arguments[0]])
    elif name == "kill_caller":
        new.dying[arguments[0]] = True
    else:
        getattr(new, name)()
    return new


class Walk:
    """Model and relay do the same. Where the relay was killed, the model is in one of several states."""

    def __init__(self, relay: Relay, dice: random.Random) -> None:
        self.relay = relay
        self.dice = dice
        self.states = [State(relay.of)]
        self.way: list[str] = []

    def keep(self, states: list[State], what: str) -> None:
        """Those that the relay may be in."""
        self.way.append(what)
        seen = self.relay.seen()
        self.states = list({state.key(): state for state in states if state.seen() == seen}.values())
        expected = "\n".join(map(str, {state.seen() for state in states}))
        assert self.states, f"{' → '.join(self.way)}\nthe relay: {seen}\nthe model:\n{expected}"

    def choose(self, *, faulty: bool) -> Operation | None:
        found = None
        for state in self.states:
            possible = {*slots.operations(state), *around(state)}
            if faulty and (self.dice.random() < 0.1 if found is None else True):
                possible |= {*faults(state)}
            found = possible if found is None else found & possible
        assert found is not None
        return self.dice.choice(sorted(found, key=repr)) if found else None

    def step(self, operation: Operation, kill_at: int = -1) -> None:
        name, arguments = operation
        if name in ("start_daemon", "execute", "reply", "kill_daemon", "kill_caller"):
            if name != "kill_caller":
                getattr(self.relay, name)(*arguments)
            self.keep([after(state, operation) for state in self.states], name)
        elif name == "kill_fastpath":
            self.relay.end_process()
            self.keep([state.copy().kill_fastpath() for state in self.states], name)
        elif self.relay.run(name, arguments, kill_at):
            self.keep([slots.run(state, operation) for state in self.begun(name)], name)
        else:
            killed = [state.copy().kill_fastpath() for state in self.states]
            for state in self.begun(name):
                killed += slots.killed(state, operation)
            self.keep(killed, f"{name}, killed before write {kill_at}")

    def begun(self, name: str) -> Iterator[State]:
        """A successor finds what is in the lot in any order."""
        for state in self.states:
            if name != "start":
                yield state
                continue
            for lot in itertools.permutations(state.lot):
                new = state.copy()
                new.lot = [*lot]
                yield new


def walk(relay: Relay, seed: int) -> list[str]:
    dice = random.Random(seed)
    run = Walk(relay, dice)
    for _ in range(STEPS):
        if (operation := run.choose(faulty=True)) is None:
            break
        run.step(operation, dice.randrange(MANY_WRITES) if dice.random() < 0.3 else -1)
    for _ in range(1000):  # nobody is killed any more
        if (operation := run.choose(faulty=False)) is None:
            break
        run.step(operation)
    for state in run.states:
        slots.check_end(state)
    for kind, answered in zip(relay.of.requests, relay.answered, strict=True):
        assert answered or kind == "F", f"{' → '.join(run.way)}: {relay.answered}"
    return run.way


SCENARIOS = [
    Scenario("RMWF", slots=SLOTS, workers=2, share=2, places=2, fastpath_kills=99, daemon_kills=99),
    Scenario("SRSM", slots=SLOTS, workers=1, room=1, fastpath_kills=99, daemon_kills=99, gives_up=True),
    Scenario("RSRW", slots=SLOTS, workers=2, share=1, places=1, fetches=True, fastpath_kills=99, daemon_kills=99),
    Scenario("MWMW", slots=SLOTS, workers=1, share=2, places=1, fastpath_kills=99, daemon_kills=99, gives_up=True),
    Scenario(
        "RSRR",
        slots=SLOTS,
        workers=2,
        share=2,
        places=4,
        room=1,
        fetches=True,
        signals=True,
        fastpath_kills=99,
        daemon_kills=99,
    ),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[one.requests for one in SCENARIOS])
def test_the_relay_does_what_the_model_does_also_after_kills_at_any_write(
    scenario: Scenario, library: ctypes.CDLL, random_seed: int
) -> None:
    kills = 0
    draw = random.Random(random_seed)
    for _ in range(RUNS // len(SCENARIOS)):
        seed = draw.getrandbits(32)
        relay = Relay(library, scenario)
        try:
            way = walk(relay, seed)
        except (AssertionError, slots.Violation) as wrong:
            raise AssertionError(f"seed {seed}: {wrong}") from wrong
        finally:
            relay.close()
        kills += sum("killed" in step for step in way)
    assert kills > RUNS // len(SCENARIOS) // 2  # on average three times as many


WRONG = {
    "no new generation": (
        "relay/lot.c",
        "    renew_locked(relay, slot, SLOT_FREE);\n",
        "    set_state_locked(relay, slot, SLOT_FREE);\n",
    ),
    "PASSING is passed on again": (
        "relay/relay.c",
        "Python may have it or not */\n            repeat_locked(relay, slot, false);",
        "Python may have it or not */\n            repeat_locked(relay, slot, true);",
    ),
    "answered while it counts as passed": (
        "relay/relay.c",
        "            set_state_locked(relay, slot, SLOT_ANSWERING);",
        "            ",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_comparison_sees_what_is_wrong_in_c(name: str, tmp_path: Path) -> None:
    file, right, wrong = WRONG[name]
    sources = shutil.copytree(SOURCES, tmp_path / "sources")
    text = (sources / file).read_text()
    assert text.count(right) == 1
    (sources / file).write_text(text.replace(right, wrong))
    library = build(tmp_path, sources)
    with pytest.raises((AssertionError, slots.Violation)):
        for number in range(2000):
            relay = Relay(library, SCENARIOS[number % len(SCENARIOS)])
            try:
                walk(relay, seed=number)
            finally:
                relay.close()


# --- what the model has found -----------------------------------------------------------------------------------------


@pytest.fixture
def make(library: ctypes.CDLL) -> Iterator[Callable[[Scenario], Relay]]:
    made: list[Relay] = []

    def make(scenario: Scenario) -> Relay:
        while made:
            made.pop().close()
        made.append(Relay(library, scenario))
        return made[0]

    yield make
    while made:
        made.pop().close()


def run(relay: Relay, *names: str) -> None:
    """Operations of the relay, of its first thread where they are a thread's, and of Python."""
    for name in names:
        if name in ("execute", "kill_daemon", "start_daemon", "end_process"):
            getattr(relay, name)()
        elif name == "reply":
            relay.reply(0)
        else:
            relay.run(name, (0,) if name in ("listen", "serve_pass", "next_work", "take_slot") else ())


def drain(relay: Relay) -> set[int]:
    """Until nothing happens any more. The requests that Python has made."""
    made = set()
    while True:
        view, daemon = relay.look(), relay.daemon
        assert daemon
        if relay.serving[0] != NONE:
            run(relay, "serve_pass")
        elif view.work_count:
            run(relay, "take_slot" if relay.own[0] == NONE else "next_work")
        elif view.has_python and view.queue_count and len(daemon.messages) < relay.of.room:
            run(relay, "run_sender")
        elif daemon.messages:
            run(relay, "execute")
            made |= {request for _, request in daemon.executing}
        elif daemon.executing:
            run(relay, "reply")
        elif daemon.answers:
            run(relay, "run_receiver")
        else:
            return made


def test_a_part_of_a_read_that_is_answered_before_all_parts_are_sent_is_not_lost(make: Make) -> None:
    relay = make(Scenario("S", slots=SLOTS, room=1))
    run(relay, "start", "attach", "listen", "serve_pass", "execute", "reply", "run_receiver")
    drain(relay)
    assert relay.answered == ["ok"]


def test_the_next_python_gets_all_parts_of_a_read(make: Make) -> None:
    relay = make(Scenario("S", slots=SLOTS, room=1))
    run(relay, "start", "attach", "listen", "serve_pass", "execute")
    run(relay, "kill_daemon", "hang_up", "python_gone", "start_daemon", "attach")
    drain(relay)
    assert relay.answered == ["ok"]


def test_an_answer_to_a_part_that_a_predecessor_sent_does_not_count_as_another_part(make: Make) -> None:
    relay = make(Scenario("S", slots=SLOTS, room=1))
    run(relay, "start", "attach", "listen", "serve_pass", "execute", "end_process", "start", "attach", "run_sender")
    run(relay, "reply", "run_receiver", "execute", "reply", "run_receiver")
    assert relay.answered == [""], "the second part has never been sent"
    drain(relay)
    assert relay.answered == ["ok"]


@pytest.mark.parametrize("kind", "WM")
def test_what_may_have_been_answered_is_not_made_again(kind: str, make: Make) -> None:
    deaths = 0
    for kill_at in range(MANY_WRITES):
        relay = make(Scenario(kind, slots=SLOTS))
        run(relay, "start", "attach", "listen", "serve_pass", "execute", "reply")
        deaths += not relay.run("run_receiver", kill_at=kill_at)
        was_answered = relay.answered[0]
        run(relay, "kill_daemon", "end_process", "start_daemon", "start", "attach")
        made = drain(relay)
        assert relay.answered[0]
        assert not (was_answered and made), f"killed before write {kill_at}"
    assert deaths > 2


@pytest.mark.parametrize("kind", "WM")
def test_what_is_refused_because_no_daemon_came_is_not_made_later(kind: str, make: Make) -> None:
    deaths = 0
    for kill_at in range(MANY_WRITES):
        relay = make(Scenario(kind, slots=SLOTS))
        run(relay, "start", "listen", "serve_pass")
        deaths += not relay.run("give_up", kill_at=kill_at)
        was_answered = relay.answered[0]
        run(relay, "end_process", "start", "attach")
        made = drain(relay)
        assert relay.answered[0]
        assert not (was_answered and made), f"killed before write {kill_at}"
    assert deaths > 2


@pytest.mark.parametrize("kind", "WM")
def test_what_is_refused_because_the_lot_is_full_is_not_made_later(kind: str, make: Make) -> None:
    deaths = 0
    for kill_at in range(MANY_WRITES):
        relay = make(Scenario(2 * kind, slots=SLOTS, share=1, places=0))
        run(relay, "start", "attach", "listen", "serve_pass", "listen")
        deaths += not relay.run("serve_pass", (0,), kill_at)
        was_answered = relay.answered[1]
        run(relay, "end_process", "start", "attach", "execute", "reply", "run_receiver")
        made = drain(relay)
        assert all(relay.answered)
        assert not (was_answered and 1 in made), f"killed before write {kill_at}"
    assert deaths > 2


def test_a_forget_is_passed_on_at_most_once(make: Make) -> None:
    deaths = 0
    for kill_at in range(MANY_WRITES):
        relay = make(Scenario("F", slots=SLOTS))
        run(relay, "start", "attach", "listen")
        assert relay.daemon
        deaths += not relay.run("serve_pass", (0,), kill_at)
        sent = len(relay.daemon.messages)
        run(relay, *["execute"] * sent, "end_process", "start", "attach")
        drain_only_sends(relay)
        assert sent + len(relay.daemon.messages) <= 1, f"killed before write {kill_at}"
    assert deaths > 2


def drain_only_sends(relay: Relay) -> None:
    while relay.look().work_count or relay.look().queue_count or relay.serving[0] != NONE:
        if relay.serving[0] != NONE:
            run(relay, "serve_pass")
        elif relay.look().queue_count:
            run(relay, "run_sender")
        else:
            run(relay, "take_slot" if relay.own[0] == NONE else "next_work")


def test_a_request_is_answered_whenever_those_die_that_find_it(make: Make) -> None:
    arrived = 0
    for arrival, find in itertools.product(range(MANY_WRITES), range(12)):
        relay = make(Scenario("M", slots=SLOTS))
        run(relay, "start", "attach")
        relay.run("listen", (0,), arrival)
        if relay.unread:
            continue
        arrived += 1
        run(relay, "end_process")
        relay.run("start", (), find)
        run(relay, "end_process", "start", "attach")
        drain(relay)
        assert relay.answered == ["ok"], f"killed before writes {arrival} and {find}"
    assert arrived > MANY_WRITES


def test_a_successor_asks_again_after_callers_of_whom_its_predecessor_was_told(make: Make) -> None:
    relay = make(Scenario("RRM", slots=SLOTS, share=1))
    run(relay, "start", "attach", "listen", "serve_pass", "listen", "serve_pass", "end_process", "start")
    view = relay.look()
    assert [*view.interrupted[: view.interrupt_count]] == [FIRST_UNIQUE, FIRST_UNIQUE + 1]
