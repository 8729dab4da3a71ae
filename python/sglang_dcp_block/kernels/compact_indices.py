"""A stream of all slots of a batch to the slots that this rank holds.

    kv_indices   [ slots of request 0, positions 0 .. | slots of request 1 | ... ]     all ranks'
                   ^ kv_indptr[0]                       ^ kv_indptr[1]
    out          [ this rank's of request 0 | ... ]                                    in the same order
                   ^ local_indptr[0]          ^ local_indptr[1]

What the decode planning of upstream's MLA backends needs.
"""

# Triton types device code; mypy cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.kernels import launch
from sglang_dcp_block.kernels.device import position_of


# Grid: (requests, programs a request); a request's programs stride over its tiles.  All addresses are 64-bit.
@triton.jit
def _compact_kv_indices_kernel(
    kv_indices_ptr,
    kv_indptr_ptr,
    local_lens_ptr,
    local_indptr_ptr,
    out_ptr,
    RANK: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    num_slots = tl.load(local_lens_ptr + request).to(tl.int64)
    source_ptr = kv_indices_ptr + tl.load(kv_indptr_ptr + request).to(tl.int64)
    target_ptr = out_ptr + tl.load(local_indptr_ptr + request).to(tl.int64)

    first = tl.program_id(1).to(tl.int64) * TILE
    step = tl.num_programs(1).to(tl.int64) * TILE
    for tile_start in range(first, num_slots, step):
        j = tile_start + tl.arange(0, TILE)
        mask = j < num_slots
        slot = tl.load(source_ptr + position_of(j, RANK, P, B), mask=mask)
        tl.store(target_ptr + j, slot, mask=mask)


def compact_kv_indices(
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    local_lens: torch.Tensor,
    local_indptr: torch.Tensor,
    layout: DcpLayout,
    rank: int,
    out: torch.Tensor,
    *,
    max_local_len: int | None = None,
    tile: int = launch.TILE,
    max_programs: int = launch.MAX_PROGRAMS,
) -> torch.Tensor:
    """All slots of a batch to this rank's, in position order, still widened.

    Rule: for every request b and ``0 <= j < local_lens[b]``,
    ``out[local_indptr[b] + j] = kv_indices[kv_indptr[b] + position(rank, j)]``.  The values pass unchanged, and the
    rest of ``out`` is not touched.

    Args:
        kv_indices: ``[num_slots] int32 or int64``, dense: each request's slots from position 0 on.
        kv_indptr: ``[>= num_requests] int32 or int64``, where each request begins in ``kv_indices``.
        local_lens: ``[num_requests] int32 or int64``, ``layout.local_len`` of each request, in tokens.
        local_indptr: ``[>= num_requests] int32 or int64``, where each request begins in ``out``.
        layout: the block layout.
        rank: this rank, ``0 <= rank < dcp_size``.
        out: ``[>= sum of local_lens]``, dense, dtype of ``kv_indices``, not overlapping it.
        max_local_len: a bound of ``local_lens`` that the host knows, to size the grid; it cannot change the result.
            None: what ``num_slots`` allows, a stable bound for a CUDA graph's buffers.
        tile, max_programs: slots a program handles at a time (a power of 2), programs of the launch.  For tests.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or the rank is not as above.

    One launch (none for no requests), no host sync; the grid follows from shapes and ``max_local_len`` alone.
    Law: over all ranks, ``out`` holds each slot of ``kv_indices`` once; with ``block_size`` 1 it equals the result of
    upstream's kernel.

    >>> lens, indptr, out = torch.tensor([5]), torch.tensor([0]), torch.zeros(5, dtype=torch.int64)
    >>> compact_kv_indices(torch.arange(100, 109), indptr, lens, indptr, DcpLayout(2, 4), 0, out).tolist()
    [100, 101, 102, 103, 108]
    """
    num_requests = local_lens.shape[0]
    _check(kv_indices, kv_indptr, local_lens, local_indptr, layout, rank, out)
    if not launch.can_launch(kv_indices):
        return compact_kv_indices_torch(kv_indices, kv_indptr, local_lens, local_indptr, layout, rank, out)
    if num_requests > 0:
        bound = layout.max_local_len(kv_indices.shape[0]) if max_local_len is None else max_local_len
        programs = launch.programs_per_request(num_requests, bound, tile, max_programs)
        _compact_kv_indices_kernel[(num_requests, programs)](
            kv_indices,
            kv_indptr,
            local_lens,
            local_indptr,
            out,
            RANK=rank,
            P=layout.dcp_size,
            B=layout.block_size,
            TILE=tile,
        )
    return out


def compact_kv_indices_torch(
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    local_lens: torch.Tensor,
    local_indptr: torch.Tensor,
    layout: DcpLayout,
    rank: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Torch twin of :func:`compact_kv_indices`.  Reads lengths on the host."""
    for b, num_slots in enumerate(local_lens.tolist()):
        source, target = int(kv_indptr[b]), int(local_indptr[b])
        positions = layout.position(rank, torch.arange(num_slots, device=kv_indices.device))
        out[target : target + num_slots] = kv_indices[source + positions]
    return out


def _check(
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    local_lens: torch.Tensor,
    local_indptr: torch.Tensor,
    layout: DcpLayout,
    rank: int,
    out: torch.Tensor,
) -> None:
    launch.check_tensor("kv_indices", kv_indices, launch.INTEGERS)
    launch.check_tensor("local_lens", local_lens, launch.INTEGERS)
    num_requests = local_lens.shape[0]
    launch.check_per_request("kv_indptr", kv_indptr, num_requests)
    launch.check_per_request("local_indptr", local_indptr, num_requests)
    launch.check_tensor("out", out, (kv_indices.dtype,))
    launch.check_rank(layout, rank)
