"""TP2 + DCP2 on the real engine, each kind of attention: every phase of serving against DCP1, in one engine a kind."""

from __future__ import annotations

import pytest

from cases import (
    FAMILIES,
    PROMPTS,
    WITHOUT_STOCK,
    answers_of,
    assert_nothing_lost,
    assert_placed,
    assert_same,
    differences,
)
from flavours import STOCK
from session import EngineFailed

PAGE = 8
DOOR = ("door:off", "door:owner+1", "door:rows-swapped")
# all_gather_kv_cache_for_dcp is not among them: where shares are equal, as here, upstream's gives the same tokens in
# another order, which attention over a prefix does not see; tests/unit/test_gather.py pins order and unequal shares.
MUTANTS = {
    "gqa": ("off:get_dcp_lens", "off:_dcp_kv_indices", "off:_set_kv_buffer", *DOOR),
    "mla-flashinfer": (
        "off:plan_dcp_decode_metadata",
        "off:translate_dcp_read_ids",
        "off:prepare_decode_context_parallel_metadata",
        *DOOR,
    ),
    "mla-triton": (
        "off:get_dcp_lens",
        "off:_dcp_kv_indices",
        "off:prepare_decode_context_parallel_metadata",
        "off:is_mla_dcp_lse_base_on_e",
        *DOOR,
    ),
}


def pytest_generate_tests(metafunc):
    """Each kind of attention, or each kind with each of its mutants; the quick run takes every mutant of one kind."""
    if "mutant" in metafunc.fixturenames:
        quick = {"gqa": MUTANTS["gqa"], "mla-flashinfer": DOOR[-1:], "mla-triton": ()}
        pairs = [
            pytest.param(family, mutant, marks=() if mutant in quick[family] else pytest.mark.slow)
            for family, mutants in MUTANTS.items()
            for mutant in mutants
        ]
        metafunc.parametrize(("family", "mutant"), pairs, indirect=["family"], scope="module")
    elif "family" in metafunc.fixturenames:
        kinds = ["gqa"] if "of_one_kind" in metafunc.definition.name else FAMILIES
        metafunc.parametrize("family", kinds, indirect=True, scope="module")


@pytest.fixture(scope="module")
def family(request):
    return request.param


@pytest.fixture(scope="module")
def want(expected, family):
    return expected(FAMILIES[family]["model"])


@pytest.fixture(scope="module")
def stock(start, family):
    """Answers of stock SGLang, token round-robin; its engine is gone before ours starts."""
    if family in WITHOUT_STOCK:
        return {}
    with start(tp=2, dcp=2, of=STOCK, **FAMILIES[family]) as engine:
        return answers_of(engine)


@pytest.fixture(scope="module")
def live(start, family, want, stock):
    """live() -> the engine under test; a mutant that killed it does not take the other cases along."""
    engines = []

    def live():
        if not engines or engines[-1].process.poll() is not None:
            engines.append(start(tp=2, dcp=2, block=PAGE, mutants=True, **FAMILIES[family]))
        return engines[-1]

    yield live
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(live):
    return live()


def test_the_server_says_what_it_runs_with(engine):
    info = engine.info("dcp_block_size", "dcp_block", "page_size")
    assert info["dcp_block_size"] == PAGE
    report = info["dcp_block"]
    assert (report["block_size"], report["dcp_size"], report["page_size"]) == (PAGE, 2, PAGE)
    assert report["num_ranks"] == 2, "the report speaks for every rank"
    assert report["capacity_tokens"] == 2 * report["rows_per_rank"] == 2 * 512


@pytest.mark.parametrize("block", [8, 4, 2])
def test_log_probabilities_and_rows(engine, want, block):
    """Chunks of 64, a radix hit with a tail, requests shorter than a round, two requests a batch.

    Log-probabilities equal DCP1's, every prefilled, prefix-hit and decoded token lies in the row that dealing one by one
    gives, and no page is lost.
    """
    engine.flush(block_size=block, mutant=None, record=True)
    got = answers_of(engine)
    states = engine.flush()
    assert got["cached"].cached > 0, "no prefix was reused: the case does not test radix hits"
    assert_same(got, want.answers)
    assert_placed(states, want.keys, block)
    assert_nothing_lost(states)


def test_block_size_1_is_stock_bit_for_bit(engine, want, stock):
    """Armed with B = 1 every index is stock's: outputs equal to the last bit, and DCP1's where stock has no such path."""
    engine.flush(block_size=1, mutant=None)
    armed = answers_of(engine)
    assert_same(armed, want.answers)
    for name, answer in stock.items():
        assert (armed[name].ids, armed[name].logprobs) == (answer.ids, answer.logprobs), name


def test_every_mutant_is_caught(live, family, want, mutant):
    """Faults put in on purpose stop the engine, or move a log-probability by far more than the tolerance."""
    engine = live()
    try:
        engine.flush(block_size=4, mutant=mutant)
        worst = differences(answers_of(engine), want.answers)
    except EngineFailed:
        engine.close()
        return
    engine.flush(block_size=PAGE, mutant=None)
    assert max(worst.values()) > 1e-2, f"{mutant} went unseen: {worst}"


def test_a_lost_page_of_one_kind_is_seen(live, family):
    """The leak check itself: an allocator that forgets a page at each release does not pass it."""
    engine = live()
    engine.flush(block_size=PAGE, mutant="leak")
    answers_of(engine)
    states = engine.flush(mutant=None)
    with pytest.raises(AssertionError):
        assert_nothing_lost(states)


def test_prompts_cover_what_they_should():
    lengths = {name: len(tokens) for name, tokens in PROMPTS.items()}
    assert any(length % 2 for length in lengths.values())
    assert lengths["short"] < PAGE, "a rank stays empty"
    assert lengths["long"] > 64, "spans chunks"
