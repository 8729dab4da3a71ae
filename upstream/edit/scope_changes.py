"""Changes of a whole function, class or module."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from upstream.edit.change import Change
from upstream.edit.code import opened, statements


@dataclass
class _OnScope(Change):
    make: Callable[[cst.CSTNode], cst.CSTNode | None] = lambda node: node

    def scope(self, node: cst.FunctionDef | cst.ClassDef | cst.Module) -> cst.CSTNode | None:
        made = self.make(node)
        self.found += made is not None
        return made


def body(code: str) -> Change:
    """Put ``code`` in the place of a function's whole body, docstring included."""

    def make(node: cst.CSTNode) -> cst.CSTNode:
        return cst.ensure_type(node, cst.FunctionDef).with_changes(body=cst.IndentedBlock(statements(code)))

    return _OnScope("the function", make=make)


def docstring(text: str) -> Change:
    """Put a docstring in the place of the function's or class's own, which must have one."""

    def make(node: cst.CSTNode) -> cst.CSTNode | None:
        assert isinstance(node, cst.FunctionDef | cst.ClassDef)
        if not m.matches(node.body.body[0], m.SimpleStatementLine([m.Expr(m.SimpleString())])):
            return None
        indented = textwrap.indent(textwrap.dedent(text).strip(), "    ").strip()
        new = statements(f'"""{indented}"""' if "\n" not in indented else f'"""{indented}\n    """')
        return node.with_deep_changes(node.body, body=[*new, *node.body.body[1:]])

    return _OnScope("a docstring", make=make)


def add_parameter(code: str) -> Change:
    """Add a parameter with a default at the end of a function's own parameters."""

    def make(node: cst.CSTNode) -> cst.CSTNode:
        function = cst.ensure_type(node, cst.FunctionDef)
        extra = cst.ensure_type(cst.parse_statement(f"def f({code}): ..."), cst.FunctionDef).params.params
        old = function.params
        if old.kwonly_params:
            return function.with_deep_changes(old, kwonly_params=[*opened(old.kwonly_params), *extra])
        return function.with_deep_changes(old, params=[*opened(old.params), *extra])

    return _OnScope("the function", make=make)


def append(code: str) -> Change:
    """Add ``code`` at the end of a function, a class or the module."""

    def make(node: cst.CSTNode) -> cst.CSTNode:
        new = statements(code)
        if isinstance(node, cst.Module):
            return node.with_changes(body=[*node.body, *new])
        assert isinstance(node, cst.FunctionDef | cst.ClassDef)
        return node.with_deep_changes(node.body, body=[*node.body.body, *new])

    return _OnScope("the scope", make=make)
