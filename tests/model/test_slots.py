"""The model of the slots holds in every state, and sees when something is wrong with it."""

import dataclasses

import pytest

from tests.model.slots import SCENARIOS, Scenario, Violation, explore


@pytest.mark.parametrize(
    "scenario", SCENARIOS, ids=[f"{number} {one.requests}" for number, one in enumerate(SCENARIOS)]
)
def test_every_request_is_answered_and_no_change_made_twice_whoever_is_killed_when(scenario: Scenario) -> None:
    found = explore(scenario)
    print(f"{found.states:,} states, {found.transitions:,} transitions")
    assert found.ends and found.transitions > found.states > 100


WRONG = {
    "no new generation": (Scenario("S"), "never answered|without a part|reaches"),
    "renewed before it is ready": (Scenario("MM", daemon_kills=0), "made twice"),
    "a slot that is lost": (Scenario("M"), "no owner"),
    "refused, and done afterwards": (Scenario("M", gives_up=True), "after it was answered"),
    "out of its slot before it is in the lot": (Scenario("RR", slots=3, share=1, daemon_kills=0), "never answered"),
    "out of the lot before it is in a slot": (Scenario("RR", slots=3, share=1, daemon_kills=0), "never answered"),
    "sent before it is passing": (Scenario("M"), "has none"),
    "a change is passed on again": (Scenario("M"), "made twice"),
    "PASSING is passed on again": (Scenario("M"), "made twice"),
    "all was unseen": (Scenario("M"), "made twice"),
    "a FORGET is passed on again": (Scenario("F"), "made twice"),
    "taken before it is delivered": (Scenario("M", daemon_kills=0), "never answered"),
    "answered while it counts as passed": (Scenario("W"), "after it was answered"),
    "a part is answered before all are sent": (
        Scenario("S", room=1, fastpath_kills=0, daemon_kills=0),
        "never answered",
    ),
    "the next Python gets the rest of the parts": (Scenario("S", room=1, fastpath_kills=0), "never answered"),
    "the successor sends parts of the same life": (Scenario("S", room=1, daemon_kills=0), "without a part"),
    "tried before it is written down": (Scenario("M", fastpath_kills=2, daemon_kills=0), "no request|never answered"),
    "the last unique stays": (
        Scenario("RR", workers=2, slots=3, share=1, signals=True, fastpath_kills=0, daemon_kills=0),
        "forgotten",
    ),
    "interrupts die with the fast path": (Scenario("R", signals=True, daemon_kills=0), "forgotten"),
}


@pytest.mark.parametrize("mutant", WRONG)
def test_the_search_finds_what_is_wrong(mutant: str) -> None:
    scenario, what = WRONG[mutant]
    explore(scenario)
    with pytest.raises(Violation, match=what):
        explore(dataclasses.replace(scenario, mutant=mutant))
