"""MLA's other ways of merging over ranks: the all-to-all exchange, and queries projected on every rank."""

from __future__ import annotations

import pytest

from cases import answers_of, assert_nothing_lost, assert_same, differences
from flavours import STOCK
from session import EngineFailed

FLASHINFER = {"model": "mla", "attention_backend": "flashinfer"}
# SGLang prepares replicated query projections for models of 16 bits alone.
REPLICATED = {**FLASHINFER, "dcp_comm_backend": "a2a", "dcp_replicate_q_proj": True, "dtype": "float16"}


def test_all_to_all(start, expected):
    """The exchange has no guard against NaN, and what the attention kernel leaves for empty ranks is NaN here."""
    want = expected("mla")
    shape = {"dcp_comm_backend": "a2a", "environ": {"DCP_BLOCK_LAB_POISON": "1"}, "mutants": True}
    with start(tp=2, dcp=2, block=8, **shape, **FLASHINFER) as engine:
        assert engine.info("dcp_comm_backend") == {"dcp_comm_backend": "a2a"}
        for block in (8, 2):
            engine.flush(block_size=block, mutant=None)
            assert_same(answers_of(engine), want.answers)
            assert_nothing_lost(engine.flush())
        # Without the neutral element the NaN gets into the answers, or ends the engine.
        engine.flush(block_size=8, mutant="off:forward_decode")
        try:
            worst = differences(answers_of(engine), want.answers)
        except EngineFailed:
            return
        assert not worst["short"] <= 1e-2, "no rank was empty: the case tests nothing"


@pytest.mark.slow
def test_replicated_query_projection(start):
    """Queries are not gathered but projected in full on each rank: against stock token round-robin, in 16 bits."""
    with start(tp=2, dcp=2, of=STOCK, **REPLICATED) as engine:
        want = answers_of(engine)
    with start(tp=2, dcp=2, block=8, mutants=True, **REPLICATED) as engine:
        assert "prepared full-head Q weights for" in engine.log.read_text(errors="replace")
        for block in (8, 2):
            engine.flush(block_size=block, mutant=None)
            assert_same(answers_of(engine), want, 0.05)
        engine.flush(block_size=8, mutant="door:rows-swapped")
        assert max(differences(answers_of(engine), want).values()) > 0.2
