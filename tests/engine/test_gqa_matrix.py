"""The long matrix for GQA: DCP groups inside the TP group, every divisor of the page, chunk sizes."""

from __future__ import annotations

import pytest

from cases import assert_nothing_lost, assert_same, serves_in_blocks
from flavours import STOCK
from session import EngineFailed

pytestmark = pytest.mark.slow

CASES = [
    pytest.param(2, 2, 16, 64, {}, id="tp2-dcp2-page16"),
    pytest.param(4, 2, 8, 64, {"num_key_value_heads": 2}, id="tp4-dcp2-two-groups"),
    pytest.param(4, 4, 8, 40, {}, id="tp4-dcp4-chunk40"),
    pytest.param(8, 8, 8, 64, {}, id="tp8-dcp8"),
    pytest.param(8, 4, 8, 24, {"num_key_value_heads": 2}, id="tp8-dcp4-two-groups"),
]


@pytest.mark.parametrize(("tp", "dcp", "page", "chunk", "overrides"), CASES)
def test_every_divisor_of_the_page(start, expected, tp, dcp, page, chunk, overrides):
    want = expected(overrides=overrides)
    with start(overrides=overrides, tp=tp, dcp=dcp, block=page, page_size=page, chunked_prefill_size=chunk) as engine:
        serves_in_blocks(engine, want, (b for b in range(page, 0, -1) if page % b == 0))


def test_stock_hangs_where_a_prefix_is_shorter_than_dcp_size(start):
    """Public fault 18, in SGLang itself: the reason why no rank may leave a collective for its own share alone."""
    shape = {"tp": 4, "dcp": 4, "page_size": 2, "chunked_prefill_size": 2}
    prompt = [list(range(3, 15))]
    with start(of=STOCK, **{**shape, "chunked_prefill_size": 8}) as engine:  # a slow machine is no hang
        engine.answer_timeout = 90
        engine.generate(prompt, 2)
    with start(of=STOCK, **shape) as engine:
        engine.answer_timeout = 90
        with pytest.raises(EngineFailed, match="gave no answer"):
            engine.generate(prompt, 2)


def test_blocks_do_not_hang_there(start):
    shape = {"page_size": 2, "chunked_prefill_size": 2}
    prompt = [list(range(3, 15))]
    with start(tp=1, **shape) as engine:
        want = engine.generate(prompt, 2)
    with start(tp=4, dcp=4, block=2, **shape) as engine:
        for block in (2, 1):
            engine.flush(block_size=block)
            assert_same({"p": engine.generate(prompt, 2)[0]}, {"p": want[0]})
            assert_nothing_lost(engine.flush())
