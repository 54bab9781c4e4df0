"""Mutants of a module in Python, from its syntax tree."""

import ast
from collections.abc import Iterator
from itertools import accumulate

from tests.mutation import Mutant

_COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.BitAnd: "|", ast.BitOr: "&",
    ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip
_SAYS_ONLY = {"log", "logging", "warnings"}


def _starts(source: bytes) -> list[int]:
    """Where each line begins."""
    return [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]


def functions(source: bytes) -> Iterator[tuple[str, int, int]]:
    """(name, where it begins, where it ends)"""
    starts = _starts(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            yield node.name, starts[node.lineno - 1], starts[node.end_lineno]


def mutants(path: str, source: bytes) -> Iterator[Mutant]:
    starts = _starts(source)

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def text(node: ast.expr) -> str:
        start, end = span(node)
        return source[start:end].decode()

    def mutant(node: ast.expr | ast.stmt, replacement: str, operator: str) -> Mutant:
        return Mutant(path, *span(node), replacement.encode(), operator)

    for node in _code(ast.parse(source)):
        match node:
            case ast.Compare(left=ast.Tuple(elts=left), ops=[op], comparators=[ast.Tuple(elts=right)]) if (
                len(left) == len(right) > 1
            ):
                sign = "==" if isinstance(op, ast.Eq) else "!="
                for dropped in range(len(left)):
                    pair = [
                        "(" + "".join(f"{text(each)}, " for at, each in enumerate(side) if at != dropped) + ")"
                        for side in (left, right)
                    ]
                    yield mutant(node, f"({pair[0]} {sign} {pair[1]})", "drop a field of a comparison")
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                for sign in _COMPARISONS[type(op)]:
                    yield mutant(node, f"({text(left)} {sign} {text(right)})", "other comparison")
            case ast.BoolOp(op=op, values=values):
                word = " and " if isinstance(op, ast.And) else " or "
                for dropped in range(len(values)):
                    kept = [f"({text(each)})" for at, each in enumerate(values) if at != dropped]
                    yield mutant(node, f"({word.join(kept)})", "drop a condition")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield mutant(node, f"({text(operand)})", "drop a negation")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                yield mutant(node, f"({text(left)} {_ARITHMETIC[type(op)]} {text(right)})", "other arithmetic")
            case ast.Constant(value=bool(value)):
                yield mutant(node, str(not value), "other truth value")
            case ast.Constant(value=int(value)):
                yield mutant(node, str(value + 1), "number plus one")
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield mutant(test, f"(not ({text(test)}))", "negate a condition")
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield mutant(node, "pass", "leave out a call")
            case ast.Raise():
                yield mutant(node, "pass", "leave out an error")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign() | ast.Delete():
                yield mutant(node, "pass", "leave out a change of state")
            case ast.With(items=[item]) | ast.AsyncWith(items=[item]) if "lock" in text(item.context_expr).lower():
                start, end = span(node)[0], span(item.context_expr)[1]
                yield Mutant(path, start, end, b"if True", "leave out a lock")
            case ast.Call(func=ast.Name(id=("min" | "max") as name)):
                yield mutant(node.func, "max" if name == "min" else "min", "min or max")


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run: no docstrings, types, defaults of fields, assertions, or what is only said."""
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "msg"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Assert | ast.JoinedStr) or _only_says(child):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            yield from _code(child)


def _only_says(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in _SAYS_ONLY
        case ast.FunctionDef(name=name):
            return name == "__repr__"
    return False
