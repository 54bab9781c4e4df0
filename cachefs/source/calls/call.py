"""One call to the source, and whose it is."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import outcome

from cachefs.source import shares
from cachefs.source.shares import Party

T = TypeVar("T")

FIRST_PAUSE_S = 0.001


@dataclass(slots=True, eq=False)
class Call(Generic[T]):
    """Its state changes on the trio thread only."""

    function: Callable[[], T]
    done: Callable[[outcome.Outcome[T]], None]
    discard: Callable[[T], object] | None
    once: bool
    question: Hashable
    """What it asks. None: what no other call asks."""
    began: float
    deadline: float
    party: Party = field(default_factory=shares.party)
    owner: int = field(init=False)
    """Whose slot it has or had, or will be counted for first."""
    pause_s: float = FIRST_PAUSE_S
    checked: bool = False
    """It failed as if the source were lost, and the source was not."""
    running: bool = False
    abandoned: bool = False
    probe: bool = False

    def __post_init__(self) -> None:
        self.owner = self.party.owners[0]
