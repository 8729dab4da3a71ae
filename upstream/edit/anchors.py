"""Where: predicates over one statement, by what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from upstream.edit.code import Statement, dotted


@dataclass(frozen=True)
class Where:
    """Which statements of a scope are meant."""

    text: str  # for errors
    test: Callable[[Statement], bool]

    def __and__(self, other: Where) -> Where:
        return Where(f"{self.text} and {other.text}", lambda node: self.test(node) and other.test(node))


def assigns(name: str) -> Where:
    """A statement that assigns to ``name``: a variable, or a dotted attribute such as ``self.data``."""

    def test(node: Statement) -> bool:
        return any(dotted(target) == name for target in _targets(node))

    return Where(f"an assignment to {name}", test)


def calls(name: str) -> Where:
    """A statement whose own part (not the block below it) calls ``name``; the last parts of a dotted name are enough."""
    return Where(f"a call of {name}", lambda node: any(names_call(c, name) for c in _own(node, m.Call())))


def reads(*names: str) -> Where:
    """A statement whose own part (not the block below it) mentions all these names or attributes."""

    def test(node: Statement) -> bool:
        seen = {n.value for n in _own(node, m.Name()) if isinstance(n, cst.Name)}
        return all(name in seen for name in names)

    return Where(f"a statement that mentions {', '.join(names)}", test)


def returns() -> Where:
    """A ``return``."""
    return _simple("a return", cst.Return)


def compares(name: str, value: str) -> Where:
    """A statement whose own part (not the block below it) compares a name with a literal: ``name == value``."""
    matcher = m.Comparison(
        m.Name(name), [m.ComparisonTarget(m.Equal() | m.Is() | m.IsNot(), m.MatchIfTrue(_is(value)))]
    )
    return Where(f"{name} compared with {value}", lambda node: bool(_own(node, matcher)))


def _is(literal: str) -> Callable[[cst.CSTNode], bool]:
    return lambda node: cst.Module([]).code_for_node(node) == literal


def tests() -> Where:
    """An ``if`` or ``elif``."""
    return Where("an if", lambda node: isinstance(node, cst.If))


def asserts() -> Where:
    """An ``assert``."""
    return _simple("an assert", cst.Assert)


def defines(name: str) -> Where:
    """The definition of a function or class."""

    def test(node: Statement) -> bool:
        return isinstance(node, cst.FunctionDef | cst.ClassDef) and node.name.value == name

    return Where(f"the definition of {name}", test)


def _simple(text: str, kind: type[cst.CSTNode]) -> Where:
    def test(node: Statement) -> bool:
        return isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[0], kind)

    return Where(text, test)


def _targets(node: Statement) -> list[cst.BaseExpression]:
    if not isinstance(node, cst.SimpleStatementLine):
        return []
    found: list[cst.BaseExpression] = []
    for small in node.body:
        if isinstance(small, cst.Assign):
            found.extend(target.target for target in small.targets)
        elif isinstance(small, cst.AnnAssign | cst.AugAssign):
            found.append(small.target)
    return found


def _own(node: Statement, matcher: m.BaseMatcherNode) -> Sequence[cst.CSTNode]:
    """Matches in a statement itself: of a compound statement, the line that opens it."""
    if isinstance(node, cst.SimpleStatementLine):
        return m.findall(node, matcher)
    if isinstance(node, cst.If | cst.While):
        return m.findall(node.test, matcher)
    if isinstance(node, cst.For):
        return [*m.findall(node.iter, matcher), *m.findall(node.target, matcher)]
    if isinstance(node, cst.With):
        return [found for item in node.items for found in m.findall(item, matcher)]
    return []


def names_call(node: cst.CSTNode, name: str) -> bool:
    if not isinstance(node, cst.Call):
        return False
    func = node.func
    if isinstance(func, cst.Subscript):  # a Triton launch: kernel[grid](...)
        func = func.value
    return f".{dotted(func)}".endswith(f".{name}")
