"""Virtual pages with SGLang's own allocator and its own pool: none reaches beyond a rank's buffer, none is cut short."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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


@pytest.fixture
def allocator_of(monkeypatch: pytest.MonkeyPatch):
    """allocator_of(page_size, dcp_size, rows) -> the allocator that SGLang makes for a server with these sizes."""
    from sglang.srt.mem_cache import allocation_sizing, kv_cache_configurator

    def make(page_size: int, dcp_size: int, rows: int) -> Any:
        bags = {
            "get_schedule": SimpleNamespace(page_size=page_size),
            "get_parallel": SimpleNamespace(attn_dcp_size=dcp_size, dcp_enabled=dcp_size > 1),
            "get_disagg": SimpleNamespace(disaggregation_mode="null"),
            "get_memory": SimpleNamespace(enable_hisparse=False),
        }
        for name, bag in bags.items():
            monkeypatch.setattr(kv_cache_configurator, name, lambda bag=bag: bag)
            monkeypatch.setattr(allocation_sizing, name, lambda bag=bag: bag, raising=False)
        asking = SimpleNamespace(is_hybrid_swa=False, kv_shard_size=1, kv_cache_dtype=torch.float32, device="cpu")
        return kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool_allocator(
            asking,
            sizes=SimpleNamespace(max_total_num_tokens=rows),
            token_to_kv_pool=None,
            is_dsv4_model=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
        )

    return make


@pytest.mark.parametrize(("page", "dcp_size"), [(16, 2), (4, 8), (1, 4), (16, 1)])
def test_decoding_takes_a_virtual_page_when_one_is_full(allocator_of, page: int, dcp_size: int) -> None:
    """page * dcp_size tokens fill a virtual page; as many more take one more of them, not one a physical page."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size

    virtual, rows = page * dcp_size, 8 * page
    allocator = allocator_of(page, dcp_size, rows)
    assert allocator.available_size() == rows * dcp_size
    assert get_alloc_page_size() == virtual, "what the scheduler reserves is counted in other pages"

    def promised(length: int) -> int:
        """Tokens that the scheduler keeps free for the next step of a request of this length."""
        request = SimpleNamespace(kv=SimpleNamespace(kv_committed_len=length), beam_group=None)
        batch = SimpleNamespace(
            token_to_kv_pool_allocator=allocator, reqs=[request], spec_algorithm=SimpleNamespace(is_none=lambda: True)
        )
        return ScheduleBatch.new_tokens_required_next_decode(batch)

    slots = allocator.alloc(virtual)
    assert slots is not None
    for length in range(virtual, 2 * virtual):
        free = allocator.available_size()
        lengths = torch.tensor([length + 1])
        slots = torch.cat([slots, allocator.alloc_decode(lengths, lengths, slots[-1:])])
        assert free - allocator.available_size() == promised(length) == (virtual if length == virtual else 0)
    assert slots.unique().numel() == 2 * virtual
    allocator.free(slots)
    assert allocator.available_size() == rows * dcp_size
