"""Functions that an object calls when something happens to it."""

from collections.abc import Callable
from typing import Generic, ParamSpec

P = ParamSpec("P")


class Listeners(Generic[P]):
    """`listeners(...)` calls each of them, in the order in which they were added. False while there are none.

    The object that is listened to makes it, and objects that are made later add their functions: no callback is
    replaced by another one.
    """

    def __init__(self) -> None:
        self._functions: list[Callable[P, object]] = []

    def __bool__(self) -> bool:
        return bool(self._functions)

    def add(self, function: Callable[P, object]) -> None:
        self._functions.append(function)

    def clear(self) -> None:
        """They listen no more."""
        self._functions.clear()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for function in self._functions:
            function(*args, **kwargs)
