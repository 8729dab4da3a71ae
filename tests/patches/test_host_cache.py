"""HiCache on SGLang's own pools and storage: rows that come back from the host, and names that carry the layout."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import reference
from hooking import hook, hooked
from sglang_dcp_block.config import BlockSizeError
from sglang_dcp_block.cpu.shims.host_cache import TRANSFERS
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.patches import active, host_cache, mla_gather
from sglang_dcp_block.patches.host_points import HOST_POINTS
from sglang_dcp_block.support import HOST_TRANSFERS

mla = pytest.importorskip("sglang.srt.mem_cache.pool_host.mla")
cache_controller = pytest.importorskip("sglang.srt.managers.cache_controller")

PAGE, LAYERS, WIDTH, NUM_PAGES = 8, 2, 6, 7
# Virtual pages, in the order of a prompt's tokens: on the device, on the host, and on the device later.
BEFORE, HOST, LATER = (3, 1, 6), (4, 0, 2), (2, 5, 4)


def slots_of(pages: tuple[int, ...], virtual_page: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * virtual_page, (page + 1) * virtual_page) for page in pages])


def rows_of(slots: torch.Tensor, rank: int, size: int, block: int) -> dict[int, int]:
    """Position in the prompt -> row, of what ``rank`` holds; found by dealing, a virtual page at a time."""
    page = PAGE * size
    rows = {}
    for position, slot in enumerate(slots.tolist()):
        if reference.owner(slot % page, size, block) == rank:
            rows[position] = slot // page * PAGE + reference.local_index(slot % page, size, block)
    return rows


def pools(rank: int, size: int, layout: str) -> tuple[Any, Any]:
    """SGLang's MLA pool of one rank, and its mirror in host memory."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    rows = NUM_PAGES * PAGE
    device = MLATokenToKVPool(
        size=rows, page_size=PAGE, dtype=torch.float32, kv_lora_rank=WIDTH - 2, qk_rope_head_dim=2, layer_num=LAYERS,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    host = mla.MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info, 1.0, 0, PAGE * size, layout, pin_memory=False, dcp_size=size,
        dcp_rank=rank, device_capacity_tokens=rows, start_layer=0, end_layer=LAYERS - 1, target_layer_num=LAYERS,
    )  # fmt: skip
    return device, host


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU environment's stand-ins, for as long as the test runs."""
    import sglang.srt.mem_cache.pool_host.base as base

    for name, (stand_in, _) in TRANSFERS.items():
        monkeypatch.setattr(mla, name, stand_in, raising=False)
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)


@pytest.mark.parametrize(("io_backend", "layout"), HOST_TRANSFERS)
@pytest.mark.parametrize(("size", "block"), [(2, 8), (2, 4), (2, 2), (2, 1), (4, 8), (3, 4)])
def test_rows_return_where_dealing_puts_them(transfers, io_backend: str, layout: str, size: int, block: int) -> None:
    """Every rank writes a prompt's pages to the host and loads them into other pages of the device."""
    before, after = slots_of(BEFORE, PAGE * size), slots_of(LATER, PAGE * size)
    controller = SimpleNamespace(io_backend=io_backend, device="cpu")
    with hooked(DcpLayout(size, block), lambda p: p.target.endswith("maybe_dcp_kernel_indices")):
        held = []
        for rank in range(size):
            device, host = pools(rank, size, layout)
            controller.mem_pool_host = host
            assert host.logical_page_size == PAGE * size
            on_host = slots_of(HOST, host.logical_page_size)
            for layer, buffer in enumerate(device.kv_buffer):
                for position, row in rows_of(before, rank, size, block).items():
                    buffer[row] = position + 1000.0 * (layer + 1)
            move = cache_controller.HiCacheController.move_indices
            moved_host, moved = move(controller, on_host, before)
            host.backup_from_device_all_layer(None, moved_host, moved, io_backend)
            for layer, buffer in enumerate(device.kv_buffer):
                buffer.zero_()
                moved_host, moved = move(controller, on_host, after)
                host.load_to_device_per_layer(None, moved_host, moved, layer, io_backend)
                wanted = torch.zeros_like(buffer)
                for position, row in rows_of(after, rank, size, block).items():
                    wanted[row] = position + 1000.0 * (layer + 1)
                assert torch.equal(buffer, wanted)
            held += rows_of(after, rank, size, block)
    assert sorted(held) == list(range(len(after))), "a token on no rank, or on two"


