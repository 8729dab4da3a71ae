"""SGLang with the patch series of ``upstream/``, and no plugin: the same answers, rows and pages as with the plugin.

Needs the tree that ``python -m upstream patch`` makes; ``make upstream-verify`` runs this file on it.
"""

from __future__ import annotations

import os

import pytest

from cases import FAMILIES, WITHOUT_STOCK, answers_of, assert_nothing_lost, assert_placed, assert_same
from flavours import FLAVOURS, STOCK, TREE
from session import EngineFailed

pytestmark = pytest.mark.skipif(
    os.environ.get("DCP_BLOCK_UNDER_TEST") != "native", reason="needs DCP_BLOCK_UNDER_TEST=native and the patched tree"
)


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES, indirect=True, scope="module")


@pytest.fixture(scope="module")
def family(request):
    return request.param


@pytest.fixture(scope="module")
def want(expected, family):
    return expected(FAMILIES[family]["model"])


@pytest.mark.parametrize("block", [8, 4])
def test_log_probabilities_rows_and_pages(start, want, family, block):
    """Every phase of serving against DCP1, and what the processes have loaded."""
    with start(tp=2, dcp=2, block=block, **FAMILIES[family]) as engine:
        assert engine.info("dcp_block_size", "dcp_block") == {"dcp_block_size": block, "dcp_block": None}
        engine.flush(record=True)
        got = answers_of(engine)
        states = engine.flush()
    assert got["cached"].cached > 0, "no prefix was reused: the case does not test radix hits"
    assert_same(got, want.answers)
    assert_placed(states, want.keys, block)
    assert_nothing_lost(states)
    for state in states:
        assert state["sglang"] == str(TREE / "python" / "sglang" / "__init__.py")
        assert state["plugin"] == [], "the plugin's patch points are loaded: it may be what answered"


def test_unset_is_the_release_bit_for_bit(start, family):
    if family in WITHOUT_STOCK:
        pytest.skip("the release has no such path")
    answers = []
    for flavour in (STOCK, FLAVOURS["native"]):
        with start(tp=2, dcp=2, of=flavour, **FAMILIES[family]) as engine:
            answers.append(answers_of(engine))
    released, patched = answers
    for name, answer in released.items():
        assert (patched[name].ids, patched[name].logprobs) == (answer.ids, answer.logprobs), name


def test_plugin_and_series_answer_alike_bit_for_bit(start, family):
    answers = []
    for flavour in (FLAVOURS["plugin"], FLAVOURS["native"]):
        with start(tp=2, dcp=2, block=4, of=flavour, **FAMILIES[family]) as engine:
            answers.append(answers_of(engine))
    plugin, series = answers
    for name, answer in plugin.items():
        assert (series[name].ids, series[name].logprobs) == (answer.ids, answer.logprobs), name


def test_a_chunked_prefix_shorter_than_dcp_size_does_not_hang(start, want, family):
    """What the release hangs at (tests/engine/test_gqa_matrix.py), for the backend that hung."""
    if family != "gqa":
        pytest.skip("the Triton backend's GQA path")
    shape = {"page_size": 2, "chunked_prefill_size": 2, "answer_timeout": 240}
    timeout = shape.pop("answer_timeout")
    with start(tp=4, dcp=4, **{**FAMILIES[family], **shape}) as engine:
        engine.answer_timeout = timeout
        try:
            engine.generate([list(range(2, 14))], 2)
        except EngineFailed as error:
            pytest.fail(f"no answer within {timeout} s: {error}")
