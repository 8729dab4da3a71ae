"""FlashInfer MLA: planning a decode step over this rank's share, and ranks that have none."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dcp_block.kernels.compact_indices import compact_kv_indices
from sglang_dcp_block.kernels.neutralise import neutralise_empty
from sglang_dcp_block.patches.active import layout


def plan_decode(
    kv_lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    init_metadata_replay: bool,
    fast_decode_kwargs: dict[str, Any],
    bs: int,
) -> int:
    """REPLACE ``layers.dcp.planner.plan_dcp_decode_metadata``: narrow a batch's index stream to this rank, in place.

    Args:
        kv_lens: [bs] int32 global lengths; becomes this rank's.
        kv_indptr: [>= bs + 1] int32 global; becomes this rank's.
        kv_indices: slots of the whole batch; its first entries become this rank's, still slots.
        init_metadata_replay: CUDA graph replay: the lengths are known on the host, in ``fast_decode_kwargs``.
        fast_decode_kwargs: ``kv_len_arr_cpu`` [bs], this rank's lengths, for replay.
        bs: requests.
    Returns:
        Entries of ``kv_indices`` that are now this rank's.
    One host sync in eager mode (upstream: two), none in replay.
    """
    from sglang.srt.runtime_context import get_parallel

    rules, rank = layout(), get_parallel().dcp_rank
    local_lens = rules.local_len(kv_lens, rank)
    local_indptr = kv_indptr.new_zeros(bs + 1)
    torch.cumsum(local_lens, dim=0, out=local_indptr[1:])
    num_owned = int(fast_decode_kwargs["kv_len_arr_cpu"].sum() if init_metadata_replay else local_indptr[-1])
    own = kv_indices.new_empty(num_owned)
    compact_kv_indices(kv_indices, kv_indptr, local_lens, local_indptr, layout=rules, rank=rank, out=own)
    kv_indices[:num_owned] = own
    kv_lens.copy_(local_lens)
    kv_indptr[: bs + 1] = local_indptr
    return num_owned


def decode_with_empty_ranks(
    original: Any, self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND ``FlashInferMLAAttnBackend.forward_decode``: neutral output for requests without KV on this rank.

    Upstream hands the wrapper uninitialised memory to write to; its all-to-all merge has no guard against NaN.
    """
    result = original(self, q, k, v, layer, forward_batch, *args, **kwargs)
    if isinstance(result, tuple):
        out, lse = result
        neutralise_empty(out.view(lse.shape[0], lse.shape[1], -1), lse, self.indices_updater_decode.kv_indptr)
    return result
