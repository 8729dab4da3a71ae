"""What every change has: an anchor, and how often it must be found."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from upstream.edit.code import Statement


class AnchorError(Exception):
    """An anchor was not found as often as expected."""

    def __init__(self, module: str, scope: str, anchor: str, expected: int, got: int) -> None:
        self.module, self.scope, self.anchor, self.expected, self.got = module, scope, anchor, expected, got
        super().__init__(
            f"{module}, {scope or 'module level'}: expected {anchor} {expected} time(s), got {got}. "
            "The source is not the one that this edit was written for: read it, then change the edit."
        )


@dataclass
class Change:
    """One change in a scope; ``found`` counts how often its anchor was met."""

    anchor: str
    expected: int = 1
    found: int = field(default=0, init=False)

    def statement(self, original: Statement, node: Statement) -> cst.CSTNode | cst.FlattenSentinel[cst.CSTNode] | None:
        """What becomes of a statement of the scope; None for no change."""
        return None

    def expression(self, original: cst.BaseExpression, node: cst.BaseExpression) -> cst.BaseExpression | None:
        """What becomes of an expression in the scope; None for no change."""
        return None

    def scope(self, node: cst.FunctionDef | cst.ClassDef | cst.Module) -> cst.CSTNode | None:
        """What becomes of the scope itself; None for no change."""
        return None
