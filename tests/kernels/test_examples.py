"""The examples in the docstrings run and show what really comes out."""

import doctest

import pytest

from sglang_dcp_block.kernels import (
    compact_indices,
    free_runs,
    group_pages,
    kv_indices,
    long_runs,
    neutralise,
    slot_maps,
)


@pytest.mark.parametrize(
    "module", [slot_maps, kv_indices, compact_indices, neutralise, group_pages, long_runs, free_runs]
)
def test_examples(module) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
