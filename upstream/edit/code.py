"""Source as trees: what an edit inserts, and the parts of what is there."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import libcst as cst

Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement


def dotted(node: cst.CSTNode) -> str:
    """A name or attribute as it is written; ``?`` stands for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        return f"{dotted(node.value)}.{node.attr.value}"
    return "?"


def statements(code: str) -> list[Statement]:
    """``code`` as statements, each with the comments above it; an empty first line is kept, besides the text's own."""
    tree = cst.parse_module("pass\n" + textwrap.dedent(code.removeprefix("\n")).rstrip() + "\n")
    assert not any(line.comment for line in tree.footer), f"a comment at the end would be lost: {code!r}"
    new = list(tree.body[1:])
    assert new, f"expected statements, got {code!r}"
    return new


def expression(code: str) -> cst.BaseExpression:
    """``code`` as an expression; the formatter breaks its lines again."""
    return cst.parse_expression(" ".join(line.strip() for line in code.strip().splitlines()))


def opened(nodes: Sequence[cst.CSTNode]) -> list[cst.CSTNode]:
    """Arguments or parameters with a comma behind the last one, so that another can follow."""
    *head, last = nodes
    if isinstance(last.comma, cst.MaybeSentinel):  # type: ignore[attr-defined]
        last = last.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    return [*head, last]


def comment_lines(text: str) -> list[cst.EmptyLine]:
    """``text`` as comments."""
    return [cst.EmptyLine(comment=cst.Comment(f"# {line}")) for line in textwrap.dedent(text).strip().splitlines()]


def led(node: Statement, lines: Sequence[cst.EmptyLine]) -> Statement:
    """A statement with other lines above it: comments, empty lines."""
    return node.with_changes(leading_lines=lines)
