"""GQA edges: chunks that leave a rank empty in mid-prompt, chunks that end inside a cycle, a pool too small."""

from __future__ import annotations

import pytest

from cases import answers_of, assert_nothing_lost, assert_placed, assert_same, token_list

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
    """Four growing requests in a pool for two and a half: some are retracted, computed again, and answer the same."""
    prompts = [token_list(100 + i, 21 + i) for i in range(4)]
    kwargs = {"max_total_tokens": 64, "schedule_conservativeness": 0.1, "context_length": 128}
    with start(tp=1, **{**kwargs, "max_total_tokens": 512}) as engine:
        want = {str(i): c for i, c in enumerate(engine.generate(prompts, 24))}
    with start(tp=2, dcp=2, block=4, **kwargs) as engine:
        got = {str(i): c for i, c in enumerate(engine.generate(prompts, 24))}
        assert "etract" in engine.log.read_text(errors="replace"), "no request was retracted: the case tests nothing"
        assert_same(got, want)
        assert_nothing_lost(engine.flush())
