"""One call to the source, and its owners."""

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
    """Identifies what the call asks. None: no other call asks the same."""
    began: float
    deadline: float
    party: Party = field(default_factory=shares.party)
    owner: int = field(init=False)
    """The owner of its slot; before it has one, the first owner that it will be counted for."""
    pause_s: float = FIRST_PAUSE_S
    checked: bool = False
    """It failed as if the source were gone, and the source was not."""
    running: bool = False
    abandoned: bool = False
    probe: bool = False

    def __post_init__(self) -> None:
        self.owner = self.party.owners[0]
