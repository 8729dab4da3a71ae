"""TP8 + DCP8, the product's own shape, on eight interpreted ranks."""

from __future__ import annotations

from cases import answers_of, assert_nothing_lost, assert_placed, assert_same


def test_tp8_dcp8(start, expected):
    """Blocks of a page: up to seven ranks hold nothing of the short prompt."""
    want = expected()
    with start(tp=8, dcp=8, block=8) as engine:
        engine.flush(record=True)
        got = answers_of(engine, (("middle", "short"),))
        states = engine.flush()
    assert_same(got, {name: want.answers[name] for name in got})
    for state in states:
        state["released"] = [r for r in state["released"] if len(r["tokens"]) > 20]
    assert_placed([s for s in states if s["dcp_rank"] < 7], want.keys, 8, at_least=4)
    assert_nothing_lost(states)
