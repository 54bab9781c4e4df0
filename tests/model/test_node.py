"""The filesystem's objects against the reference. MODEL_RUNS, MODEL_STEPS: how much."""

import os
import random

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from cachefs.options import Options
from tests.model.clocks import Clocks
from tests.model.machine import Driven, Machine
from tests.model.modes import OPTIONS
from tests.model.node import Node, Synchronous, TrioThread

RUNS, STEPS = int(os.environ.get("MODEL_RUNS", "50")), int(os.environ.get("MODEL_STEPS", "25"))


def machine_for(options: Options) -> type[Machine]:
    class OnNode(Machine):
        def make(self) -> Driven:
            self._running = TrioThread(self.clocks).running()
            call = self._running.__enter__()
            self._node = Synchronous(Node(self.root, self.place, self.options, self.clocks, random.Random(0)), call)
            self._node.start()
            return self._node  # type: ignore[return-value]

        def __init__(self) -> None:
            self.clocks = Clocks()
            super().__init__()

        def now(self) -> float:
            return self.clocks.clock.monotonic_s()

        def end(self) -> None:
            try:
                self._close_all()
                self._node.end()
            finally:
                self._running.__exit__(None, None, None)

    OnNode.options = options
    return OnNode


@pytest.mark.parametrize("mode", OPTIONS)
def test_a_node_shows_what_the_reference_allows(mode: str, random_seed: int) -> None:
    run_state_machine_as_test(
        seed(random_seed)(machine_for(OPTIONS[mode])),
        settings=settings(
            max_examples=RUNS,
            stateful_step_count=STEPS,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
