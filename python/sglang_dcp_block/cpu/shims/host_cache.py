"""HiCache's host tier for MLA: what moves KV rows between the device's pool and host memory, in torch.

The pools, the radix tree, the controller and its index arithmetic are SGLang's own; torch's own CPU streams and events
stand for the device's.  Row numbers select what is copied, as in the kernels of ``sgl_kernel.kvcacheio``: rows of
``item_size`` bytes, or, between a layer and a page-first host page, the page that the first of each ``page_size`` row
numbers names.  Arguments come by name, as SGLang gives them.  A row number that a kernel would skip, or read past a
buffer with, is an error here where it can be seen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from sglang_dcp_block.cpu.shims.target import replace_function, shadow_global
from sglang_dcp_block.cpu.shims.torch_on_cpu import TorchOnCpu

POOLS = "sglang.srt.mem_cache.pool_host"


def register_nothing(buffer: torch.Tensor, registration_granularity_bytes: int | None = None) -> None:
    """Pinning: all memory is a CPU's."""


def _check(src_indices: torch.Tensor, dst_indices: torch.Tensor, unit: int = 1) -> None:
    """Row numbers come in pairs, as int64, none negative, in whole pages of ``unit``."""
    for name, indices in (("source", src_indices), ("destination", dst_indices)):
        if indices.dtype != torch.int64:
            raise ValueError(f"{name} rows: expected int64, got {indices.dtype}")
        if indices.numel() and int(indices.min()) < 0:
            raise ValueError(f"{name} rows: expected none below 0, got {int(indices.min())}")
    if src_indices.shape != dst_indices.shape or src_indices.numel() % unit:
        raise ValueError(
            f"expected as many source as destination rows, in pages of {unit}, "
            f"got {src_indices.numel()} and {dst_indices.numel()}"
        )


