"""When this mount changed which object last: what was asked of the source before that is no answer for later.

An lstat that began before a write and is answered after it brings an older size. The kernel, which knows the newer one,
would take it over, and put there what is appended next. Such an answer is not believed (`happened_since`), and
requests that come after the write do not get it (`count`).
"""

from collections import OrderedDict
from collections.abc import Callable

MOST = 4096


class LastChanges:
    def __init__(self, monotonic_ns: Callable[[], int]) -> None:
        # dependencies
        self._monotonic_ns = monotonic_ns
        # state
        self.count = 0
        """How many changes there were."""
        self._when_ns: OrderedDict[int, int] = OrderedDict()
        """Number of an inode → time of its last change, the latest at the end."""
        self._forgotten_ns = 0
        """Time of the last change that is not in there any more."""

    def note(self, number: int) -> None:
        """A change has just been made."""
        self.count += 1
        self._when_ns[number] = self._monotonic_ns()
        self._when_ns.move_to_end(number)
        if len(self._when_ns) > MOST:
            self._forgotten_ns = self._when_ns.popitem(last=False)[1]

    def happened_since(self, number: int, began_ns: int) -> bool:
        """Was it changed after a call that began then? 0: nobody knows when it began."""
        return 0 < began_ns <= self._when_ns.get(number, self._forgotten_ns)
