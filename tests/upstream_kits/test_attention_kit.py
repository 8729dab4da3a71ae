"""Upstream's own attention kit, which ships in the wheel: the Triton backend's cases, on the CPU."""

from __future__ import annotations

import pytest
import torch
from sglang.test.kits.attention_unittest.attention_methods import dense_attention, mla_attention

CASES = [
    *((dense_attention, "dense", case) for case in dense_attention.make_dense_cases("triton")),
    *((mla_attention, "mla", case) for case in mla_attention.make_mla_cases("triton")),
]


@pytest.mark.parametrize(("kit", "kind", "case"), CASES, ids=[f"{kind}-{case.name}" for _, kind, case in CASES])
def test_case(kit, kind, case):
    class Case:
        """What the kit asks of a unittest.TestCase."""

        def assertTrue(self, value, message=None):
            assert value, message

    torch.manual_seed(0)
    with torch.no_grad():
        getattr(kit, f"run_{kind}_attention_case")(Case(), case, device="cpu")
