"""Globs with which users select paths: what stays mutable (`--mutable`, `--immutable`), the partitions of a graph.

A pattern without a slash matches a name at any depth (`*.log`); one with a slash matches the path from the root of
the mount (`runs/*/checkpoints`), where `*` and `?` stay within one component and `**` crosses any number of them.
A pattern that matches a directory includes everything beneath it. The rules are those of .gitignore, without negation.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator


class InvalidGlob(ValueError):
    """A pattern that can match nothing; the command line reports it as a usage error."""


_END = r"(?=/|\Z)"
"""The end of a component."""


def _component(pattern: str) -> str:
    """The regular expression of one component, without slashes.

    Users choose names, so matching must take linear time. The part between two stars has a fixed length, so its first
    match is as good as any other, and an atomic group never tries a second one (as in `fnmatch`).
    """
    parts = [""]
    position = 0
    while position < len(pattern):
        char = pattern[position]
        position += 1
        if char == "*":
            parts.append("")
        elif char == "?":
            parts[-1] += "[^/]"
        elif char == "[" and (end := pattern.find("]", position + 1)) > 0:
            body = pattern[position:end]
            position = end + 1
            negated = body[0] in "!^"
            body = re.sub(r"([\\\[&~|^])", r"\\\1", body[1:] if negated else body)
            # A class never matches a slash.
            parts[-1] += f"(?!/)[{'^' if negated else ''}{body}]"
        else:
            parts[-1] += re.escape(char)
    if len(parts) == 1:
        return parts[0]
    first, *inner, last = parts
    return first + "".join(f"(?>[^/]*?{part})" for part in inner if part) + "[^/]*" + last


def _components(pattern: str) -> tuple[list[str], bool]:
    """The components of a pattern, and whether it matches paths instead of names."""
    found = [component for component in pattern.split("/") if component]
    if not found or any(component in (".", "..") for component in found):
        raise InvalidGlob(f"{pattern!r} can match nothing beneath the mount: use a name, or a path relative to it")
    return found, "/" in pattern.rstrip("/")


def _groups(pattern: str) -> list[list[str]]:
    """The parts between the `**` of a pattern, as expressions of components. Anything may precede a name."""
    components, is_path = _components(pattern)
    groups: list[list[str]] = [[]] if is_path else [[], []]
    for component in components:
        if component == "**":
            groups.append([])
        else:
            groups[-1].append(_component(component))
    return groups


def _translate(pattern: str) -> str:
    """The regular expression of paths that match, and of all paths beneath them.

    Between two `**`, too, the first match is as good as any other.
    """
    first, *others = _groups(pattern)
    pieces = ["/".join(first)] if first else []
    pieces += ["(?>(?:[^/]*/)*?" + "/".join(group) + _END + ")" for group in others if group]
    ends_in_any = bool(others) and not others[-1]
    return "/".join([*pieces, ".+"] if ends_in_any else pieces) + "(?:/.*)?"


def _translate_holders(pattern: str) -> str:
    """The regular expression of directories in which a name may match, with a final slash except for the root."""
    components, is_path = _components(pattern)
    anywhere = "(?:[^/]*/)*"
    if len(components) == 1:
        return "" if is_path else anywhere
    first, *others = _groups("/" + "/".join(components[:-1]))
    expression = "".join(component + "/" for component in first)
    for group in filter(None, others[:-1]):
        expression += "(?>(?:[^/]*/)*?" + "/".join(group) + "/)"
    if others:
        expression += anywhere + "".join(component + "/" for component in others[-1])
    return expression


def _translate_above(pattern: str) -> str:
    """The regular expression of directories beneath which names match because of the path of the directory."""
    components, is_path = _components(pattern)
    if not is_path:
        return "(?!)"  # a name matches in any directory
    expression, end = "", ""
    for component in components[:-1]:
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
        """May any name in a directory match, existing or not?"""
        prefix = directory + b"/" if directory else b""
        return self.matches(directory) or any(expression.fullmatch(prefix) for expression in self._holders)


REMEMBERED_NAMES = 1 << 14


class Names:
    """Patterns of names without slashes. Unlike a glob, a name covers nothing beneath a directory that has it."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        expression = "|".join(map(_component, self.patterns)) if self.patterns else "(?!)"
        compiled = re.compile(expression.encode(), re.DOTALL)
        self.matches: Callable[[bytes], bool] = functools.lru_cache(REMEMBERED_NAMES)(
            lambda name: compiled.fullmatch(name) is not None
        )
        """Does this name match? Each listing asks again for each of its names."""

    def __bool__(self) -> bool:
        return bool(self.patterns)


class AllExcept(Globs):
    """All paths but those that match `patterns`; of these, again those that match `also`.

    A directory that leads to a pattern is an exception as well: `data/raw/**` excepts `data` and `data/raw`, as far as
    their names are free of wildcards.
    """

    def __init__(self, patterns: Iterable[str], also: Globs) -> None:
        given = tuple(patterns)
        super().__init__(also.patterns)
        self._exceptions = Globs(_with_directory(pattern) for pattern in given)
        self._leading = {directory.encode("utf-8", "surrogateescape") for each in given for directory in _leading(each)}
        self.patterns = (*(f"immutable:{pattern}" for pattern in given), *also.patterns)

    def __bool__(self) -> bool:
        return True

    def matches(self, path: bytes) -> bool:
        excepted = path in self._leading or self._exceptions.matches(path)
        return not excepted or super().matches(path)

    def reach_beneath(self, directory: bytes) -> bool:
        return True

    def match_within(self, directory: bytes) -> bool:
        return not self._exceptions.matches(directory) or super().match_within(directory)


def _with_directory(pattern: str) -> str:
    """`data/**` also for the directory itself."""
    directory = pattern.removesuffix("/**")
    return directory if directory == pattern or "/" in directory else "/" + directory


def _leading(pattern: str) -> Iterator[str]:
    """The directories that lead to what a pattern with a slash matches, up to the first wildcard."""
    components, is_path = _components(pattern)
    for count in range(1, len(components) if is_path else 0):
        if any(each in "*?[" for each in components[count - 1]):
            return
        yield "/".join(components[:count])
