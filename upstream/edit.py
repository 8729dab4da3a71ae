"""Edits of Python source that are anchored on structure: a module, a function, and what a statement there does.

An anchor names identifiers only, never upstream's text or a line number, and must be found exactly as often as expected;
anything else is an :class:`AnchorError` that names module, scope and anchor.  What an edit leaves alone keeps every byte.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import libcst as cst
import libcst.matchers as m

Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement


class AnchorError(Exception):
    """An anchor was not found as often as expected."""

    def __init__(self, module: str, scope: str, anchor: str, expected: int, got: int) -> None:
        self.module, self.scope, self.anchor, self.expected, self.got = module, scope, anchor, expected, got
        super().__init__(
            f"{module}, {scope or 'module level'}: expected {anchor} {expected} time(s), got {got}. "
            "The source is not the one that this edit was written for: read it, then change the edit."
        )


# -- Where: predicates over one statement ---------------------------------------------------------------------------


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
        return any(_dotted(target) == name for target in _targets(node))

    return Where(f"an assignment to {name}", test)


def calls(name: str) -> Where:
    """A statement whose own part (not the block below it) calls ``name``; the last parts of a dotted name are enough."""
    return Where(f"a call of {name}", lambda node: any(_names_call(c, name) for c in _own(node, m.Call())))


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


def _names_call(node: cst.CSTNode, name: str) -> bool:
    if not isinstance(node, cst.Call):
        return False
    func = node.func
    if isinstance(func, cst.Subscript):  # a Triton launch: kernel[grid](...)
        func = func.value
    return f".{_dotted(func)}".endswith(f".{name}")


def _dotted(node: cst.CSTNode) -> str:
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        return f"{_dotted(node.value)}.{node.attr.value}"
    return "?"


# -- Changes ----------------------------------------------------------------------------------------------------------


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


@dataclass
class _AtStatement(Change):
    where: Where = Where("", lambda node: False)
    make: Callable[[Statement], list[cst.CSTNode]] = lambda node: [node]

    def statement(self, original: Statement, node: Statement) -> cst.FlattenSentinel[cst.CSTNode] | None:
        if not self.where.test(original):
            return None
        self.found += 1
        return cst.FlattenSentinel(self.make(node))


def substitute(where: Where, code: str, *, expected: int = 1, keep_comment: bool = False) -> Change:
    """Put ``code`` in a statement's place; its comment goes too, unless it is to be kept above the new code."""

    def make(node: Statement) -> list[cst.CSTNode]:
        new = _statements(code)
        lines = [line for line in node.leading_lines if keep_comment or line.comment is None]
        return [_led(new[0], [*lines, *_lines(new[0])]), *new[1:]]

    return _AtStatement(where.text, expected, where=where, make=make)


def before(where: Where, code: str, *, expected: int = 1) -> Change:
    """Insert ``code`` before a statement and its comment."""
    return _AtStatement(where.text, expected, where=where, make=lambda node: [*_statements(code), node])


def after(where: Where, code: str, *, expected: int = 1) -> Change:
    """Insert ``code`` after a statement."""
    return _AtStatement(where.text, expected, where=where, make=lambda node: [node, *_statements(code)])


def drop(where: Where, *, expected: int = 1) -> Change:
    """Remove a statement and its comment."""
    return _AtStatement(where.text, expected, where=where, make=lambda node: [])


def condition(where: Where, code: str, *, expected: int = 1) -> Change:
    """Put ``code`` in the place of an ``if``'s condition."""

    def make(node: Statement) -> list[cst.CSTNode]:
        assert isinstance(node, cst.If)
        return [node.with_changes(test=_expression(code))]

    both = tests() & where
    return _AtStatement(both.text, expected, where=both, make=make)


def guard(where: Where, test: str, note: str = "", *, otherwise: str = "", expected: int = 1) -> Change:
    """Put a statement under ``if test:``, with a comment above; or make it the ``else`` of ``if test: otherwise``."""

    def make(node: Statement) -> list[cst.CSTNode]:
        kept = cst.IndentedBlock([_led(node, [line for line in _lines(node) if line.comment is not None])])
        new = cst.IndentedBlock(_statements(otherwise)) if otherwise else kept
        orelse = cst.Else(kept) if otherwise else None
        blank = [line for line in _lines(node) if line.comment is None]
        return [cst.If(_expression(test), new, orelse, leading_lines=[*blank, *_comment_lines(note)])]

    return _AtStatement(where.text, expected, where=where, make=make)


def comment(where: Where, text: str, *, expected: int = 1) -> Change:
    """Put lines of comment in the place of those above a statement; empty text removes them."""

    def make(node: Statement) -> list[cst.CSTNode]:
        lines = [line for line in node.leading_lines if line.comment is None]
        return [_led(node, [*lines, *_comment_lines(text)])]

    return _AtStatement(where.text, expected, where=where, make=make)


