"""Prefill -> decode over Mooncake: blocks arrive where they belong, and peers that do not agree are refused in time."""

from __future__ import annotations

import time

import pytest

from cases import BASE, LONG
from flavours import STOCK
from pd import Pair, role
from sglang_dcp_block.plan.figures import sendings
from sglang_dcp_block.plan.inputs import Inputs, shape_of
from sglang_dcp_block.plan.mix import Lengths, Mix
from sglang_dcp_block.transfer_model.links import fitted

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


def test_as_many_segments_and_bytes_as_the_plan_says(flavour, prefill, decode, checkpoints):
    """What ``sglang-dcp-block plan`` counts from the configuration alone, beside the sender's own counters."""
    if flavour.name != "plugin":
        pytest.skip("the counters are the plugin's")
    inputs = Inputs(
        shape_of(str(checkpoints("mla"))), 2, 2, Mix("this", (Lengths(len(LONG), 7),)), fitted(), "flashinfer",
        page_size=PAGE, chunk_tokens=BASE["chunked_prefill_size"],
    )  # fmt: skip
    (planned,) = (one for one in sendings(inputs, PAGE, PAGE) if one.name == "blocks")
    decode.flush()
    (before,) = prefill.flush()  # both pools as new
    Pair(prefill, decode).generate([LONG])
    (after,) = prefill.flush()
    _, segments, num_bytes = (
        now - then for now, then in zip(after["sent"]["direct"], before["sent"].get("direct", (0, 0, 0)), strict=True)
    )
    assert (segments, num_bytes) == (planned.segments, planned.num_bytes)


def test_a_stock_prefill_server_is_refused_and_others_are_served(start, prefill, decode, want):
    with start(tp=1, of=STOCK, **role("prefill")) as stock:
        began = time.monotonic()
        assert "does not know blocks" in Pair(stock, decode).refusal()
        assert time.monotonic() - began < 60
    Pair(prefill, decode).serves_in_blocks(want, PAGE)
