"""The last virtual page stays inside every rank's pool, with SGLang's own allocator."""

from __future__ import annotations

import pytest
import torch

from sglang_dcp_block.dcp.layout import DcpLayout


@pytest.mark.parametrize(("dcp_size", "page", "rows"), [(2, 8, 64), (8, 64, 640), (4, 16, 100), (3, 6, 47)])
def test_every_slot_has_a_row_in_the_pool(dcp_size: int, page: int, rows: int) -> None:
    """A rank's pool has ``rows`` rows and one page more for the sink; all slots together fill whole pages of it."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    allocator = PagedTokenToKVPoolAllocator(
        rows * dcp_size, page_size=page * dcp_size, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False
    )
    slots = allocator.alloc(allocator.available_size())
    assert slots is not None
    for block in (b for b in range(1, page + 1) if page % b == 0):
        layout = DcpLayout(dcp_size, block)
        placed = layout.slot_to_placed(slots)
        owners, pool_rows = placed % dcp_size, placed // dcp_size
        assert int(pool_rows.max()) < rows + page
        assert int(pool_rows.min()) >= page, "a live slot lies in the sink"
        for rank in range(dcp_size):
            own = pool_rows[owners == rank]
            assert own.unique().numel() == own.numel() == len(slots) // dcp_size
