"""Changes of single statements, each where an anchor says."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from upstream.edit.anchors import Where, assigns, returns, tests
from upstream.edit.change import Change
from upstream.edit.code import Statement, comment_lines, expression, led, statements

_NOWHERE = Where("", lambda node: False)


@dataclass
class AtStatement(Change):
    where: Where = _NOWHERE
    make: Callable[[Statement], list[cst.CSTNode]] = lambda node: [node]

    def statement(self, original: Statement, node: Statement) -> cst.FlattenSentinel[cst.CSTNode] | None:
        if not self.where.test(original):
            return None
        self.found += 1
        return cst.FlattenSentinel(self.make(node))


def substitute(where: Where, code: str, *, expected: int = 1, keep_comment: bool = False) -> Change:
    """Put ``code`` in a statement's place; its comment goes too, unless it is to be kept above the new code."""

    def make(node: Statement) -> list[cst.CSTNode]:
        new = statements(code)
        lines = [line for line in node.leading_lines if keep_comment or line.comment is None]
        return [led(new[0], [*lines, *new[0].leading_lines]), *new[1:]]

    return AtStatement(where.text, expected, where=where, make=make)


def before(where: Where, code: str, *, expected: int = 1) -> Change:
    """Insert ``code`` before a statement and its comment."""
    return AtStatement(where.text, expected, where=where, make=lambda node: [*statements(code), node])


def after(where: Where, code: str, *, expected: int = 1) -> Change:
    """Insert ``code`` after a statement."""
    return AtStatement(where.text, expected, where=where, make=lambda node: [node, *statements(code)])


def drop(where: Where, *, expected: int = 1) -> Change:
    """Remove a statement and its comment."""
    return AtStatement(where.text, expected, where=where, make=lambda node: [])


def condition(where: Where, code: str, *, expected: int = 1) -> Change:
    """Put ``code`` in the place of an ``if``'s condition."""

    def make(node: Statement) -> list[cst.CSTNode]:
        assert isinstance(node, cst.If)
        return [node.with_changes(test=expression(code))]

    both = tests() & where
    return AtStatement(both.text, expected, where=both, make=make)


def guard(where: Where, test: str, note: str = "", *, otherwise: str = "", expected: int = 1) -> Change:
    """Put a statement under ``if test:``, with a comment above; or make it the ``else`` of ``if test: otherwise``."""

    def make(node: Statement) -> list[cst.CSTNode]:
        kept = cst.IndentedBlock([led(node, [line for line in node.leading_lines if line.comment is not None])])
        new = cst.IndentedBlock(statements(otherwise)) if otherwise else kept
        orelse = cst.Else(kept) if otherwise else None
        blank = [line for line in node.leading_lines if line.comment is None]
        return [cst.If(expression(test), new, orelse, leading_lines=[*blank, *comment_lines(note)])]

    return AtStatement(where.text, expected, where=where, make=make)


def comment(where: Where, text: str, *, expected: int = 1) -> Change:
    """Put lines of comment in the place of those above a statement; empty text removes them."""

    def make(node: Statement) -> list[cst.CSTNode]:
        lines = [line for line in node.leading_lines if line.comment is None]
        return [led(node, [*lines, *comment_lines(text)])]

    return AtStatement(where.text, expected, where=where, make=make)


def attempt(where: Where, handlers: str, *, expected: int = 1) -> Change:
    """Put the block of an ``if`` inside ``try``; ``handlers`` are its ``except`` clauses."""

    def make(node: Statement) -> list[cst.CSTNode]:
        assert isinstance(node, cst.If)
        (frame,) = statements(f"try:\n    pass\n{textwrap.dedent(handlers).strip()}")
        return [node.with_changes(body=cst.IndentedBlock([frame.with_changes(body=node.body)]))]

    both = tests() & where
    return AtStatement(both.text, expected, where=both, make=make)


def returning(code: str, *, expected: int = 1) -> Change:
    """Go on with what a ``return`` returns: ``code`` is an operator and its right side, such as ``+ [1]``."""

    def make(node: Statement) -> list[cst.CSTNode]:
        statement = cst.ensure_type(cst.ensure_type(node, cst.SimpleStatementLine).body[0], cst.Return)
        assert statement.value is not None
        operation = cst.ensure_type(expression(f"x {code}"), cst.BinaryOperation)
        return [node.with_deep_changes(statement, value=operation.with_changes(left=statement.value))]

    return AtStatement(returns().text, expected, where=returns(), make=make)


def add_element(name: str, code: str) -> Change:
    """Add an element at the end of the tuple, list or set that is assigned to ``name``, laid out as its neighbours are."""

    def make(node: Statement) -> list[cst.CSTNode]:
        whole = m.findall(node, m.Tuple() | m.List() | m.Set())[0]
        assert isinstance(whole, cst.Tuple | cst.List | cst.Set)
        *head, last = whole.elements
        new = cst.Element(expression(code), comma=last.comma)
        longer = whole.with_changes(elements=[*head, last.with_changes(comma=head[-1].comma), new])
        changed = node.deep_replace(whole, longer)
        assert isinstance(changed, cst.CSTNode)
        return [changed]

    where = assigns(name)
    return AtStatement(where.text, where=where, make=make)
