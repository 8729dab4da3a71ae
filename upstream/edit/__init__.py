"""Edits of Python source that are anchored on structure: a module, a function, and what a statement there does.

An anchor names identifiers only, never upstream's text or a line number, and must be found exactly as often as expected;
anything else is an :class:`AnchorError` that names module, scope and anchor.  What an edit leaves alone keeps every byte.
"""

from upstream.edit.anchors import Where, asserts, assigns, calls, compares, defines, reads, returns, tests
from upstream.edit.apply import Edit, apply, apply_to, on
from upstream.edit.change import AnchorError, Change
from upstream.edit.expression_changes import add_argument, exchange, set_argument
from upstream.edit.imports import add_import
from upstream.edit.scope_changes import add_parameter, append, body, docstring
from upstream.edit.statement_changes import (
    add_element,
    after,
    attempt,
    before,
    comment,
    condition,
    drop,
    guard,
    returning,
    substitute,
)

__all__ = [
    "AnchorError",
    "Change",
    "Edit",
    "Where",
    "add_argument",
    "add_element",
    "add_import",
    "add_parameter",
    "after",
    "append",
    "apply",
    "apply_to",
    "asserts",
    "assigns",
    "attempt",
    "before",
    "body",
    "calls",
    "comment",
    "compares",
    "condition",
    "defines",
    "docstring",
    "drop",
    "exchange",
    "guard",
    "on",
    "reads",
    "returning",
    "returns",
    "set_argument",
    "substitute",
    "tests",
]
