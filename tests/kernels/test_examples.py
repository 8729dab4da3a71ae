"""The examples in the docstrings run and show what really comes out."""

import doctest

import pytest

from sglang_dcp_block.kernels import compact_indices, kv_indices, neutralise, slot_maps


@pytest.mark.parametrize("module", [slot_maps, kv_indices, compact_indices, neutralise])
def test_examples(module) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
