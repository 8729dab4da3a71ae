"""How long pages of a failed transfer are kept: what Mooncake reads, what is needed for it, what an operator may choose."""

from __future__ import annotations

import doctest
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dcp_block.dcp import quarantine
from sglang_dcp_block.dcp.quarantine import MARGIN_SECONDS, Hold, mooncake_timeout, needed_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, 30), ("", 5), ("5", 5), ("4", 5), ("0", 5), ("-7", 5), ("6", 6), (" +8", 8), ("7abc", 7), ("abc", 5),
        ("1e3", 5), ("60.9", 60), ("9" * 400, 2**31 - 1), ("٣٠", 5),
    ],
)  # fmt: skip
def test_mooncakes_reading(text, seconds):
    """Seen with the real one: 6, 2, 7abc, abc and " +8", and unset, against a peer that was stopped."""
    assert mooncake_timeout(text) == seconds


@given(st.text())
def test_any_text_is_a_time(text):
    assert quarantine.LEAST_SECONDS <= mooncake_timeout(text) <= quarantine.MAX_SECONDS


@pytest.mark.parametrize(("timeout", "needed"), [(30, 40), (31, 41), (300, 310), (5, 40), (29, 40)])
def test_what_is_needed(timeout, needed):
    assert MARGIN_SECONDS == 10
    assert needed_seconds(timeout) == needed


@pytest.mark.parametrize(
    ("hold", "timeout", "reason"),
    [
        (Hold(True, 30.0, chosen=False), 30, None),  # can be raised
        (Hold(True, 30.0, chosen=False), 300, None),
        (Hold(True, 40.0, chosen=True), 30, None),
        (Hold(True, math.inf, chosen=True), 30, None),
        (Hold(True, 39.9, chosen=True), 30, "40 s or more, got V=39.9"),
        (Hold(True, 40.0, chosen=True), 31, "41 s or more, got V=40"),
        (Hold(True, 20.0, chosen=True), 5, "40 s or more, got V=20"),
        (Hold(True, math.nan, chosen=True), 30, "got V=nan"),
        (Hold(True, -1.0, chosen=True), 30, "got V=-1"),
        (Hold(False, 100.0, chosen=True), 30, "got S off"),
        (Hold(False, 30.0, chosen=False), 30, "got S off"),
    ],
)
def test_what_an_operator_may_choose(hold, timeout, reason):
    got = hold.why_not(timeout, "S", "V")
    assert (got is None) if reason is None else (reason in got and "Unset" in got), got


@given(st.booleans(), st.floats(), st.booleans(), st.integers(5, quarantine.MAX_SECONDS))
def test_what_is_accepted_is_kept_long_enough(enabled, seconds, chosen, timeout):
    if Hold(enabled, seconds, chosen).why_not(timeout, "S", "V") is None:
        assert enabled
        assert not chosen or seconds >= timeout + MARGIN_SECONDS


def test_the_examples():
    results = doctest.testmod(quarantine)
    assert results.attempted > 0
    assert results.failed == 0
