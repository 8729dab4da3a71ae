"""Imports at module level, where sorted imports have them."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from upstream.edit.change import AnchorError, Change
from upstream.edit.code import dotted, led, statements


@dataclass
class _AddImport(Change):
    """Handled with the module's own body: a name joins an import there is, or a new import its neighbours."""

    module: str = ""
    names: tuple[str, ...] = ()

    def scope(self, node: cst.FunctionDef | cst.ClassDef | cst.Module) -> cst.CSTNode:
        tree = cst.ensure_type(node, cst.Module)
        self.found += 1
        present = list(tree.body)
        for index, statement in enumerate(present):
            if not isinstance(statement, cst.SimpleStatementLine):
                continue
            old = statement.body[0]
            if isinstance(old, cst.ImportFrom) and _import_module(old) == self.module:
                assert not isinstance(old.names, cst.ImportStar)
                aliases = [*old.names, *(cst.ImportAlias(cst.Name(name)) for name in self.names)]
                aliases.sort(key=lambda alias: _import_key(str(alias.evaluated_name)))
                trimmed = [alias.with_changes(comma=cst.MaybeSentinel.DEFAULT) for alias in aliases]
                # In parentheses, so that the formatter may break the line.
                new = old.with_changes(names=trimmed, lpar=cst.LeftParen(), rpar=cst.RightParen())
                present[index] = statement.with_changes(body=[new])
                return tree.with_changes(body=present)
        package = self.module.partition(".")[0]
        there = [(_first_import(s), i) for i, s in enumerate(present) if _first_import(s).partition(".")[0] == package]
        earlier, later = [x for x in there if x[0] < self.module], [x for x in there if x[0] > self.module]
        place = max(earlier)[1] + 1 if earlier else min(later)[1] if later else None
        if place is None:
            raise AnchorError("", "", f"imports of {package}, for {self.module} to join", 1, 0)
        (added,) = statements(f"from {self.module} import {', '.join(self.names)}")
        if not earlier:  # what stood between the groups stays there
            follower = present[place]
            added, present[place] = led(added, follower.leading_lines), led(follower, [])
        present.insert(place, added)
        return tree.with_changes(body=present)


def add_import(module: str, *names: str) -> Change:
    """Import names at module level, in the place where sorted imports have them."""
    return _AddImport(f"imports of {module}", module=module, names=names)


def _import_module(node: cst.ImportFrom) -> str:
    return dotted(node.module) if node.module is not None and not node.relative else ""


def _import_key(name: str) -> tuple[int, str]:
    """isort's order inside an import: constants, classes, then the rest."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name


def _first_import(node: cst.CSTNode) -> str:
    if isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[0], cst.ImportFrom):
        return _import_module(node.body[0])
    return ""
