"""The stand-ins for HiCache's transfer kernels, and for torch with an accelerator, against loops over rows."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from sglang_dcp_block.cpu.shims import host_cache
from sglang_dcp_block.cpu.shims.torch_on_cpu import TorchOnCpu


class TestHostCache:
    """Each transfer against a loop over rows; device rows of a layer, host memory by row and by page."""

    LAYERS, PAGE, WIDTH = 3, 4, 2
    HOST = torch.tensor([*range(20, 24), *range(4, 8)])  # rows of the host's pages 5 and 1
    DEVICE = torch.tensor([*range(8, 12), *range(16, 20)])

    @pytest.fixture
    def device(self) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.randn(24, 1, self.WIDTH) for _ in range(self.LAYERS)]

    def addresses(self, layers: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)

    def moved(self, device: list[torch.Tensor]) -> torch.Tensor:
        """``[layer, host row, 1, width]`` after all layers went to the host."""
        host = torch.zeros(self.LAYERS, 28, 1, self.WIDTH)
        for layer, rows in enumerate(device):
            for host_row, row in zip(self.HOST.tolist(), self.DEVICE.tolist(), strict=True):
                host[layer, host_row] = rows[row]
        return host

    def assert_back(self, back: torch.Tensor, layer: torch.Tensor) -> None:
        assert torch.equal(back[self.DEVICE], layer[self.DEVICE])
        assert back.count_nonzero() == self.DEVICE.numel() * self.WIDTH, "something else was written"

    # From the device to the host, and back.
    DOWN: ClassVar[dict[str, torch.Tensor]] = {"src_indices": DEVICE, "dst_indices": HOST}
    UP: ClassVar[dict[str, torch.Tensor]] = {"src_indices": HOST, "dst_indices": DEVICE}
    ITEM = WIDTH * 4

    def test_layer_first(self, device: list[torch.Tensor]) -> None:
        host, direct = torch.zeros(2, self.LAYERS, 28, 1, self.WIDTH)
        tables = {"src_layers": self.addresses(device), "dst_layers": self.addresses([*host])}
        host_cache.all_layers(**tables, **self.DOWN, item_size=self.ITEM, num_layers=self.LAYERS)
        host_cache.direct(src_layers=device, dst_layers=[*direct], **self.DOWN, page_size=self.PAGE)
        assert torch.equal(host, self.moved(device))
        assert torch.equal(direct, host)
        for layer in range(self.LAYERS):
            back, same = torch.zeros(2, 24, 1, self.WIDTH)
            host_cache.one_layer(src=host[layer], dst=back, **self.UP, item_size=self.ITEM)
            host_cache.direct(src_layers=[host[layer]], dst_layers=[same], **self.UP, page_size=self.PAGE)
            self.assert_back(back, device[layer])
            self.assert_back(same, device[layer])

    def test_page_first(self, device: list[torch.Tensor]) -> None:
        host, row = torch.zeros(28, self.LAYERS, 1, self.WIDTH), self.ITEM * self.LAYERS
        host_cache.all_layers_to_pages(
            src_layers=self.addresses(device), dst=host, **self.DOWN, item_size=self.ITEM, dst_layout_dim=row,
            num_layers=self.LAYERS,
        )  # fmt: skip
        assert torch.equal(host.transpose(0, 1), self.moved(device))
        for layer in range(self.LAYERS):
            back = torch.zeros(24, 1, self.WIDTH)
            sizes = {"item_size": self.ITEM, "src_layout_dim": row}
            host_cache.one_layer_of_pages(src=host, dst=back, **self.UP, layer_id=layer, **sizes)
            self.assert_back(back, device[layer])

    def test_page_first_direct(self, device: list[torch.Tensor]) -> None:
        """Pages are moved whole, by the first of their rows: what the others say is not read."""
        host = torch.zeros(7, self.LAYERS, self.PAGE, 1, self.WIDTH)
        rows = self.DEVICE.clone()
        rows[1 :: self.PAGE] = 0
        host_cache.all_layers_direct_to_pages(
            src_ptrs=device, dst_ptrs=[host], src_indices=rows, dst_indices=self.HOST, page_size=self.PAGE
        )
        assert torch.equal(host.transpose(0, 1).reshape(self.LAYERS, 28, 1, self.WIDTH), self.moved(device))
        for layer in range(self.LAYERS):
            back = torch.zeros(24, 1, self.WIDTH)
            ways = {"src_ptrs": [host], "dst_ptrs": [back], "src_indices": self.HOST, "dst_indices": rows}
            host_cache.one_layer_direct_of_pages(**ways, layer_id=layer, page_size=self.PAGE)
            self.assert_back(back, device[layer])

    def test_nothing_to_move(self, device: list[torch.Tensor]) -> None:
        none, table = self.HOST[:0], self.addresses(device)
        rows = {"src_indices": none, "dst_indices": none, "item_size": 8, "num_layers": self.LAYERS}
        host_cache.all_layers(src_layers=table, dst_layers=table, **rows)
        host_cache.all_layers_to_pages(src_layers=table, dst=device[0], dst_layout_dim=8, **rows)

    @pytest.mark.parametrize(
        ("src", "dst", "text"),
        [
            (HOST.int(), DEVICE, "source rows: expected int64, got torch.int32"),
            (HOST, DEVICE - 9, "destination rows: expected none below 0, got -1"),
            (HOST[:4], DEVICE, "expected as many source as destination rows, in pages of 4, got 4 and 8"),
            (HOST[:6], DEVICE[:6], "expected as many source as destination rows, in pages of 4, got 6 and 6"),
        ],
    )
    def test_rows_that_a_kernel_would_not_take(self, src: torch.Tensor, dst: torch.Tensor, text: str) -> None:
        layers = [torch.zeros(30, 1, self.WIDTH)]
        rows = {"src_indices": src, "dst_indices": dst}
        with pytest.raises(ValueError, match=text):
            host_cache.direct(src_layers=layers, dst_layers=layers, **rows, page_size=self.PAGE)

    def test_the_number_of_layers_is_that_of_the_table(self, device: list[torch.Tensor]) -> None:
        table = self.addresses(device)
        with pytest.raises(ValueError, match="expected the addresses of 4 layers, got 3"):
            host_cache.all_layers(src_layers=table, dst_layers=table, **self.DOWN, item_size=8, num_layers=4)


def test_torch_on_cpu() -> None:
    stand_in = TorchOnCpu()
    assert stand_in.empty(3, dtype=torch.int32, device="cuda").device.type == "cpu"
    assert not stand_in.zeros((2,), device="cpu", pin_memory=True).is_pinned()
    assert stand_in.empty((2,), device="meta").device.type == "meta"
    assert stand_in.cumsum is torch.cumsum
    event = stand_in.cuda.Event()
    event.record(stand_in.cuda.current_stream())
    event.synchronize()
    assert event.query()
