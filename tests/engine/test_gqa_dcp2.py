"""GQA on the Triton backend, TP2 + DCP2: every phase of serving against DCP1, in one engine."""

from __future__ import annotations

import pytest
from cases import PROMPTS, answers_of, assert_nothing_lost, assert_placed, assert_same, differences
from flavours import STOCK

PAGE = 8


@pytest.fixture(scope="module")
def want(expected):
    return expected()


@pytest.fixture(scope="module")
def stock(start):
    """Answers of stock SGLang, token round-robin; its engine is gone before ours starts."""
    with start(tp=2, dcp=2, of=STOCK) as engine:
        return answers_of(engine)


@pytest.fixture(scope="module")
def engine(start, want, stock):
    with start(tp=2, dcp=2, block=PAGE, mutants=True) as engine:
        yield engine


def test_the_server_says_what_it_runs_with(engine):
    info = engine.info("dcp_block_size", "dcp_block", "page_size")
    assert info["dcp_block_size"] == PAGE
    report = info["dcp_block"]
    assert (report["block_size"], report["dcp_size"], report["page_size"]) == (PAGE, 2, PAGE)
    assert report["capacity_tokens"] == 2 * report["rows_per_rank"] == 2 * 512


@pytest.mark.parametrize("block", [8, 4, 2, 1])
def test_log_probabilities_equal_dcp1(engine, want, block):
    """Chunks of 64, a radix hit with a tail, requests shorter than a round, two requests a batch."""
    engine.flush(block_size=block, mutant=None)
    got = answers_of(engine)
    assert got["cached"].cached > 0, "no prefix was reused: the case does not test radix hits"
    assert_same(got, want.answers)
    assert_nothing_lost(engine.flush())


@pytest.mark.parametrize("block", [8, 4, 2])
def test_rows_lie_where_the_oracle_says(engine, want, block):
    """Read back the pools: prefilled, prefix-hit and decoded tokens, against rows dealt one by one."""
    engine.flush(block_size=block, mutant=None, record=True)
    answers_of(engine)
    states = engine.flush()
    assert_placed(states, want.keys, block)


MUTANTS = [
    "off:get_dcp_lens",
    "off:_dcp_kv_indices",
    "off:_set_kv_buffer",
    "door:off",
    "door:owner+1",
    "door:rows-swapped",
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_is_caught(engine, want, mutant):
    """Faults put in on purpose move a log-probability by far more than the tolerance, tokens or not."""
    engine.flush(block_size=4, mutant=mutant)
    try:
        worst = differences(answers_of(engine), want.answers)
        assert max(worst.values()) > 1e-2, f"{mutant} went unseen: {worst}"
    finally:
        engine.flush(block_size=PAGE, mutant=None)


def test_block_size_1_is_stock_bit_for_bit(engine, stock):
    """Armed with B = 1 every index is stock's: outputs equal to the last bit."""
    engine.flush(block_size=1, mutant=None)
    armed = answers_of(engine)
    for name, answer in stock.items():
        assert (armed[name].ids, armed[name].logprobs) == (answer.ids, answer.logprobs), name


def test_prompts_cover_what_they_should():
    lengths = {name: len(tokens) for name, tokens in PROMPTS.items()}
    assert any(length % 2 for length in lengths.values())
    assert lengths["short"] < PAGE, "a rank stays empty"
    assert lengths["long"] > 64, "spans chunks"
