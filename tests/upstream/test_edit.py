"""Edits by structure: what changes, what stays byte for byte, and how a source that is another one is refused."""

from __future__ import annotations

import libcst.matchers as m
import pytest

from upstream import edit

SOURCE = '''\
"""A module."""

import torch
from first.place import alpha, beta
from second.place import gamma


class Pool:
    """Holds rows."""

    def rows(self, ids, size):
        """Rows of ids."""
        # A comment on the next line.
        if ids.numel() == 0:
            return None
        out = helper(ids, size)  # kept
        self.last = out
        return out


def helper(ids: torch.Tensor, size: int) -> torch.Tensor:
    return ids // size
'''


def applied(scope, *changes):
    return edit.apply(SOURCE, edit.on("pool", scope, *changes))


def lines_of(text):
    return [line for line in text.splitlines() if line not in SOURCE.splitlines()]


def test_a_statement_changes_and_nothing_else():
    got = applied("Pool.rows", edit.substitute(edit.assigns("out"), "out = helper(ids, 2 * size)"))
    assert got == SOURCE.replace("out = helper(ids, size)  # kept", "out = helper(ids, 2 * size)")


def test_statements_go_before_and_after():
    got = applied(
        "Pool.rows", edit.before(edit.assigns("self.last"), "a = 1"), edit.after(edit.calls("helper"), "b = 2")
    )
    assert got.index("# kept") < got.index("b = 2") < got.index("a = 1") < got.index("self.last")


def test_a_block_is_guarded():
    got = applied("Pool.rows", edit.attempt(edit.compares("out", "1"), "except Exception:\n    raise", expected=0))
    assert got == SOURCE
    source = SOURCE.replace("ids.numel() == 0", "size == 0")
    got = edit.apply(
        source,
        edit.on("pool", "Pool.rows", edit.attempt(edit.compares("size", "0"), "except ValueError as e:\n    log(e)")),
    )
    block = (
        "        if size == 0:\n            try:\n                return None\n            except ValueError as e:\n"
        "                log(e)\n        out ="
    )
    assert block in got


def test_what_is_returned_goes_on():
    assert lines_of(applied("helper", edit.returning("+ [1]"))) == ["    return ids // size + [1]"]


def test_a_condition_keeps_its_comment_and_block():
    got = applied("Pool.rows", edit.condition(edit.reads("ids", "numel"), "not any(ids)"))
    assert got == SOURCE.replace("ids.numel() == 0", "not any(ids)")


def test_a_comment_goes_with_its_statement_unless_kept():
    where = edit.reads("numel")
    assert "A comment" not in applied("Pool.rows", edit.substitute(where, "pass"))
    assert "A comment" in applied("Pool.rows", edit.substitute(where, "pass", keep_comment=True))
    assert "# new\n        pass" in applied("Pool.rows", edit.substitute(where, "# new\npass"))
    assert "numel" not in applied("Pool.rows", edit.drop(where))


def test_a_statement_goes_under_a_condition():
    got = applied("Pool.rows", edit.guard(edit.assigns("self.last"), "size > 1", "Why."))
    assert "        # Why.\n        if size > 1:\n            self.last = out\n        return out" in got
    got = applied("Pool.rows", edit.guard(edit.assigns("self.last"), "size > 1", otherwise="self.last = 1"))
    assert "        if size > 1:\n            self.last = 1\n        else:\n            self.last = out\n" in got


def test_a_comment_is_exchanged_and_an_argument_set():
    got = applied("Pool.rows", edit.comment(edit.reads("numel"), "Another one,\nin two lines."))
    assert got == SOURCE.replace("# A comment on the next line.", "# Another one,\n        # in two lines.")
    source = "f(a, size=2)\n"
    assert edit.apply(source, edit.on("m", "", edit.set_argument("f", "size", "3"))) == "f(a, size=3)\n"
    with pytest.raises(edit.AnchorError):
        edit.apply(source, edit.on("m", "", edit.set_argument("f", "width", "3")))


def test_calls_get_arguments_and_functions_parameters():
    got = applied("Pool.rows", edit.add_argument("helper", "block=4"), edit.add_parameter("block: int = 1"))
    assert lines_of(got) == [
        "    def rows(self, ids, size, block: int = 1):",
        "        out = helper(ids, size, block=4)  # kept",
    ]


