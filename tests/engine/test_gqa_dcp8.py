"""TP8 + DCP8, the product's own shape, on eight interpreted ranks."""

from __future__ import annotations

from cases import serves_on_eight_ranks


def test_tp8_dcp8(start, expected):
    want = expected()
    with start(tp=8, dcp=8, block=8) as engine:
        serves_on_eight_ranks(engine, want, 8)