def attempt(where: Where, handlers: str, *, expected: int = 1) -> Change:
    """Put the block of an ``if`` inside ``try``; ``handlers`` are its ``except`` clauses."""

    def make(node: Statement) -> list[cst.CSTNode]:
        assert isinstance(node, cst.If)
        (frame,) = _statements(f"try:\n    pass\n{textwrap.dedent(handlers).strip()}")
        return [node.with_changes(body=cst.IndentedBlock([frame.with_changes(body=node.body)]))]

    both = tests() & where
    return _AtStatement(both.text, expected, where=both, make=make)


def returning(code: str, *, expected: int = 1) -> Change:
    """Go on with what a ``return`` returns: ``code`` is an operator and its right side, such as ``+ [1]``."""

    def make(node: Statement) -> list[cst.CSTNode]:
        statement = cst.ensure_type(cst.ensure_type(node, cst.SimpleStatementLine).body[0], cst.Return)
        assert statement.value is not None
        operation = cst.ensure_type(_expression(f"x {code}"), cst.BinaryOperation)
        return [node.with_deep_changes(statement, value=operation.with_changes(left=statement.value))]

    return _AtStatement(returns().text, expected, where=returns(), make=make)


@dataclass
class _AddArgument(Change):
    name: str = ""
    code: str = ""

    def expression(self, original: cst.BaseExpression, node: cst.BaseExpression) -> cst.BaseExpression | None:
        if not (isinstance(node, cst.Call) and _names_call(original, self.name)):
            return None
        self.found += 1
        call = cst.ensure_type(_expression(f"f({self.code})"), cst.Call)
        return node.with_changes(args=[*(_open(node.args) if node.args else ()), *call.args])


def add_argument(call: str, code: str, *, expected: int = 1) -> Change:
    """Add arguments at the end of each call of a function in the scope."""
    return _AddArgument(f"a call of {call}", expected, name=call, code=code)


@dataclass
class _SetArgument(Change):
    call: str = ""
    name: str = ""
    code: str = ""

    def expression(self, original: cst.BaseExpression, node: cst.BaseExpression) -> cst.BaseExpression | None:
        if not (isinstance(node, cst.Call) and _names_call(original, self.call)):
            return None
        args = list(node.args)
        for index, arg in enumerate(args):
            if arg.keyword is not None and arg.keyword.value == self.name:
                self.found += 1
                args[index] = arg.with_changes(value=_expression(self.code))
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
        return _expression(self.code)


def exchange(anchor: str, matcher: m.BaseMatcherNode, code: str, *, expected: int = 1) -> Change:
    """Put ``code`` in the place of each expression of the scope that a libcst matcher takes; ``anchor`` says which."""
    return _Exchange(anchor, expected, matcher=matcher, code=code)


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
        return cst.ensure_type(node, cst.FunctionDef).with_changes(body=cst.IndentedBlock(_statements(code)))

    return _OnScope("the function", make=make)


def docstring(text: str) -> Change:
    """Put a docstring in the place of the function's or class's own, which must have one."""

    def make(node: cst.CSTNode) -> cst.CSTNode | None:
        assert isinstance(node, cst.FunctionDef | cst.ClassDef)
        if not m.matches(node.body.body[0], m.SimpleStatementLine([m.Expr(m.SimpleString())])):
            return None
        indented = textwrap.indent(textwrap.dedent(text).strip(), "    ").strip()
        new = _statements(f'"""{indented}"""' if "\n" not in indented else f'"""{indented}\n    """')
        return node.with_deep_changes(node.body, body=[*new, *node.body.body[1:]])

    return _OnScope("a docstring", make=make)


def add_parameter(code: str) -> Change:
    """Add a parameter with a default at the end of a function's own parameters."""

    def make(node: cst.CSTNode) -> cst.CSTNode:
        function = cst.ensure_type(node, cst.FunctionDef)
        extra = cst.ensure_type(cst.parse_statement(f"def f({code}): ..."), cst.FunctionDef).params.params
        old = function.params
        if old.kwonly_params:
            return function.with_deep_changes(old, kwonly_params=[*_open(old.kwonly_params), *extra])
        return function.with_deep_changes(old, params=[*_open(old.params), *extra])

    return _OnScope("the function", make=make)


def append(code: str) -> Change:
    """Add ``code`` at the end of a function, a class or the module."""

    def make(node: cst.CSTNode) -> cst.CSTNode:
        new = _statements(code)
        if isinstance(node, cst.Module):
            return node.with_changes(body=[*node.body, *new])
        assert isinstance(node, cst.FunctionDef | cst.ClassDef)
        return node.with_deep_changes(node.body, body=[*node.body.body, *new])

    return _OnScope("the scope", make=make)


