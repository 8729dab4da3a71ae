"""GQA edges: chunks that leave a rank empty in mid-prompt, chunks that end inside a cycle, a pool too small."""

from __future__ import annotations

import pytest

from cases import answers_of, assert_nothing_lost, assert_placed, assert_same, retraction_and_readmission

PAGE = 8


@pytest.mark.parametrize("chunk", [PAGE, pytest.param(40, marks=pytest.mark.slow)])
def test_any_chunk_end(start, expected, chunk):
    """A chunk of one page: after the first one rank 1 holds nothing, and must still take part in every collective."""
    want = expected()
    with start(tp=2, dcp=2, block=PAGE, chunked_prefill_size=chunk) as engine:
        for block in (8, 2):
            engine.flush(block_size=block, record=True)
            got = answers_of(engine)
            states = engine.flush()
            assert_same(got, want.answers)
            assert_placed(states, want.keys, block)
            assert_nothing_lost(states)


def test_retraction_and_readmission(start):
    retraction_and_readmission(start, model="gqa", attention_backend="triton")
