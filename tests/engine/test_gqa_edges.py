"""GQA edges: chunks that leave a rank empty in mid-prompt, chunks that end inside a cycle, a pool too small."""

from __future__ import annotations

import pytest

from cases import retraction_and_readmission, serves_in_blocks

PAGE = 8


@pytest.mark.parametrize("chunk", [PAGE, pytest.param(40, marks=pytest.mark.slow)])
def test_any_chunk_end(start, expected, chunk):
    """A chunk of one page: after the first one rank 1 holds nothing, and must still take part in every collective."""
    want = expected()
    with start(tp=2, dcp=2, block=PAGE, chunked_prefill_size=chunk) as engine:
        serves_in_blocks(engine, want, (8, 2))


def test_retraction_and_readmission(start):
    retraction_and_readmission(start, model="gqa", attention_backend="triton")
