"""Changes of expressions: calls and their arguments, or whatever a matcher takes."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst
import libcst.matchers as m

from upstream.edit.anchors import names_call
from upstream.edit.change import Change
from upstream.edit.code import expression, opened


@dataclass
class _AddArgument(Change):
    name: str = ""
    code: str = ""

    def expression(self, original: cst.BaseExpression, node: cst.BaseExpression) -> cst.BaseExpression | None:
        if not (isinstance(node, cst.Call) and names_call(original, self.name)):
            return None
        self.found += 1
        call = cst.ensure_type(expression(f"f({self.code})"), cst.Call)
        return node.with_changes(args=[*(opened(node.args) if node.args else ()), *call.args])


def add_argument(call: str, code: str, *, expected: int = 1) -> Change:
    """Add arguments at the end of each call of a function in the scope."""
    return _AddArgument(f"a call of {call}", expected, name=call, code=code)


@dataclass
class _SetArgument(Change):
    call: str = ""
    name: str = ""
    code: str = ""

    def expression(self, original: cst.BaseExpression, node: cst.BaseExpression) -> cst.BaseExpression | None:
        if not (isinstance(node, cst.Call) and names_call(original, self.call)):
            return None
        args = list(node.args)
        for index, arg in enumerate(args):
            if arg.keyword is not None and arg.keyword.value == self.name:
                self.found += 1
                args[index] = arg.with_changes(value=expression(self.code))
        return node.with_changes(args=args)


def set_argument(call: str, name: str, code: str, *, expected: int = 1) -> Change:
    """Put ``code`` in the place of a keyword argument of each call of a function in the scope."""
    return _SetArgument(f"a call of {call} with {name}=", expected, call=call, name=name, code=code)


@dataclass
class _Exchange(Change):
    matcher: m.BaseMatcherNode = field(default_factory=m.Name)
    code: str = ""

    def expression(self, original: cst.BaseExpression, node: cst.BaseExpression) -> cst.BaseExpression | None:
        if not m.matches(original, self.matcher):
            return None
        self.found += 1
        return expression(self.code)


def exchange(anchor: str, matcher: m.BaseMatcherNode, code: str, *, expected: int = 1) -> Change:
    """Put ``code`` in the place of each expression of the scope that a libcst matcher takes; ``anchor`` says which."""
    return _Exchange(anchor, expected, matcher=matcher, code=code)