def test_comments_between_parameters_stay():
    source = "def f(\n    a,  # first\n    b,\n):\n    g(\n        a,  # of g\n    )\n"
    got = edit.apply(source, edit.on("m", "f", edit.add_parameter("c=1"), edit.add_argument("g", "b")))
    assert "# first" in got
    assert "# of g" in got


def test_expressions_are_exchanged():
    got = applied("helper", edit.exchange("ids // size", m.BinaryOperation(operator=m.FloorDivide()), "ids % size"))
    assert lines_of(got) == ["    return ids % size"]


def test_bodies_docstrings_and_ends():
    got = applied("helper", edit.body('"""New."""\nreturn ids'))
    assert got.endswith('-> torch.Tensor:\n    """New."""\n    return ids\n')
    assert '"""Other."""' not in SOURCE
    got = applied("Pool", edit.docstring("Other.\n\nAnd more."), edit.append("size = 1"))
    assert '    """Other.\n\n    And more.\n    """\n' in got
    assert got.index("return out") < got.index("    size = 1") < got.index("def helper")
    assert applied("", edit.append("END = True")).endswith("END = True\n")


def test_a_tuple_gets_an_element_in_its_own_layout():
    source = 'NAMES = (\n    "a",\n    "b",\n)\n'
    got = edit.apply(source, edit.on("m", "", edit.add_element("NAMES", '"c"')))
    assert got == 'NAMES = (\n    "a",\n    "b",\n    "c",\n)\n'
    source = 'NAMES: frozenset = frozenset(\n    {\n        "a",\n        "b",\n    }\n)\n'
    got = edit.apply(source, edit.on("m", "", edit.add_element("NAMES", '"c"')))
    assert got == source.replace('"b",\n', '"b",\n        "c",\n')


@pytest.mark.parametrize(
    ("module", "name", "want"),
    [
        ("first.place", "aside", "from first.place import (alpha, aside, beta)"),
        ("first.place", "Alpha", "from first.place import (Alpha, alpha, beta)"),
        ("first.room", "x", "from first.place import alpha, beta\nfrom first.room import x\nfrom second.place"),
        ("second.hall", "x", "from first.place import alpha, beta\nfrom second.hall import x\nfrom second.place"),
    ],
)
def test_imports_join_the_sorted_ones(module, name, want):
    assert want in applied("", edit.add_import(module, name))


@pytest.mark.parametrize(
    ("scope", "change", "got"),
    [
        ("Pool.rows", edit.substitute(edit.assigns("missing"), "pass"), 0),
        ("Pool.rows", edit.substitute(edit.returns(), "pass"), 2),
        ("Pool.rows", edit.substitute(edit.returns(), "pass", expected=3), 2),
        ("helper", edit.substitute(edit.calls("helper"), "pass"), 0),  # it is called elsewhere
        ("helper", edit.add_argument("lost", "x=1"), 0),
        ("helper", edit.docstring("None there."), 0),
        ("Pool.columns", edit.body("pass"), 0),
        ("rows", edit.body("pass"), 0),  # the scope is Pool.rows
    ],
)
def test_an_anchor_that_is_missing_or_there_too_often_is_refused(scope, change, got):
    with pytest.raises(edit.AnchorError) as error:
        applied(scope, change)
    assert (error.value.module, error.value.scope, error.value.got) == ("pool", scope, got)
    for part in ("pool", scope, error.value.anchor, f"got {got}"):
        assert part in str(error.value)


def test_a_function_that_is_there_twice_is_refused():
    with pytest.raises(edit.AnchorError, match="got 2"):
        edit.apply(SOURCE + "\n\ndef helper():\n    pass\n", edit.on("pool", "helper", edit.body("pass")))


def test_an_import_without_neighbours_is_refused():
    with pytest.raises(edit.AnchorError, match=r"third\.place"):
        applied("", edit.add_import("third.place", "x"))


def test_an_edit_can_be_applied_again():
    one = edit.on("pool", "helper", edit.body("return ids"))
    assert edit.apply(SOURCE, one) == edit.apply(SOURCE, one)
