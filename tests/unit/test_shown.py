"""Values in error messages."""

from __future__ import annotations

import doctest

from sglang_dcp_block import shown as module
from sglang_dcp_block.shown import LIMIT, shown


class Faulty:
    def __repr__(self) -> str:
        raise RuntimeError


def test_examples() -> None:
    assert doctest.testmod(module).failed == 0


def test_what_is_short_is_its_repr() -> None:
    for value in (8, "8", None, b"8", [], "x" * (LIMIT - 2)):
        assert shown(value) == repr(value)


def test_what_is_long_is_cut() -> None:
    assert shown("x" * (LIMIT - 1)) == f"'{'x' * (LIMIT - 1)} (... of {LIMIT + 1} characters)"


def test_what_has_no_repr_is_named() -> None:
    assert shown(Faulty()) == "of type Faulty, which cannot be shown"
