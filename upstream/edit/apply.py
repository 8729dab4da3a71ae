"""Changes of one scope, applied to a module's source; what they leave alone keeps every byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import libcst as cst

from upstream.edit.change import AnchorError, Change


@dataclass(frozen=True)
class Edit:
    """Changes in one scope of one module."""

    module: str  # dotted, as it is imported
    scope: str  # qualified name of a function or class; "" is the module itself
    changes: tuple[Change, ...]


def on(module: str, scope: str, *changes: Change) -> Edit:
    """Changes in ``module``, in the function or class ``scope`` ("" for the module itself)."""
    return Edit(module, scope, changes)


def apply(source: str, *edits: Edit) -> str:
    """Apply edits of one module to its source, each to what the ones before it left.

    Raises:
        AnchorError: the scope or an anchor in it was not found exactly as often as expected.
    """
    tree = cst.parse_module(source)
    for edit in edits:
        tree = apply_to(tree, edit)
    return tree.code


def apply_to(tree: cst.Module, edit: Edit) -> cst.Module:
    """Apply one edit to a module that is parsed already: parsing takes most of the time.

    Raises:
        AnchorError: as :func:`apply`; ``tree`` is not changed.
    """
    changes = tuple(replace(change) for change in edit.changes)  # fresh counts: an edit can be applied again
    editor = _Editor(edit.scope, changes)
    result = tree.visit(editor)
    if editor.scopes != 1:
        raise AnchorError(edit.module, edit.scope, f"a function or class {edit.scope}", 1, editor.scopes)
    for change in changes:
        if change.found != change.expected:
            raise AnchorError(edit.module, edit.scope, change.anchor, change.expected, change.found)
    return result


class _Editor(cst.CSTTransformer):
    def __init__(self, scope: str, changes: Sequence[Change]) -> None:
        super().__init__()
        self.scope, self.changes = scope, changes
        self.stack: list[str] = []
        self.scopes = 0

    @property
    def inside(self) -> bool:
        return ".".join(self.stack) == self.scope

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self.stack.append(node.name.value)
            # What is not on the way to the scope is not looked at: these files are long.
            return f"{self.scope}.".startswith(f"{'.'.join(self.stack)}.")
        return True

    def on_leave(  # type: ignore[override]
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.FlattenSentinel[cst.CSTNode]:
        node: cst.CSTNode | cst.FlattenSentinel[cst.CSTNode] = updated_node
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef | cst.Module):
            if self.inside:
                self.scopes += 1
                for change in self.changes:
                    node = change.scope(node) or node  # type: ignore[arg-type]
            if not isinstance(original_node, cst.Module):
                self.stack.pop()
        if not self.inside:
            return node
        for change in self.changes:
            made: cst.CSTNode | cst.FlattenSentinel[cst.CSTNode] | None = None
            if isinstance(original_node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
                made = change.statement(original_node, node)  # type: ignore[arg-type]
            elif isinstance(original_node, cst.BaseExpression):
                made = change.expression(original_node, node)  # type: ignore[arg-type]
            if made is None:
                continue
            if isinstance(made, cst.FlattenSentinel):
                if len(made) != 1:
                    return made
                (made,) = made
            node = made
        return node
