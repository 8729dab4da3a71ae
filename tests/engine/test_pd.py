"""Prefill -> decode over Mooncake: blocks arrive where they belong, and peers that do not agree are refused in time."""

from __future__ import annotations

import time

import pytest

from cases import BATCHES, PROMPTS, assert_nothing_lost, assert_placed, assert_same
from flavours import STOCK
from pd import Pair, role
from session import EngineFailed

PAGE = 8


def answers_of(pair):
    answers = {}
    for names in BATCHES:
        answers.update(zip(names, pair.generate([PROMPTS[n] for n in names]), strict=True))
    return answers


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
    decode.flush(record=True)
    got = answers_of(Pair(prefill, decode))
    states = decode.flush()
    assert_same(got, want.answers)
    assert_placed(states, want.keys, PAGE)
    assert_nothing_lost(states)
    assert_nothing_lost(prefill.flush())


def test_a_stock_prefill_server_is_refused_and_others_are_served(start, prefill, decode, want):
    with start(tp=1, of=STOCK, **role("prefill")) as stock:
        began = time.monotonic()
        with pytest.raises(EngineFailed, match="does not know blocks"):
            Pair(stock, decode).generate([PROMPTS["middle"]])
        assert time.monotonic() - began < 60
        good = Pair(prefill, decode).generate([PROMPTS["middle"]])
    assert_same({"middle": good[0]}, {"middle": want.answers["middle"]})
    assert_nothing_lost(decode.flush())
