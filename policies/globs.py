"""Globs by which users name paths: what stays mutable (`--mutable`), the partitions of a graph.

A pattern without a slash matches a name at any depth (`*.log`); one with a slash matches the path from the root of
the mount (`runs/*/checkpoints`), where `*` and `?` stay within one component and `**` crosses any number of them.
A pattern that matches a directory covers all that is beneath it. The rules of .gitignore, less negation.
"""

import re
from collections.abc import Iterable


class InvalidGlob(ValueError):
    """A pattern that can match nothing; the command line reports it as a usage error."""


def _component(pattern: str) -> str:
    """The regular expression of one component, without slashes."""
    out = []
    position = 0
    while position < len(pattern):
        char = pattern[position]
        position += 1
        if char == "*":
            out.append("[^/]*")
        elif char == "?":
            out.append("[^/]")
        elif char == "[" and (end := pattern.find("]", position + 1)) > 0:
            body = pattern[position:end]
            position = end + 1
            negated = body[0] in "!^"
            body = re.sub(r"([\\\[&~|^])", r"\\\1", body[1:] if negated else body)
            # A class never matches the slash, whatever it says.
            out.append(f"(?!/)[{'^' if negated else ''}{body}]")
        else:
            out.append(re.escape(char))
    return "".join(out)


def _translate(pattern: str) -> str:
    stripped = pattern.strip("/")
    components = [c for c in stripped.split("/") if c]
    if not components or any(c in (".", "..") for c in components):
        raise InvalidGlob(f"not a pattern that can match beneath the mount: {pattern!r}")
    anchored = "/" in pattern.rstrip("/")
    expression = "" if anchored else "(?:.*/)?"
    for index, component in enumerate(components):
        last = index == len(components) - 1
        if component == "**":
            expression += ".+" if last else "(?:.*/)?"
        else:
            expression += _component(component) + ("" if last else "/")
    return expression + "(?:/.*)?"


def _translate_above(pattern: str) -> str:
    """The regular expression of directories beneath which names match because of where the directory lies."""
    if "/" not in pattern.rstrip("/"):
        return "(?!)"  # a name matches wherever it lies
    expression, end = "", ""
    for component in [c for c in pattern.split("/") if c][:-1]:
        if component == "**":
            return expression + "(?:.*)" + end
        expression += _component(component) + "(?:/"
        end += ")?"
    return expression.removesuffix("(?:/") + end.removesuffix(")?")


class Globs:
    """The compiled patterns. Paths are bytes relative to the root of the mount, without a leading slash."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        try:
            self._compiled = [
                re.compile(_translate(p).encode("utf-8", "surrogateescape"), re.DOTALL) for p in self.patterns
            ]
            self._above = [
                re.compile(_translate_above(p).encode("utf-8", "surrogateescape"), re.DOTALL) for p in self.patterns
            ]
        except re.error as error:
            raise InvalidGlob(f"not a valid pattern: {error}") from None

    def __bool__(self) -> bool:
        return bool(self._compiled)

    def matches(self, path: bytes) -> bool:
        return any(expression.fullmatch(path) for expression in self._compiled)

    def reach_beneath(self, directory: bytes) -> bool:
        """May a name beneath a directory match that would not match in every directory?"""
        return self.matches(directory) or any(expression.fullmatch(directory) for expression in self._above)
