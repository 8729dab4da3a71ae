"""The neutral element of the merge, written over what an attention kernel left for requests without KV on this rank.

A rank that owns nothing of a request must contribute out = 0 and LSE = -inf.  Kernels are free to leave such rows as they
found them, and an uninitialised NaN times a weight of 0 is NaN, so it is written explicitly.
"""

# Triton types device code; mypy cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp_block.kernels import launch


@triton.jit
def _neutralise_kernel(
    out_ptr, lse_ptr, kv_indptr_ptr, row_size, heads, out_stride, lse_stride, lse_head_stride, TILE: tl.constexpr
):
    request = tl.program_id(0).to(tl.int64)
    if tl.load(kv_indptr_ptr + (request + 1)) == tl.load(kv_indptr_ptr + request):
        for begin in range(0, row_size, TILE):
            i = begin + tl.arange(0, TILE).to(tl.int64)
            tl.store(out_ptr + request * out_stride + i, tl.zeros([TILE], out_ptr.dtype.element_ty), mask=i < row_size)
        for begin in range(0, heads, TILE):
            h = begin + tl.arange(0, TILE).to(tl.int64)
            minus_infinity = tl.full([TILE], float("-inf"), tl.float32)
            tl.store(lse_ptr + request * lse_stride + h * lse_head_stride, minus_infinity, mask=h < heads)


def neutralise_empty(out: torch.Tensor, lse: torch.Tensor, kv_indptr: torch.Tensor, *, tile: int = launch.TILE) -> None:
    """Set out = 0 and LSE = -inf, in place, for each request whose share on this rank is empty.

    Args:
        out: [num_requests, heads, head_dim] float, dense in the last two dimensions; one query token a request.
        lse: [num_requests, heads] float32, any base.
        kv_indptr: [>= num_requests + 1] int32 or int64: request b has ``kv_indptr[b + 1] - kv_indptr[b]`` rows here.
        tile: elements a program writes at a time. For tests.
    Raises:
        TypeError, ValueError: shapes or dtypes are not as above.
    One launch, no host sync, and next to no work where nothing is empty; CUDA-graph safe.
    Law: rows of requests with KV keep every bit; the others are neutral whatever they held, NaN included.

    >>> out, lse = torch.full((2, 1, 2), torch.nan), torch.tensor([[1.0], [torch.nan]])
    >>> neutralise_empty(out, lse, torch.tensor([0, 3, 3], dtype=torch.int32))
    >>> out[1].tolist(), lse.tolist()
    ([[0.0, 0.0]], [[1.0], [-inf]])
    """
    num_requests, heads, head_dim = out.shape
    if lse.dtype != torch.float32 or lse.shape != (num_requests, heads):
        raise ValueError(f"lse: expected [{num_requests}, {heads}] float32, got {tuple(lse.shape)} {lse.dtype}")
    if out.stride(2) != 1 or out.stride(1) != head_dim:
        raise ValueError(f"out: expected dense heads, got strides {out.stride()} for shape {tuple(out.shape)}")
    launch.check_per_request("kv_indptr", kv_indptr, num_requests + 1)
    if num_requests == 0:
        return
    if not launch.can_launch(out):
        neutralise_empty_torch(out, lse, kv_indptr)
        return
    _neutralise_kernel[(num_requests,)](
        out, lse, kv_indptr, heads * head_dim, heads, out.stride(0), lse.stride(0), lse.stride(1), TILE=tile
    )


def neutralise_empty_torch(out: torch.Tensor, lse: torch.Tensor, kv_indptr: torch.Tensor) -> None:
    """Torch twin of :func:`neutralise_empty`."""
    num_requests = out.shape[0]
    empty = kv_indptr[1 : num_requests + 1] == kv_indptr[:num_requests]
    out.masked_fill_(empty[:, None, None], 0)
    lse.masked_fill_(empty[:, None], float("-inf"))