@dataclass
class _AddImport(Change):
    """Handled with the module's own body: a name joins an import there is, or a new import its neighbours."""

    module: str = ""
    names: tuple[str, ...] = ()

    def scope(self, node: cst.FunctionDef | cst.ClassDef | cst.Module) -> cst.CSTNode:
        tree = cst.ensure_type(node, cst.Module)
        self.found += 1
        statements = list(tree.body)
        for index, statement in enumerate(statements):
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
                statements[index] = statement.with_changes(body=[new])
                return tree.with_changes(body=statements)
        package = self.module.partition(".")[0]
        there = [
            (_first_import(s), i) for i, s in enumerate(statements) if _first_import(s).partition(".")[0] == package
        ]
        earlier, later = [x for x in there if x[0] < self.module], [x for x in there if x[0] > self.module]
        place = max(earlier)[1] + 1 if earlier else min(later)[1] if later else None
        if place is None:
            raise AnchorError("", "", f"imports of {package}, for {self.module} to join", 1, 0)
        (added,) = _statements(f"from {self.module} import {', '.join(self.names)}")
        if not earlier:  # what stood between the groups stays there
            follower = statements[place]
            added, statements[place] = _led(added, _lines(follower)), _led(follower, [])
        statements.insert(place, added)
        return tree.with_changes(body=statements)


def add_import(module: str, *names: str) -> Change:
    """Import names at module level, in the place where sorted imports have them."""
    return _AddImport(f"imports of {module}", module=module, names=names)


def _import_module(node: cst.ImportFrom) -> str:
    return _dotted(node.module) if node.module is not None and not node.relative else ""


def _import_key(name: str) -> tuple[int, str]:
    """isort's order inside an import: constants, classes, then the rest."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name


def _first_import(node: cst.CSTNode) -> str:
    if isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[0], cst.ImportFrom):
        return _import_module(node.body[0])
    return ""


def add_element(name: str, code: str) -> Change:
    """Add an element at the end of the tuple or list that is assigned to ``name``, laid out as its neighbours are."""

    def make(node: Statement) -> list[cst.CSTNode]:
        statement = cst.ensure_type(node, cst.SimpleStatementLine)
        assign = cst.ensure_type(statement.body[0], cst.Assign)
        assert isinstance(assign.value, cst.Tuple | cst.List)
        *head, last = assign.value.elements
        new = cst.Element(_expression(code), comma=last.comma)
        value = assign.value.with_changes(elements=[*head, last.with_changes(comma=head[-1].comma), new])
        return [statement.with_changes(body=[assign.with_changes(value=value)])]

    where = assigns(name)
    return _AtStatement(where.text, where=where, make=make)


# -- Applying ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """Changes in one scope of one module."""

    module: str  # dotted, as it is imported
    scope: str  # qualified name of a function or class; "" is the module itself
    changes: tuple[Change, ...]


def on(module: str, scope: str, *changes: Change) -> Edit:
    """Changes in ``module``, in the function or class ``scope`` ("" for the module itself)."""
    return Edit(module, scope, changes)


def apply(source: str, edit: Edit) -> str:
    """Apply one edit to a module's source.

    Raises:
        AnchorError: the scope or an anchor in it was not found exactly as often as expected.
    """
    changes = tuple(replace(change) for change in edit.changes)  # fresh counts: an edit can be applied again
    tree = cst.parse_module(source)
    editor = _Editor(edit.scope, changes)
    result = tree.visit(editor)
    if editor.scopes != 1:
        raise AnchorError(edit.module, edit.scope, f"a function or class {edit.scope}", 1, editor.scopes)
    for change in changes:
        if change.found != change.expected:
            raise AnchorError(edit.module, edit.scope, change.anchor, change.expected, change.found)
    return result.code


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


def _statements(code: str) -> list[Statement]:
    """``code`` as statements, each with the comments above it; an empty first line is kept, besides the text's own."""
    tree = cst.parse_module("pass\n" + textwrap.dedent(code.removeprefix("\n")).rstrip() + "\n")
    assert not any(line.comment for line in tree.footer), f"a comment at the end would be lost: {code!r}"
    new = list(tree.body[1:])
    assert new, f"expected statements, got {code!r}"
    return new


def _expression(code: str) -> cst.BaseExpression:
    """``code`` as an expression; the formatter breaks its lines again."""
    return cst.parse_expression(" ".join(line.strip() for line in code.strip().splitlines()))


def _open(nodes: Sequence[cst.CSTNode]) -> list[cst.CSTNode]:
    """Arguments or parameters with a comma behind the last one, so that another can follow."""
    *head, last = nodes
    if isinstance(last.comma, cst.MaybeSentinel):  # type: ignore[attr-defined]
        last = last.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    return [*head, last]


def _lines(node: Statement) -> Sequence[cst.EmptyLine]:
    return node.leading_lines


def _comment_lines(text: str) -> list[cst.EmptyLine]:
    return [cst.EmptyLine(comment=cst.Comment(f"# {line}")) for line in textwrap.dedent(text).strip().splitlines()]


def _led(node: Statement, lines: Sequence[cst.EmptyLine]) -> Statement:
    return node.with_changes(leading_lines=lines)
