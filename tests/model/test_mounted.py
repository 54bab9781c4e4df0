"""Real mounts against the reference.

MODEL_RUNS, MODEL_STEPS: how much. MODEL_WAITS: the three times that may pass, in seconds (machine.py).

To see what the machine finds in another cachefs: MODEL_PROGRAM, its command line; MODEL_ANY_ERROR: errors do not count,
so that it finds wrong bytes and names. MODEL_SHRINK: a find is made as short as it gets, which takes long.
"""

import os
import shlex
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from cachefs.options import Options
from tests.conftest import Mount
from tests.model.machine import Driven, Machine
from tests.model.modes import OPTIONS
from tests.model.mounted import OURS, Mounted

pytestmark = pytest.mark.mount
PROGRAM = shlex.split(os.environ.get("MODEL_PROGRAM", "")) or OURS
RUNS, STEPS = int(os.environ.get("MODEL_RUNS", "3")), int(os.environ.get("MODEL_STEPS", "30"))
SHRINKS = "MODEL_SHRINK" in os.environ
ATTRIBUTES_S = 0.1
LIMITED = ["--metadata-limit", "3"]
NEVER = ["--read-only", "--revalidate", "never"]
ARGUMENTS = {
    "read-write": [],
    "read-only": ["--read-only"],
    "mutable": ["--mutable", "**"],
    "none": ["--cache", "none"],
    "metadata": ["--cache", "metadata"],
    "limited": [*LIMITED, "--metadata-retention", "lru"],
    "never": NEVER,
    "limited-never": [*NEVER, *LIMITED, "--metadata-retention", "lru", "--mutable", "d/*"],
    "full-never": [*NEVER, *LIMITED, "--mutable", "e/*"],
}


def machine_for(mode: str) -> type[Machine]:
    class OnMount(Machine):
        options: Options = replace(OPTIONS[mode], **{} if OPTIONS[mode].read_only else {"attr_timeout_s": ATTRIBUTES_S})
        slack_s = 0.3
        outlives_daemon = PROGRAM == OURS and "--no-fastpath" not in Mount.given()
        judges_errors = "MODEL_ANY_ERROR" not in os.environ
        waits = tuple(map(float, os.environ.get("MODEL_WAITS", "0.05,0.15,0.3").split(",")))

        def make(self) -> Driven:
            arguments = ["--small-file", "64K", *ARGUMENTS[mode], *(Mount.given() if PROGRAM == OURS else ())]
            if not OPTIONS[mode].read_only:
                arguments += ["--attr-timeout", str(ATTRIBUTES_S)]
            self._mounted = Mounted(PROGRAM, self.root, self.place, arguments)
            return self._mounted

        def end(self) -> None:
            self._close_all()
            self._mounted.end()

    return OnMount


@pytest.mark.parametrize("mode", OPTIONS)
def test_a_mount_shows_what_the_reference_allows(mode: str, random_seed: int) -> None:
    run_state_machine_as_test(
        seed(random_seed)(machine_for(mode)),
        settings=settings(
            max_examples=RUNS,
            stateful_step_count=STEPS,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, *[Phase.shrink] * SHRINKS],
        ),
    )
