"""Triton attention backend, GQA and MHA: KV writes and the index arrays of decode and extend."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dcp_block.kernels.kv_indices import build_kv_indices
from sglang_dcp_block.patches.active import layout


def plan_kv_indices(
    self: Any,
    req_pool_indices: torch.Tensor,
    lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor | None = None,
    kv_start_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """REPLACE ``TritonAttnBackend._dcp_kv_indices``: this rank's rows of each request, in position order.

    Without a buffer to fill (eager mode), the fresh one is sized from the *global* token count, so that it is empty on
    all ranks or on none: upstream's extend path leaves a collective out where the array is empty, and must not do
    so on one rank alone. Entries past ``kv_indptr[-1]`` are never read.

    Args:
        req_pool_indices: [num_requests] int, rows of ``req_to_token``.
        lens: [num_requests] int, tokens of each request over all ranks.
        kv_indptr: [>= num_requests + 1] int32, filled in place.
        kv_indices: int64 buffer to fill in place (CUDA graph), or None.
        kv_start_idx: [num_requests] int, first position; None means 0.
    Returns:
        (indptr [num_requests + 1], rows, this rank's token count of each request).
    """
    rules = layout()
    num_requests = len(req_pool_indices)
    local_lens = self._dcp_lens(lens, kv_start_idx)
    kv_indptr[1 : num_requests + 1] = torch.cumsum(local_lens, dim=0)
    kv_indptr = kv_indptr[: num_requests + 1]
    if kv_indices is None:
        num_tokens = int(lens.sum().item())  # the one sync that upstream pays here too, for its local count
        at_most = min(num_tokens, num_tokens // rules.dcp_size + num_requests * rules.block_size)
        kv_indices = torch.empty(at_most, dtype=torch.int64, device=self.device)
    build_kv_indices(
        self.req_to_token,
        req_pool_indices,
        local_lens,
        kv_indptr,
        layout=rules,
        rank=self.dcp_rank,
        out=kv_indices,
        starts=kv_start_idx,
    )
    return kv_indptr, kv_indices, local_lens


def write_kv(
    original: Any,
    self: Any,
    forward_batch: Any,
    layer: Any,
    loc_info: Any,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """AROUND ``TritonAttnBackend._set_kv_buffer``: owner and row come from the placed id, not from the position.

    Backends that run without DCP in an armed process (a draft model's) keep upstream's path.
    """
    if self.dcp_size == 1:
        original(self, forward_batch, layer, loc_info, k, v, k_scale, v_scale)
        return
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    placed = forward_batch.out_cache_loc
    rows = KVWriteLoc(placed // self.dcp_size, physical=forward_batch.out_cache_loc_is_physical)
    scales = () if k_scale is None and v_scale is None else (k_scale, v_scale)
    owned = placed % self.dcp_size == self.dcp_rank
    self.token_to_kv_pool.set_kv_buffer(layer, rows, k, v, *scales, dcp_kv_mask=owned)


def no_fused_write(original: Any, forward_batch: Any) -> bool:
    """AROUND ``models.utils.enable_fused_set_kv_buffer``: the fused RoPE-and-write kernel knows no owner rule."""
    return False
