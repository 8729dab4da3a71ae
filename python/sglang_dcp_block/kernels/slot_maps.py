"""Maps of single slots: to placed slots at the write door, and to rows where KV is read.

Upstream's write kernels take the owner as ``slot % P`` and the row as ``slot // P``.  A placed slot,
``row(v) * P + owner(v)``, gives them the block layout's owner and row, so that they stay as they are.
"""

# Triton types device code; mypy cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.kernels import launch
from sglang_dcp_block.kernels.device import local_index, placed_slot


# Slots come as windows of any length and offset: specialising on these would recompile in the middle of serving.
@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slots_ptr", "out_ptr"])
def _map_slots_kernel(
    slots_ptr,
    out_ptr,
    num_slots,
    slots_stride,
    out_stride,
    P: tl.constexpr,
    B: tl.constexpr,
    TO_ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = index < num_slots
    slot = tl.load(slots_ptr + index * slots_stride, mask=mask, other=0)
    if TO_ROWS:
        mapped = local_index(slot, P, B)
    else:
        mapped = placed_slot(slot, P, B)
    tl.store(out_ptr + index * out_stride, tl.where(slot < 0, -1, mapped), mask=mask)


def place_slots(
    slots: torch.Tensor, layout: DcpLayout, out: torch.Tensor | None = None, *, tile: int = launch.TILE
) -> torch.Tensor:
    """Slots to the placed slots that upstream's write kernels get.

    Rule: ``placed(v) = row(v) * P + owner(v)``; below 0 is padding and becomes -1; slot 0 (the reserved padding row)
    stays 0; with ``block_size`` 1 or ``dcp_size`` 1 nothing moves.  ``placed`` is a bijection on every group of
    ``P * B`` slots that starts at a multiple of ``P * B``, so the group that holds the largest slot must fit the dtype:
    true for every pool, which is made of whole virtual pages.

    Args:
        slots: ``[num_slots] int32 or int64``, widened slots, any stride.
        layout: the block layout.
        out: ``[num_slots]`` of the same dtype and device, any stride, where the result goes; may be ``slots`` itself,
            else must not overlap it.  A fresh dense tensor if None.
        tile: slots a program; a power of 2.  For tests.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError: slots are no int32 or int64 vector, or ``out`` does not match.

    One launch (none for no slots), no host sync; CUDA-graph safe with an ``out`` of stable address.
    Law: ``placed % P == owner`` and ``placed // P == row`` for every slot.

    >>> place_slots(torch.arange(8), DcpLayout(dcp_size=2, block_size=2)).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    if not launch.can_launch(slots):
        return place_slots_torch(slots, layout, out)
    return _launch(slots, layout, _checked_out(slots, out), to_rows=False, tile=tile)


def slot_rows(
    slots: torch.Tensor, layout: DcpLayout, out: torch.Tensor | None = None, *, tile: int = launch.TILE
) -> torch.Tensor:
    """Slots to the rows that hold them on their owners.

    Rule: ``row(v) = (v // (P*B)) * B + v % B``; below 0 is padding and becomes -1; slot 0 stays 0.

    Args, Returns, Raises: as of :func:`place_slots`; no limit on the largest slot.

    One launch (none for no slots), no host sync; CUDA-graph safe with an ``out`` of stable address.
    Law: equals ``place_slots(slots) // P``.

    >>> slot_rows(torch.arange(8), DcpLayout(dcp_size=2, block_size=2)).tolist()
    [0, 1, 0, 1, 2, 3, 2, 3]
    """
    if not launch.can_launch(slots):
        return slot_rows_torch(slots, layout, out)
    return _launch(slots, layout, _checked_out(slots, out), to_rows=True, tile=tile)


def _launch(slots: torch.Tensor, layout: DcpLayout, out: torch.Tensor, *, to_rows: bool, tile: int) -> torch.Tensor:
    num_slots = slots.shape[0]
    if num_slots > 0:
        _map_slots_kernel[(triton.cdiv(num_slots, tile),)](
            slots,
            out,
            num_slots,
            slots.stride(0),
            out.stride(0),
            P=layout.dcp_size,
            B=layout.block_size,
            TO_ROWS=to_rows,
            TILE=tile,
        )
    return out


def place_slots_torch(slots: torch.Tensor, layout: DcpLayout, out: torch.Tensor | None = None) -> torch.Tensor:
    """Torch twin of :func:`place_slots`."""
    out = _checked_out(slots, out)
    return out.copy_(layout.slot_to_placed(slots))


def slot_rows_torch(slots: torch.Tensor, layout: DcpLayout, out: torch.Tensor | None = None) -> torch.Tensor:
    """Torch twin of :func:`slot_rows`."""
    out = _checked_out(slots, out)
    return out.copy_(layout.row(slots))


def _checked_out(slots: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if slots.dtype not in launch.INTEGERS:
        raise TypeError(f"slots: expected int32 or int64, got {slots.dtype}")
    if slots.ndim != 1:
        raise ValueError(f"slots: expected 1 dimension, got shape {tuple(slots.shape)}")
    if out is None:
        return torch.empty_like(slots, memory_format=torch.contiguous_format)
    if out.dtype != slots.dtype:
        raise TypeError(f"out: expected the slots' dtype {slots.dtype}, got {out.dtype}")
    if out.shape != slots.shape or out.device != slots.device:
        raise ValueError(
            f"out: expected shape {tuple(slots.shape)} on {slots.device}, got {tuple(out.shape)} on {out.device}"
        )
    return out
