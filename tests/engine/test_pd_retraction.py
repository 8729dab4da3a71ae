"""Retraction on a decode server: a request's KV is copied out, its pages go to others, and the copy comes back elsewhere."""

from __future__ import annotations

import pytest

from cases import assert_nothing_lost, assert_same, differences, token_list
from pd import Pair, role
from session import EngineFailed

pytestmark = pytest.mark.slow

# A pool of six virtual pages of 16 tokens holds any one of them, 56 tokens, and not all. Shorter and longer ones need
# their next page at other times, so some are retracted in the middle of one, with rows that dealing by tokens leaves out.
PROMPTS = [token_list(100 + i, length) for i, length in enumerate((8, 5, 5, 5))]
NEW = 48
ROOM = {"context_length": 128, "schedule_conservativeness": 0.1}


def named(completions):
    return {str(i): c for i, c in enumerate(completions)}


def test_the_copy_comes_back(start):
    with start(model="mla", attention_backend="flashinfer", **ROOM) as engine:
        want = named(engine.generate(PROMPTS, NEW))
    small = role(
        "decode",
        max_total_tokens=48,
        num_reserved_decode_tokens=1,
        disaggregation_decode_retraction_backup="cpu_tensor",
    )
    with (
        start(tp=1, **role("prefill", **ROOM)) as prefill,
        start(tp=2, dcp=2, block=4, mutants=True, **small, **ROOM) as decode,
    ):
        pair = Pair(prefill, decode)
        decode.flush(mutant=None)
        got = named(pair.generate(PROMPTS, NEW))
        assert any(c.retracted for c in got.values()), "no request was retracted: the case tests nothing"
        assert_same(got, want)
        assert_nothing_lost(decode.flush(mutant="off:maybe_dcp_kernel_indices"))
        assert_nothing_lost(prefill.flush())
        try:  # the copy really is taken by blocks: by tokens it holds other rows
            worst = differences(named(pair.generate(PROMPTS, NEW)), want)
        except EngineFailed:
            return
        assert max(worst.values()) > 1e-2
