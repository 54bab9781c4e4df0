"""Mutants of a file in C, from its tokens.

Locks are left alone: ThreadSanitizer looks for those that are missing (`make soak-sanitized`).
"""

import re
from collections.abc import Iterator

from tests.mutation import Mutant

_OTHERS = {
    "<": ("<=", ">="), "<=": ("<", ">"), ">": (">=", "<="), ">=": (">", "<"), "==": ("!=",), "!=": ("==",),
    "+": ("-",), "-": ("+",), "+=": ("-=",), "-=": ("+=",), "&": ("|",), "|": ("&",), "|=": ("&=",),
    "<<": (">>",), ">>": ("<<",), "true": ("false",), "false": ("true",), "&&": ("||",), "||": ("&&",),
}  # fmt: skip
_KINDS = {
    **dict.fromkeys(("<", "<=", ">", ">=", "==", "!="), "other comparison"),
    **dict.fromkeys(("true", "false"), "other truth value"),
    **dict.fromkeys(("&&", "||"), "and or or"),
}
# Binary operators have spaces around them here (clang-format's way), so that pointers and addresses are not meant.
_OPERATOR = re.compile(rb"(?<= )(<=|>=|==|!=|<<|>>|&&|\|\||\+=|-=|\|=|<|>|\+|-|&|\|)(?= )|\b(?:true|false)\b")
_NUMBER = re.compile(rb"(?<![\w.])(?<!< )(?<!>= )(\d+)(?![\w.])")
"""Not compared as in `fd < 0`."""
_NOT = re.compile(rb"!(?=[\w(])")
_CONDITION = re.compile(rb"\b(?:if|while) (?=\()")
_STATEMENT = re.compile(rb"(?<=\n)( +)([^\n;{}]+);(?=\n)")
_CALL = re.compile(rb"[a-z_]+\(.*\)", re.DOTALL)
_CHANGE = re.compile(rb"[\w>.\[\]*-]+ [|+&-]?= .*", re.DOTALL)
_UNMEANT = re.compile(
    rb"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|^#(?:\\\n|[^\n])*", re.DOTALL | re.MULTILINE
)
_FUNCTION = re.compile(rb"^[a-z][^\n;={]*?(\w+)\([^;{}]*\)\n\{\n.*?^\}\n", re.DOTALL | re.MULTILINE)
_LEFT_ALONE = (b"pthread_", b"lock_", b"ASSERT(", b"log_", b"fprintf", b"static_assert", b"_Static_assert", b"free(")


def mutants(path: str, source: bytes) -> Iterator[Mutant]:
    code = _UNMEANT.sub(lambda found: re.sub(rb"[^\n]", b"\0", found[0]), source)
    for found in _OPERATOR.finditer(code):
        sign = found[0].decode()
        for other in _OTHERS[sign]:
            yield Mutant(path, *found.span(), other.encode(), _KINDS.get(sign, "other arithmetic"))
        if sign in ("&&", "||"):
            start, end = _operand(code, found.end(), +1), _operand(code, found.start(), -1)
            yield Mutant(path, found.start(), start, b"", "drop a condition")
            yield Mutant(path, end, found.end() + 1, b"", "drop a condition")
    for found in _NUMBER.finditer(code):
        yield Mutant(path, *found.span(), str(int(found[1]) + 1).encode(), "number plus one")
    for found in _NOT.finditer(code):
        yield Mutant(path, *found.span(), b"", "drop a negation")
    for found in _CONDITION.finditer(code):
        start = found.end()
        end = _operand(code, start + 1, +1) + 1
        yield Mutant(path, start, end, b"(!" + source[start:end] + b")", "negate a condition")
    for found in _STATEMENT.finditer(code):
        statement = found[2].lstrip()
        if any(word in statement for word in _LEFT_ALONE):
            continue
        if _CALL.fullmatch(statement):
            yield Mutant(path, *found.span(2), b"", "leave out a call")
        elif _CHANGE.fullmatch(statement):
            yield Mutant(path, *found.span(2), b"", "leave out a change of state")


def functions(source: bytes) -> Iterator[tuple[str, int, int]]:
    """(name, where it begins, where it ends)"""
    for found in _FUNCTION.finditer(source):
        yield found[1].decode(), *found.span()


def _operand(code: bytes, at: int, step: int) -> int:
    """Where the operand of && or || that begins (or, backwards, ends) here is over."""
    opening, closing = (b"([{", b")]}") if step > 0 else (b")]}", b"([{")
    depth = 0
    at = at if step > 0 else at - 1
    while 0 <= at < len(code):
        here = code[at : at + 1]
        if here in closing and depth == 0:
            break
        depth += (here in opening) - (here in closing)
        if depth == 0 and (here in b";,?:" or b"&&" in code[at : at + 2] or b"||" in code[at : at + 2]):
            break
        if depth == 0 and step < 0 and code[: at + 1].endswith((b"&&", b"||", b" = ", b"return ")):
            break
        at += step
    return at if step > 0 else at + 1