def _bytes(buffer: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """A contiguous buffer as ``[rows, row_bytes] uint8``."""
    return buffer.view(-1).view(torch.uint8).view(-1, row_bytes)


def _layer(pointer: int, indices: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """The memory at a layer's address as ``[rows, row_bytes] uint8``, as far as the largest row number reaches."""
    rows = int(indices.max()) + 1
    memory = (ctypes.c_uint8 * (rows * row_bytes)).from_address(pointer)
    return torch.frombuffer(memory, dtype=torch.uint8).view(rows, row_bytes)


def one_layer(
    *, src: torch.Tensor, src_indices: torch.Tensor, dst: torch.Tensor, dst_indices: torch.Tensor, item_size: int
) -> None:
    """``transfer_kv_per_layer_mla``: rows of one layer to rows of one layer."""
    _check(src_indices, dst_indices)
    _bytes(dst, item_size)[dst_indices] = _bytes(src, item_size)[src_indices]


def one_layer_of_pages(
    *,
    src: torch.Tensor,
    src_indices: torch.Tensor,
    src_layout_dim: int,
    dst: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    layer_id: int,
) -> None:
    """``transfer_kv_per_layer_mla_pf_lf``: rows of all layers (``src_layout_dim`` bytes each) to rows of one layer."""
    _check(src_indices, dst_indices)
    part = slice(layer_id * item_size, (layer_id + 1) * item_size)
    _bytes(dst, item_size)[dst_indices] = _bytes(src, src_layout_dim)[src_indices, part]


def all_layers(
    *,
    src_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_layers: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
) -> None:
    """``transfer_kv_all_layer_mla``: rows of each layer to rows of each layer; layers are given by address."""
    _check(src_indices, dst_indices)
    if not src_indices.numel():
        return
    for src, dst in zip(_addresses(src_layers, num_layers), _addresses(dst_layers, num_layers), strict=True):
        _layer(dst, dst_indices, item_size)[dst_indices] = _layer(src, src_indices, item_size)[src_indices]


def all_layers_to_pages(
    *,
    src_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst: torch.Tensor,
    dst_indices: torch.Tensor,
    dst_layout_dim: int,
    item_size: int,
    num_layers: int,
) -> None:
    """``transfer_kv_all_layer_mla_lf_pf``: rows of each layer, by address, to rows of all layers."""
    _check(src_indices, dst_indices)
    if not src_indices.numel():
        return
    rows = _bytes(dst, dst_layout_dim)
    for number, src in enumerate(_addresses(src_layers, num_layers)):
        part = slice(number * item_size, (number + 1) * item_size)
        rows[dst_indices, part] = _layer(src, src_indices, item_size)[src_indices]


def _addresses(layers: torch.Tensor, num_layers: int) -> list[int]:
    addresses: list[int] = layers.tolist()
    if len(addresses) != num_layers:
        raise ValueError(f"expected the addresses of {num_layers} layers, got {len(addresses)}")
    return addresses


def direct(
    *,
    src_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_layers: Sequence[torch.Tensor],
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """``transfer_kv_direct``: rows of each layer to rows of each layer; layers are tensors, also strided ones."""
    _check(src_indices, dst_indices, page_size)
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def all_layers_direct_to_pages(
    *,
    src_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_ptrs: Sequence[torch.Tensor],
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """``transfer_kv_all_layer_direct_lf_pf``: a run of rows of each layer to a host page ``[layer, row, ...]``."""
    _check(src_indices, dst_indices, page_size)
    (pages,) = dst_ptrs
    for row, page in _pages(src_indices, dst_indices, page_size):
        for number, layer in enumerate(src_ptrs):
            pages[page, number] = layer[row : row + page_size]


def one_layer_direct_of_pages(
    *,
    src_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_ptrs: Sequence[torch.Tensor],
    dst_indices: torch.Tensor,
    page_size: int,
    layer_id: int,
) -> None:
    """``transfer_kv_per_layer_direct_pf_lf``: one layer of a host page to a run of rows."""
    _check(src_indices, dst_indices, page_size)
    (pages,), (layer,) = src_ptrs, dst_ptrs
    for row, page in _pages(dst_indices, src_indices, page_size):
        layer[row : row + page_size] = pages[page, layer_id]


def _pages(device_rows: torch.Tensor, host_rows: torch.Tensor, page_size: int) -> list[tuple[int, int]]:
    """First device row and number of the host page, page by page."""
    pages = host_rows[::page_size] // page_size
    return list(zip(device_rows[::page_size].tolist(), pages.tolist(), strict=True))


LOAD, BACK_UP, BACK_UP_LAYER = (
    f"MLATokenToKVPoolHost.{method}"
    for method in ("load_to_device_per_layer", "backup_from_device_all_layer", "_backup_from_device_per_layer")
)
TRANSFERS = {
    "transfer_kv_per_layer_mla": (one_layer, (LOAD, BACK_UP_LAYER)),
    "transfer_kv_per_layer_mla_pf_lf": (one_layer_of_pages, (LOAD,)),
    "transfer_kv_all_layer_mla": (all_layers, (BACK_UP,)),
    "transfer_kv_all_layer_mla_lf_pf": (all_layers_to_pages, (BACK_UP,)),
    "transfer_kv_direct": (direct, (LOAD, BACK_UP, BACK_UP_LAYER)),
    "transfer_kv_all_layer_direct_lf_pf": (all_layers_direct_to_pages, (BACK_UP,)),
    "transfer_kv_per_layer_direct_pf_lf": (one_layer_direct_of_pages, (LOAD,)),
}
"""Kernel -> its stand-in, and the methods of the MLA host pool that call it."""


def install() -> None:
    """Give the MLA host pool its transfers, and host memory that nothing pins."""
    for name, (stand_in, callers) in TRANSFERS.items():
        shadow_global(f"{POOLS}.mla", name, stand_in, readers=callers)
    # A page that storage is read into asks for pinned memory.
    shadow_global(f"{POOLS}.mla", "torch", TorchOnCpu(), readers=("MLATokenToKVPoolHost.get_dummy_flat_data_page",))
    replace_function(f"{POOLS}.common:_cuda_host_register", register_nothing)
    # SGLang leaves 10 GiB to the rest of the machine; a laptop may not have as much.
    shadow_global(f"{POOLS}.base", "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0, readers=("host_memory_budget_bytes",))
