"""Requests without KV on a rank: out = 0 and LSE = -inf whatever the attention kernel left."""

from __future__ import annotations

import pytest
import torch

from sglang_dcp_block.kernels.neutralise import neutralise_empty, neutralise_empty_torch


@pytest.mark.parametrize("function", [neutralise_empty, neutralise_empty_torch])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lens", [[0], [3], [0, 2, 0, 0, 5], [1, 1], [0, 0, 0]])
def test_empty_rows_only(function, dtype, lens):
    torch.manual_seed(0)
    n, heads, dim = len(lens), 3, 40
    indptr = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist(), 99, 99], dtype=torch.int32)
    out, lse = torch.randn(n, heads, dim).to(dtype), torch.randn(n, heads)
    out_before, lse_before = out.clone(), lse.clone()
    for b, length in enumerate(lens):
        if length == 0:
            out[b], lse[b] = torch.nan, torch.nan
    extra = {} if function is neutralise_empty_torch else {"tile": 16}
    function(out, lse, indptr, **extra)
    for b, length in enumerate(lens):
        if length:
            assert torch.equal(out[b], out_before[b])
            assert torch.equal(lse[b], lse_before[b])
        else:
            assert torch.equal(out[b], torch.zeros(heads, dim, dtype=dtype))
            assert torch.equal(lse[b], torch.full((heads,), float("-inf")))


def test_rows_apart_and_transposed_lse():
    """Strides: a row pitch of its own, and an LSE that is a transposed view."""
    store, lse = torch.full((3, 100), torch.nan), torch.full((2, 3), torch.nan).T
    out = store[:, :8].view(3, 2, 4)
    neutralise_empty(out, lse, torch.tensor([0, 0, 0, 0]))
    assert torch.equal(out, torch.zeros(3, 2, 4))
    assert store[:, 8:].isnan().all(), "wrote past the row"
    assert (lse == float("-inf")).all()


@pytest.mark.parametrize(
    ("out", "lse", "message"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, 4), r"lse: expected \[2, 3\]"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.bfloat16), "float32"),
        (torch.zeros(2, 4, 3).mT, torch.zeros(2, 3), "dense heads"),
    ],
)
def test_bad_arguments(out, lse, message):
    with pytest.raises(ValueError, match=message):
        neutralise_empty(out, lse, torch.tensor([0, 1, 2], dtype=torch.int32))


def test_merge_never_sees_nan():
    """Upstream's all-to-all merge has no NaN guard: after neutralising, its kernel's result is finite and exact."""
    from sglang.kernels.ops.attention.dcp_kernels import dcp_lse_combine_triton

    torch.manual_seed(1)
    outs, lses = torch.full((4, 2, 3, 16), torch.nan), torch.full((4, 2, 3), torch.nan)
    outs[1, 0], lses[1, 0] = torch.randn(3, 16), torch.randn(3)
    outs[:3, 1], lses[:3, 1] = torch.randn(3, 3, 16), torch.randn(3, 3)
    poisoned, _ = dcp_lse_combine_triton(outs.clone(), lses.clone(), True)
    assert poisoned.isnan().any(), "the guard would not be needed: the case tests nothing"
    for rank in range(4):
        lens = [int(rank == 1), int(rank < 3)]
        neutralise_empty(outs[rank], lses[rank], torch.tensor([0, lens[0], sum(lens)]))
    merged, _ = dcp_lse_combine_triton(outs, lses, True)
    weights = torch.softmax(lses.double(), 0)
    want = (outs.double() * weights[..., None]).sum(0)
    torch.testing.assert_close(merged.double(), want, atol=2e-6, rtol=0)
