"""Globs by which users name paths: what stays mutable (`--mutable`), the partitions of a graph.

A pattern without a slash matches a name at any depth (`*.log`); one with a slash matches the path from the root of
the mount (`runs/*/checkpoints`), where `*` and `?` stay within one component and `**` crosses any number of them.
A pattern that matches a directory covers all that is beneath it. The rules of .gitignore, less negation.
"""

import re
from collections.abc import Callable, Iterable


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


def _split(pattern: str) -> tuple[str, str]:
    """The regular expression of what precedes the last component, its slash included; the last component."""
    stripped = pattern.strip("/")
    components = [c for c in stripped.split("/") if c]
    if not components or any(c in (".", "..") for c in components):
        raise InvalidGlob(f"not a pattern that can match beneath the mount: {pattern!r}")
    anchored = "/" in pattern.rstrip("/")
    expression = "" if anchored else "(?:.*/)?"
    for component in components[:-1]:
        expression += "(?:.*/)?" if component == "**" else _component(component) + "/"
    return expression, components[-1]


def _translate(pattern: str) -> str:
    before, last = _split(pattern)
    return before + (".+" if last == "**" else _component(last)) + "(?:/.*)?"


def _translate_holders(pattern: str) -> str:
    """The regular expression of directories, with a final slash but for the root, in which a name may match."""
    return _split(pattern)[0]


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
            self._compiled = self._compile(_translate)
            self._above = self._compile(_translate_above)
            self._holders = self._compile(_translate_holders)
        except re.error as error:
            raise InvalidGlob(f"not a valid pattern: {error}") from None

    def _compile(self, translate: Callable[[str], str]) -> list[re.Pattern[bytes]]:
        return [re.compile(translate(p).encode("utf-8", "surrogateescape"), re.DOTALL) for p in self.patterns]

    def __bool__(self) -> bool:
        return bool(self._compiled)

    def matches(self, path: bytes) -> bool:
        return any(expression.fullmatch(path) for expression in self._compiled)

    def reach_beneath(self, directory: bytes) -> bool:
        """May a name beneath a directory match that would not match in every directory?"""
        return self.matches(directory) or any(expression.fullmatch(directory) for expression in self._above)

    def match_within(self, directory: bytes) -> bool:
        """May a name in a directory match, whatever is there now?"""
        prefix = directory + b"/" if directory else b""
        return self.matches(directory) or any(expression.fullmatch(prefix) for expression in self._holders)
