"""Virtual pages with SGLang's own allocator and its own pool: none reaches beyond a rank's buffer, none is cut short."""

from __future__ import annotations

import pytest
import torch

from sglang_dcp_block.dcp.layout import DcpLayout


@pytest.mark.parametrize(("dcp_size", "page", "rows"), [(2, 8, 64), (8, 64, 640), (4, 16, 100), (3, 6, 47)])
def test_every_slot_has_a_row_in_the_pool(dcp_size: int, page: int, rows: int) -> None:
    """All slots together fill whole pages of each rank's buffer; the highest ones are written and read back."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = MHATokenToKVPool(
        size=rows, page_size=page, dtype=torch.float32, head_num=1, head_dim=4, layer_num=1, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    allocator = PagedTokenToKVPoolAllocator(
        rows * dcp_size, page_size=page * dcp_size, dtype=torch.float32, device="cpu", kvcache=pool, need_sort=False
    )
    slots = allocator.alloc(allocator.available_size())
    assert slots is not None
    buffer = pool.k_buffer[0]
    for block in (b for b in range(1, page + 1) if page % b == 0):
        layout = DcpLayout(dcp_size, block)
        placed = layout.slot_to_placed(slots)
        owners, pool_rows = placed % dcp_size, placed // dcp_size
        assert int(pool_rows.max()) < buffer.shape[0]
        assert int(pool_rows.min()) >= page, "a live slot lies in the sink"
        for rank in range(dcp_size):
            own = pool_rows[owners == rank]
            assert own.unique().numel() == own.numel() == len(slots) // dcp_size
            buffer[own] = float(rank)  # raises where a row lies outside
            assert bool((buffer[own] == rank).all())


def test_decoding_takes_a_virtual_page_when_one_is_full() -> None:
    """32 tokens fill a virtual page of two physical ones of 16; the next 32 take one more, not one a physical page."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    allocator = PagedTokenToKVPoolAllocator(
        256, page_size=32, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False
    )
    slots = allocator.alloc(32)
    assert slots is not None
    free = allocator.available_size()
    for length in range(33, 65):
        lengths = torch.tensor([length])
        slots = torch.cat([slots, allocator.alloc_decode(lengths, lengths, slots[-1:])])
        assert free - allocator.available_size() == 32
    assert slots.unique().numel() == 64
    allocator.free(slots)
    assert allocator.available_size() == 256
