"""docs/upstreaming.md says which patch points go with which commit, and is up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dcp_block import made_tables
from sglang_dcp_block.patches.points import all_points
from sglang_dcp_block.patches.register import Kind, PatchPoint
from upstream import removals

PAGE = Path(__file__).parents[2] / "docs" / "upstreaming.md"


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert made_tables.renew(page, removals.tables()) == page, "run make docs"


def test_no_condition_is_listed_that_no_patch_point_has() -> None:
    assert set(removals.MET_BY) == {p.removed_by for p in all_points()} - {removals.WATCHED}


def test_a_condition_that_nobody_has_sorted_is_an_error() -> None:
    point = PatchPoint("sglang.srt.a.f", Kind.RELIES, "Why.", "a thing that nobody thought of")
    with pytest.raises(KeyError, match="nobody thought of"):
        removals.table([point], removals.subjects())


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one"):
        made_tables.renew("# A page\n", removals.tables())
