"""Prefill -> decode over Mooncake: blocks arrive where they belong, and peers that do not agree are refused in time."""

from __future__ import annotations

import time

import pytest

from flavours import STOCK
from pd import Pair, role

PAGE = 8


@pytest.fixture(scope="module")
def want(expected):
    return expected("mla")


@pytest.fixture(scope="module")
def prefill(start, want):
    """No flag: a prefill server arms itself."""
    with start(tp=1, **role("prefill")) as engine:
        yield engine


@pytest.fixture(scope="module")
def decode(start, prefill):
    with start(tp=2, dcp=2, block=PAGE, **role("decode")) as engine:
        yield engine


def test_blocks_arrive_where_they_belong(prefill, decode, want):
    Pair(prefill, decode).serves_in_blocks(want, PAGE)


def test_a_stock_prefill_server_is_refused_and_others_are_served(start, prefill, decode, want):
    with start(tp=1, of=STOCK, **role("prefill")) as stock:
        began = time.monotonic()
        assert "does not know blocks" in Pair(stock, decode).refusal()
        assert time.monotonic() - began < 60
    Pair(prefill, decode).serves_in_blocks(want, PAGE)
