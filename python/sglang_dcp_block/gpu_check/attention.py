"""A plain decode kernel over rows of a pool, and the merge of partial results over ranks.

Stand-ins for an attention backend: float32, one program a request and head, no tensor cores.  As real backends may, the
decode kernel leaves the output of a request without rows as it was.
"""

# Triton types device code; mypy cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _decode_kernel(
    q_ptr,
    pool_ptr,
    rows_ptr,
    indptr_ptr,
    out_ptr,
    lse_ptr,
    scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    TILE: tl.constexpr,
):
    request, heads = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    at = request * heads + tl.program_id(1)
    begin = tl.load(indptr_ptr + request).to(tl.int64)
    end = tl.load(indptr_ptr + (request + 1)).to(tl.int64)
    if end > begin:
        d, dv = tl.arange(0, D).to(tl.int64), tl.arange(0, DV).to(tl.int64)
        q = tl.load(q_ptr + at * D + d)
        largest = tl.full([], float("-inf"), tl.float32)
        weight = tl.full([], 0.0, tl.float32)
        total = tl.zeros([DV], tl.float32)
        for tile_start in range(begin, end, TILE):
            i = tile_start + tl.arange(0, TILE)
            mask = i < end
            row = tl.load(rows_ptr + i, mask=mask, other=0)
            key = tl.load(pool_ptr + row[:, None] * D + d[None, :], mask=mask[:, None], other=0.0)
            value = tl.load(pool_ptr + row[:, None] * D + dv[None, :], mask=mask[:, None], other=0.0)
            score = tl.where(mask, tl.sum(key * q[None, :], 1) * scale, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(score, 0))
            shrink, part = tl.exp(largest - new_largest), tl.exp(score - new_largest)
            weight = weight * shrink + tl.sum(part, 0)
            total = total * shrink + tl.sum(part[:, None] * value, 0)
            largest = new_largest
        tl.store(out_ptr + at * DV + dv, total / weight)
        tl.store(lse_ptr + at, largest + tl.log(weight))


def decode(
    q: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor, indptr: torch.Tensor, scale: float,
    out: torch.Tensor, lse: torch.Tensor, *, tile: int = 64,
) -> None:  # fmt: skip
    """Attend to the rows of each request; the first part of a row is its value too.

    Args:
        q: [num_requests, heads, D] float32; D a power of 2.
        pool: [num_rows, D] float32.
        rows: [>= indptr[-1]] int64.
        indptr: [num_requests + 1] int32: where each request's rows begin.
        scale: of the scores.
        out: [num_requests, heads, DV] float32, DV a power of 2, at most D; not touched where a request has no rows.
        lse: [num_requests, heads] float32, natural; likewise.
    One launch, no host sync; CUDA-graph safe.
    """
    num_requests, heads, width = q.shape
    _decode_kernel[(num_requests, heads)](q, pool, rows, indptr, out, lse, scale, D=width, DV=out.shape[2], TILE=tile)


@triton.jit
def _merge_kernel(outs_ptr, lses_ptr, merged_ptr, num_states, P: tl.constexpr, DV: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    rank, dv = tl.arange(0, P).to(tl.int64), tl.arange(0, DV).to(tl.int64)
    lse = tl.load(lses_ptr + rank * num_states + at)
    largest = tl.max(lse, 0)
    weight = tl.exp(lse - tl.where(largest == float("-inf"), 0.0, largest))
    out = tl.load(outs_ptr + (rank[:, None] * num_states + at) * DV + dv[None, :])
    tl.store(merged_ptr + at * DV + dv, tl.sum(out * weight[:, None], 0) / tl.maximum(tl.sum(weight, 0), 1.0))


def merge(outs: torch.Tensor, lses: torch.Tensor, merged: torch.Tensor) -> None:
    """Combine the ranks' partial results by their log-sum-exp; nothing guards against NaN, as in upstream's combine.

    Args:
        outs: [dcp_size, num_requests, heads, DV] float32, dense; dcp_size and DV powers of 2.
        lses: [dcp_size, num_requests, heads] float32, natural, -inf for a rank without rows.
        merged: [num_requests, heads, DV] float32; 0 where no rank has rows.
    One launch, no host sync; CUDA-graph safe.
    """
    num_states = merged.shape[0] * merged.shape[1]
    _merge_kernel[(num_states,)](outs, lses, merged, num_states, P=outs.shape[0], DV=outs.shape[3])


def dense(q: torch.Tensor, kv: torch.Tensor, width: int, scale: float) -> torch.Tensor:
    """[heads, width]: attention of ``q`` [heads, D] over all tokens ``kv`` [tokens, D], in torch."""
    return torch.softmax(q @ kv.T * scale, dim=-1) @ kv[:, :width]
