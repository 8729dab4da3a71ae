"""A batch's requests to the rows that this rank attends to, read from ``req_to_token``.

    request b, [starts[b], ...)    positions   0 . . . S . . . . . . . . . .
    this rank's share              from local index local_len(S, rank), local_lens[b] of them
    out                            [ rows of request 0 | rows of request 1 | ... ]
                                     ^ kv_indptr[0]      ^ kv_indptr[1]

What ``_dcp_kv_indices`` of upstream's Triton backend needs, for prefix, decode and windows alike.
"""

# Triton types device code; mypy cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.kernels import launch
from sglang_dcp_block.kernels.device import local_index, local_len, position_of


# Grid: (requests, programs a request); a request's programs stride over its tiles.  All addresses are 64-bit:
# request * stride passes 2**31 in a large req_to_token, and so does a position in the masked lanes behind a share.
@triton.jit
def _build_kv_indices_kernel(
    req_to_token_ptr,
    req_pool_indices_ptr,
    local_lens_ptr,
    kv_indptr_ptr,
    starts_ptr,  # or None
    out_ptr,
    req_to_token_stride,
    RANK: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    num_rows = tl.load(local_lens_ptr + request).to(tl.int64)
    pool_index = tl.load(req_pool_indices_ptr + request).to(tl.int64)
    slots_ptr = req_to_token_ptr + pool_index * req_to_token_stride
    rows_ptr = out_ptr + tl.load(kv_indptr_ptr + request).to(tl.int64)

    first_index = 0
    if starts_ptr is not None:
        first_index = local_len(tl.load(starts_ptr + request).to(tl.int64), RANK, P, B)

    first = tl.program_id(1).to(tl.int64) * TILE
    step = tl.num_programs(1).to(tl.int64) * TILE
    for tile_start in range(first, num_rows, step):
        j = tile_start + tl.arange(0, TILE)
        mask = j < num_rows
        slot = tl.load(slots_ptr + position_of(first_index + j, RANK, P, B), mask=mask, other=0)
        row = tl.where(slot < 0, -1, local_index(slot, P, B))
        tl.store(rows_ptr + j, row.to(tl.int64), mask=mask)


def build_kv_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    local_lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    layout: DcpLayout,
    rank: int,
    out: torch.Tensor,
    starts: torch.Tensor | None = None,
    *,
    tile: int = launch.TILE,
    max_programs: int = launch.MAX_PROGRAMS,
) -> torch.Tensor:
    """Requests to this rank's physical rows of them, in position order.

    Rule: for every request b and ``0 <= j < local_lens[b]``, with ``i = local_len(starts[b], rank) + j`` and
    ``t = position(rank, i)``, ``out[kv_indptr[b] + j] = row(req_to_token[req_pool_indices[b], t])``.  A slot below 0
    (padding, which no position below a request's length has) becomes -1.  The rest of ``out`` is not touched.

    Args:
        req_to_token: ``[max_requests, max_context] int32``, widened slots in position order, up to ``2**31 - 1``; rows
            dense, any stride between them.
        req_pool_indices: ``[num_requests] int32 or int64``, rows of ``req_to_token``.
        local_lens: ``[>= num_requests] int32 or int64``, this rank's share of each request, in tokens:
            ``layout.local_len`` of the request, or of its part from ``starts`` on.
        kv_indptr: ``[>= num_requests] int32 or int64``, where each request's rows begin in ``out``.
        layout: the block layout.
        rank: this rank, ``0 <= rank < dcp_size``.
        out: ``[>= sum of local_lens] int64``, dense: fresh, or a CUDA graph's buffer of stable address.
        starts: ``[>= num_requests] int32 or int64``, the first position wanted of each request, aligned or not;
            None is all 0.
        tile, max_programs: rows a program handles at a time (a power of 2), programs of the launch.  For tests.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or the rank is not as above.

    One launch (none for no requests), no host sync; the grid follows from shapes alone, so CUDA-graph safe.
    Law: over all ranks, the slots behind the rows of request b are its slots from ``starts[b]`` on, each once; with
    ``block_size`` 1 the result equals that of upstream's kernel.

    >>> req_to_token = torch.arange(8, 24, dtype=torch.int32).view(1, 16)
    >>> out, lens, indptr = torch.zeros(5, dtype=torch.int64), torch.tensor([5]), torch.tensor([0, 5])
    >>> build_kv_indices(req_to_token, torch.tensor([0]), lens, indptr, DcpLayout(2, 4), 0, out).tolist()  # [0, 9)
    [4, 5, 6, 7, 8]
    """
    num_requests = req_pool_indices.shape[0]
    _check(req_to_token, req_pool_indices, local_lens, kv_indptr, layout, rank, out, starts)
    if not launch.can_launch(req_to_token):
        return build_kv_indices_torch(req_to_token, req_pool_indices, local_lens, kv_indptr, layout, rank, out, starts)
    if num_requests > 0:
        programs = launch.programs_per_request(
            num_requests, layout.max_local_len(req_to_token.shape[1]), tile, max_programs
        )
        _build_kv_indices_kernel[(num_requests, programs)](
            req_to_token,
            req_pool_indices,
            local_lens,
            kv_indptr,
            starts,
            out,
            req_to_token.stride(0),
            RANK=rank,
            P=layout.dcp_size,
            B=layout.block_size,
            TILE=tile,
        )
    return out


def build_kv_indices_torch(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    local_lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    layout: DcpLayout,
    rank: int,
    out: torch.Tensor,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Torch twin of :func:`build_kv_indices`.  Reads lengths on the host."""
    for b, pool_index in enumerate(req_pool_indices.tolist()):
        num_rows, begin = int(local_lens[b]), int(kv_indptr[b])
        first_index = 0 if starts is None else layout.local_len(int(starts[b]), rank)
        positions = layout.position(rank, first_index + torch.arange(num_rows, device=req_to_token.device))
        out[begin : begin + num_rows] = layout.row(req_to_token[pool_index, positions])
    return out


def _check(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    local_lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    layout: DcpLayout,
    rank: int,
    out: torch.Tensor,
    starts: torch.Tensor | None,
) -> None:
    launch.check_tensor("req_to_token", req_to_token, (torch.int32,), ndim=2)
    launch.check_tensor("req_pool_indices", req_pool_indices, launch.INTEGERS)
    num_requests = req_pool_indices.shape[0]
    launch.check_per_request("local_lens", local_lens, num_requests)
    launch.check_per_request("kv_indptr", kv_indptr, num_requests)
    if starts is not None:
        launch.check_per_request("starts", starts, num_requests)
    launch.check_tensor("out", out, (torch.int64,))
    launch.check_rank(layout, rank)
