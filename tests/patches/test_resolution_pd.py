"""Servers of prefill -> decode through SGLang's real argument resolution: how long pages are kept, and their order."""

from __future__ import annotations

from typing import Any

import pytest
from resolution_cases import ALLOC_EXTEND, HOLD, refusal


class TestPagesThatMayStillBeWritten:
    """A decode server with blocks keeps them long enough for Mooncake, or does not start."""

    @pytest.mark.parametrize(
        ("case", "said"),
        [
            ("unset", f"{HOLD}_TIMEOUT is unset: pages of a failed transfer are kept for 40 s instead of 30 s: Mooncake may "
                      "write for 30 s."),
            ("unset, slow Mooncake", f"{HOLD}_TIMEOUT is unset: pages of a failed transfer are kept for 101 s instead of "
                                     "30 s: Mooncake may write for 91 s."),
            ("long enough", None),
            ("off, prefill", None),
            ("off, block 1", None),
        ],
    )  # fmt: skip
    def test_it_starts(self, answers: dict[str, Any], case: str, said: str | None) -> None:
        outcome = answers["cases"][f"hold, {case}"]
        assert "error" not in outcome, outcome
        assert [line for line in outcome["warnings"] if "page" in line and "--page-size" not in line] == (
            [said] if said else []
        )

    @pytest.mark.parametrize(
        ("case", "expected", "got", "advice"),
        [
            ("too short", "40 s or more", f"{HOLD}_TIMEOUT=39", "or set it to 40 or more."),
            ("too short for Mooncake", "101 s or more", f"{HOLD}_TIMEOUT=100", "or set it to 101 or more."),
            ("off", "40 s or more", f"{HOLD} off", f"Unset {HOLD}."),
        ],
    )
    def test_it_is_refused(self, answers: dict[str, Any], case: str, expected: str, got: str, advice: str) -> None:
        text = refusal(answers["cases"][f"hold, {case}"])
        assert text.startswith(
            "BlockSizeError: --dcp-block-size 8 cannot be used here:\n  PD decode that gives pages of failed transfers away "
            "too early: expected pages of a failed transfer to be kept for "
        )
        assert f"{expected}, got {got}" in text
        assert text.endswith(advice)


class TestGrouping:
    @pytest.mark.parametrize(
        ("case", "ranks"),
        [("prefill", 2), ("prefill, 8 ranks", 8), ("prefill, with a block size", 2), ("decode", 2), ("keyword", 2)],
    )
    def test_is_on_where_it_is_asked_for(self, answers: dict[str, Any], case: str, ranks: int) -> None:
        assert answers["cases"][f"group, {case}"]["group_pages"] == ranks

    def test_is_off_otherwise(self, answers: dict[str, Any]) -> None:
        assert answers["cases"]["16"]["group_pages"] == answers["cases"]["nothing asked for"]["group_pages"] == 0

    @pytest.mark.parametrize(
        ("case", "error", "text"),
        [
            ("prefill, unknown version", "PatchError", "do not fit SGLang 0.5.99"),
            ("prefill, altered", "PatchError", f"{ALLOC_EXTEND}: source"),
            ("prefill, without MLA", "BlockSizeError", "expected an MLA model"),
            ("decode, token round-robin", "BlockSizeError", "blocks of a page (--dcp-block-size 16), got"),
            ("decode, other ranks", "BlockSizeError", "expected --dcp-size 4 and blocks of a page"),
            ("neither", "BlockSizeError", "expected --disaggregation-mode prefill or decode, got null"),
            ("one", "SystemExit", "--dcp-group-pages: expected the decode servers' --dcp-size, 2 or more, got '1'"),
            ("keyword, neither", "BlockSizeError", "Engine(dcp_group_pages=...) 2 cannot be used here:"),
            ("keyword, text", "BlockSizeError", "Engine(dcp_group_pages=...): expected the decode servers' --dcp-size"),
        ],
    )
    def test_is_refused(self, answers: dict[str, Any], case: str, error: str, text: str) -> None:
        found = answers["cases"][f"group, {case}"]
        assert found["error"] == error
        assert text in found["message"]