@pytest.mark.parametrize("block", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_whole_virtual_pages_are_the_rows_that_stock_takes(
    monkeypatch: pytest.MonkeyPatch, size: int, block: int
) -> None:
    """So the kernels that move them on a GPU get the arguments that they get from stock SGLang, in the same order."""
    from sglang.srt.layers.dcp.layout import maybe_dcp_kernel_indices

    monkeypatch.setattr(active, "_layout", DcpLayout(size, block))
    slots = slots_of((5, 0, 2, 1), PAGE * size)
    for rank in range(size):
        stock = maybe_dcp_kernel_indices(slots, size, rank)
        assert torch.equal(mla_gather.rows_of_run(slots, size, rank), stock)


class TestStorage:
    """The same tokens at other block sizes have other names, and no page is shared."""

    KEY = "0123abcd"

    @pytest.fixture
    def config(self, monkeypatch: pytest.MonkeyPatch):
        """config(block, rank) -> what SGLang's controller tells a storage backend."""
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        hook(monkeypatch, HOST_POINTS)
        monkeypatch.setattr(cache_controller, "is_dp_attention_enabled", lambda: False)

        def make(block: int, rank: int = 0, model: str | None = "org/model") -> Any:
            parallel = {"tp_rank": rank, "tp_size": 2, "pp_rank": 0, "pp_size": 1}
            state = SimpleNamespace(**parallel, attn_dcp_size=2, attn_dcp_rank=rank)
            monkeypatch.setattr(cache_controller, "get_parallel", lambda: state)
            monkeypatch.setattr(active, "_layout", DcpLayout(2, block))
            controller = SimpleNamespace(
                mem_pool_device=object.__new__(MLATokenToKVPool),
                mem_pool_host=SimpleNamespace(layout="page_first"),
                storage_host_pool=SimpleNamespace(storage_format_tag=None),
                enable_storage_metrics=False,
                page_size=2 * PAGE,
                get_attn_cp_rank_and_size=lambda: (0, 1),
            )
            return cache_controller.HiCacheController._generate_storage_config(controller, model)

        return make

    def test_no_page_is_shared_between_layouts(self, config, tmp_path: Path) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        stores = {block: HiCacheFile(config(block), str(tmp_path)) for block in (1, 2, 4, 8)}
        for block, store in stores.items():
            assert store.set(self.KEY, torch.full((4,), float(block)))
        assert len(list(tmp_path.glob("*.bin"))) == len(stores)
        for block, store in stores.items():
            page = store.get(self.KEY, torch.zeros(4))
            assert page is not None
            assert page.unique().tolist() == [block]
        (tmp_path / f"{stores[8]._get_suffixed_key(self.KEY)}.bin").unlink()
        assert [block for block, store in stores.items() if store.exists(self.KEY)] == [1, 2, 4]

    def test_a_server_of_the_same_layout_finds_its_rank_s_pages(self, config, tmp_path: Path) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        assert HiCacheFile(config(8), str(tmp_path)).set(self.KEY, torch.zeros(4))
        assert HiCacheFile(config(8), str(tmp_path)).exists(self.KEY)
        assert not HiCacheFile(config(8, rank=1), str(tmp_path)).exists(self.KEY)

    def test_names(self, config) -> None:
        assert config(8).model_name == "org/model-dcp-block-8"
        assert config(8, model=None).model_name == "dcp-block-8"
        assert config(1).model_name == "org/model", "blocks of one token are stock's own pages"
        assert config(1, model=None).model_name is None

    def test_storage_that_nobody_tried_is_not_attached(self, config) -> None:
        """Also when a running server is asked to: SGLang answers with the reason then."""
        config(8)
        attached: list[tuple[Any, ...]] = []
        attach = host_cache.attach_tried_storage
        with pytest.raises(
            BlockSizeError, match=re.escape("expected file as HiCache storage with DCP blocks, got mooncake.")
        ):
            attach(lambda *args, **kwargs: attached.append(args), None, "mooncake")
        with pytest.raises(BlockSizeError, match="got nixl"):
            cache_controller.HiCacheController.attach_storage_backend(None, storage_backend="nixl")
        attach(lambda *args, **kwargs: attached.append((*args, kwargs)), "controller", "file", 256, model_name="m")
        assert attached == [("controller", "file", 256, {"model_name": "m"})]
