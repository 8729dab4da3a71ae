"""GQA at TP8 + DCP8, on eight interpreted ranks."""

from __future__ import annotations

import pytest

from cases import serves_on_eight_ranks

pytestmark = pytest.mark.slow  # eight ranks of MLA are in the default run


def test_tp8_dcp8(start, expected):
    want = expected()
    with start(tp=8, dcp=8, block=8) as engine:
        serves_on_eight_ranks(engine, want, 8)
