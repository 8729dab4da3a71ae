"""MLA: gathering a sharded prefix for extend, and choosing this rank's share of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from sglang_dcp_block.dcp.gather import GatherPlan, local_share, plan_gather, to_device
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.kernels.kv_indices import build_kv_indices
from sglang_dcp_block.patches.active import layout

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def gather_prefix(
    prefix_kv_a: torch.Tensor,
    prefix_k_pe: torch.Tensor,
    prefix_kv_lens_cpu: torch.Tensor,
    prefix_starts_cpu: torch.Tensor | None = None,
) -> torch.Tensor:
    """REPLACE ``layers.dcp.comm.all_gather_kv_cache_for_dcp``: every rank gets the whole prefix, in query order.

    Args:
        prefix_kv_a, prefix_k_pe: [num_owned, ..., width] this rank's latent and RoPE parts, request by request.
        prefix_kv_lens_cpu, prefix_starts_cpu: [num_requests] global tokens and first positions; starts None means 0.
    Returns:
        [sum(prefix_kv_lens_cpu), ..., both widths].
    """
    from sglang.srt.runtime_context import get_parallel

    own = torch.cat([prefix_kv_a, prefix_k_pe], dim=-1)
    parallel = get_parallel()
    if not parallel.dcp_enabled:
        return own
    lens = tuple(prefix_kv_lens_cpu.tolist())
    starts = (0,) * len(lens) if prefix_starts_cpu is None else tuple(prefix_starts_cpu.tolist())
    plan = _plan_once(lens, starts, layout(), own.device)
    if own.shape[0] != plan.sent[parallel.dcp_rank]:
        raise RuntimeError(
            f"DCP rank {parallel.dcp_rank}: expected {plan.sent[parallel.dcp_rank]} prefix rows for parts of {lens} tokens "
            f"from {starts} in blocks of {layout().block_size}, got {own.shape[0]}"
        )
    if plan.padded == 0:  # no prefix anywhere: a fact that all ranks share
        return own
    sent = own.new_empty((plan.padded, *own.shape[1:]))
    sent[: own.shape[0]] = own
    received = own.new_empty((layout().dcp_size * plan.padded, *own.shape[1:]))
    # NCCL has no fp8 type; an all-gather moves bytes.
    bytes_only = own.dtype in _FP8
    parallel.dcp_group.all_gather_into_tensor(
        received.view(torch.uint8) if bytes_only else received, sent.view(torch.uint8) if bytes_only else sent
    )
    if bytes_only:
        return received.view(torch.uint8).index_select(0, plan.order).view(own.dtype)
    return received.index_select(0, plan.order)


@lru_cache(maxsize=4)  # every layer of a batch asks for the same plan
def _plan_once(lens: tuple[int, ...], starts: tuple[int, ...], rules: DcpLayout, device: torch.device) -> GatherPlan:
    return plan_gather(lens, starts, rules, device)


def own_prefix_rows(
    original: Any,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_prefix_lens_cpu: Sequence[int],
    extend_seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND ``layers.dcp.planner.prepare_decode_context_parallel_metadata``: this rank's rows of each prefix.

    Upstream takes every dcp_size-th entry of the whole batch's prefix stream.
    """
    metadata = original(
        seq_lens,
        extend_prefix_lens,
        extend_prefix_lens_cpu,
        extend_seq_lens,
        req_pool_indices,
        req_to_token,
        *args,
        **kwargs,
    )
    if metadata is None:
        return None
    from sglang.srt.runtime_context import get_parallel

    rules, rank = layout(), get_parallel().dcp_rank
    owned = [rules.local_len(int(n), rank) for n in extend_prefix_lens_cpu]
    lens = rules.local_len(extend_prefix_lens, rank)
    indptr = torch.zeros(len(owned) + 1, dtype=torch.int32, device=lens.device)
    indptr[1:] = torch.cumsum(lens, dim=0)
    rows = torch.empty(sum(owned), dtype=torch.int64, device=lens.device)
    metadata.dcp_local_prefix_kv_indices = build_kv_indices(
        req_to_token, req_pool_indices, lens, indptr, layout=rules, rank=rank, out=rows
    )
    return metadata


def own_chunk(
    kv_indices: torch.Tensor, chunk_starts_cpu: torch.Tensor, chunk_seq_lens_cpu: torch.Tensor
) -> torch.Tensor:
    """REPLACE ``layers.dcp.layout.filter_dcp_local_chunk_kv_indices``: this rank's slots of each request's chunk.

    Args:
        kv_indices: [sum(chunk_seq_lens_cpu)] int slots of the chunks, request by request.
        chunk_starts_cpu, chunk_seq_lens_cpu: [num_requests] on the host; starts of any alignment.
    Returns:
        [num_owned] like ``kv_indices``, still slots.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if not parallel.dcp_enabled:
        return kv_indices
    lens, starts = chunk_seq_lens_cpu.tolist(), chunk_starts_cpu.tolist()
    owned = local_share(lens, starts, parallel.dcp_rank, layout())
    return kv_indices[to_device(owned, kv_indices.device)]


def rows_of_run(indices: torch.Tensor, dcp_size: int, dcp_rank: int) -> torch.Tensor:
    """REPLACE ``layers.dcp.layout.maybe_dcp_kernel_indices``: a run of slots from a page's start -> this rank's rows.

    The run may end inside a block, as the copy of a retracted request's KV does.

    Args:
        indices: [num_slots] int slots in position order, the first at the start of a virtual page.
        dcp_size: ranks that share the slots; 1 means that they are rows already.
        dcp_rank: this rank.
    """
    if dcp_size == 1:
        return indices
    owned = local_share([indices.shape[0]], [0], dcp_rank, layout()).to(indices.device)
    rows: torch.Tensor = layout().row(indices[owned])
    return rows
