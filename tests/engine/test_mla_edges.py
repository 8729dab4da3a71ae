"""MLA edges: chunked prefixes with unaligned starts, any chunk end, a small pool, two attention groups, TP8 + DCP8."""

from __future__ import annotations

import pytest

from cases import (
    answers_of,
    assert_nothing_lost,
    assert_same,
    retraction_and_readmission,
    serves_in_blocks,
    serves_on_eight_ranks,
)

FLASHINFER = {"model": "mla", "attention_backend": "flashinfer"}
TRITON = {"model": "mla", "attention_backend": "triton"}

# Lowered so that short prompts take the path of prefixes above 8192 tokens. The ragged stand-in then returns natural
# logarithms, because upstream's merge of the chunks reads them so.
CHUNKED_PREFIX = {
    "SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD": "16",
    "SGLANG_MAX_KV_CHUNK_CAPACITY": "20",
    "SGLANG_DCP_BLOCK_CPU_RAGGED_LSE": "e",
}


def test_chunked_prefix_with_unaligned_starts(start, expected):
    want = expected("mla")
    with start(tp=2, dcp=2, block=8, environ=CHUNKED_PREFIX, mutants=True, **FLASHINFER) as engine:
        for block in (8, 2):
            engine.flush(block_size=block, mutant=None)
            assert_same(answers_of(engine), want.answers)
            assert_nothing_lost(engine.flush())
        engine.flush(block_size=4, mutant="off:filter_dcp_local_chunk_kv_indices")
        with pytest.raises(AssertionError):  # the path really runs: without its hook the answers are wrong
            assert_same(answers_of(engine), want.answers, 1e-2)


def test_tp8_dcp8(start, expected):
    want = expected("mla")
    with start(tp=8, dcp=8, block=8, **FLASHINFER) as engine:
        serves_on_eight_ranks(engine, want, 8)


@pytest.mark.slow
@pytest.mark.parametrize("family", [FLASHINFER, TRITON], ids=["flashinfer", "triton"])
@pytest.mark.parametrize(("page", "chunk"), [(8, 8), (8, 40), (64, 64)])
def test_any_chunk_end(start, expected, family, page, chunk):
    shape = {"page_size": page, "chunked_prefill_size": chunk, **family}
    want = expected("mla")
    with start(tp=2, dcp=2, block=page, **shape) as engine:
        serves_in_blocks(engine, want, (page, page // 2, 2, 1))


@pytest.mark.slow
@pytest.mark.parametrize("family", [FLASHINFER, TRITON], ids=["flashinfer", "triton"])
@pytest.mark.parametrize(("page", "chunk"), [(8, 40), (64, 64)])
def test_dcp8_every_divisor(start, expected, family, page, chunk):
    shape = {"page_size": page, "chunked_prefill_size": chunk, **family}
    want = expected("mla")
    with start(tp=8, dcp=8, block=page, **shape) as engine:
        serves_in_blocks(engine, want, (b for b in (64, 16, 8, 4, 1) if page % b == 0))


@pytest.mark.slow
def test_retraction_and_readmission(start):
    retraction_and_readmission(start, **FLASHINFER)


@pytest.mark.slow
def test_two_attention_groups(start, expected):
    """Attention data parallelism: two groups of two ranks, each with its own DCP."""
    want = expected("mla")
    with start(tp=4, dcp=2, block=8, attn_dp_size=2, **FLASHINFER) as engine:
        info = engine.info("dcp_block")
        assert info["dcp_block"]["num_ranks"] == 4
        serves_in_blocks(engine, want, (8, 2))
