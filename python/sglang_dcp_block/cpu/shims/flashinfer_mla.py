"""SGLang's FlashInfer MLA backend, on torch versions of the two FlashInfer wrappers that it calls.

Everything around the wrappers is SGLang's own and runs as on a GPU: index planning, DCP metadata, sharded writes, the
merge over ranks.
The wrappers cover what the backend asks for: pages of one token, no CUDA graphs, no custom masks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from sglang_dcp_block.cpu.environment import RAGGED_LSE
from sglang_dcp_block.cpu.shims.target import ShimError, shadow_global
from sglang_dcp_block.cpu.shims.torch_on_cpu import TorchOnCpu

MODULE = "sglang.srt.layers.attention.flashinfer_mla_backend"
LOG2_E = math.log2(math.e)
NEG_INF = float("-inf")


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map one request's queries, keys and values to its attention output and natural log-sum-exp.

    Causal masks are aligned at the end: query ``t`` of ``T`` sees keys up to ``t + S - T``.  A query that sees no key
    (an empty shard) gets output 0 and LSE -inf, the neutral element of the merge over ranks.

    Args:
        q: ``[T, H, D] float``.
        k: ``[S, Hk, D] float``, with ``Hk`` dividing ``H``.
        v: ``[S, Hk, Dv] float``.
        scale: factor of the scores.
        causal: whether to mask.

    Returns:
        ``(out, lse)``: ``[T, H, Dv]`` of q's dtype, and ``[T, H] float32``.

    Example:
        >>> one = torch.ones(1, 1, 2)
        >>> attention(one, one[:0], one[:0], 1.0, False)[1].item()
        -inf
    """
    num_queries, num_heads, _ = q.shape
    num_keys, num_kv_heads, _ = k.shape
    if num_keys == 0:
        return q.new_zeros(num_queries, num_heads, v.shape[-1]), q.new_full(
            (num_queries, num_heads), NEG_INF, dtype=torch.float32
        )
    group = num_heads // num_kv_heads
    k, v = (tensor.float().repeat_interleave(group, dim=1) if group > 1 else tensor.float() for tensor in (k, v))
    scores = torch.einsum("thd,shd->ths", q.float(), k) * scale
    if causal:
        last_seen = torch.arange(num_queries) + num_keys - num_queries
        hidden = torch.arange(num_keys)[None, :] > last_seen[:, None]
        scores = scores.masked_fill(hidden[:, None, :], NEG_INF)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(nan=0.0)
    return torch.einsum("ths,shd->thd", weights, v).to(q.dtype), lse


def _spans(indptr: list[int]) -> Iterator[slice]:
    """Half-open spans that an ``indptr`` array delimits."""
    return (slice(start, stop) for start, stop in pairwise(indptr))


class PagedMla:
    """``flashinfer.mla.BatchMLAPagedAttentionWrapper``: absorbed MLA over cache rows, base-2 LSE as FlashInfer's."""

    def __init__(self, float_workspace_buffer: torch.Tensor, use_cuda_graph: bool = False, **unused: Any) -> None:
        if use_cuda_graph:
            raise NotImplementedError("CPU stand-in for FlashInfer MLA: expected use_cuda_graph=False, got True")

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        rows: torch.Tensor,
        local_lens: torch.Tensor,
        num_heads: int,
        latent_width: int,
        rope_width: int,
        page_size: int,
        causal: bool,
        scale: float,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype,
        /,
    ) -> None:
        """Keep a batch's layout; ``rows`` are those of the cache, for request ``i`` from ``kv_indptr[i]`` on.

        Raises:
            ValueError: pages are longer than a token, or ``local_lens`` and ``kv_indptr`` disagree, as in FlashInfer.
        """
        if page_size != 1:
            raise ValueError(f"CPU stand-in for FlashInfer MLA: expected page_size 1, got {page_size}")
        self._queries, self._keys = list(_spans(qo_indptr.tolist())), list(_spans(kv_indptr.tolist()))
        spans, lens = [span.stop - span.start for span in self._keys], local_lens.tolist()
        if spans != lens:
            raise ValueError(f"CPU stand-in for FlashInfer MLA: expected kv_len_arr {spans}, got {lens}")
        # A copy: the caller reuses the buffer, and FlashInfer's plan is a snapshot too.
        self._rows = rows.long().clone()
        self._causal, self._scale = causal, scale

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend; ``q_nope [T, H, kv_lora_rank]``, ``q_pe [T, H, rope_dim]``, caches ``[rows, 1, ...]`` likewise."""
        out = torch.empty_like(q_nope) if out is None else out
        lse = torch.full(q_nope.shape[:2], NEG_INF)
        for queries, keys in zip(self._queries, self._keys, strict=True):
            rows = self._rows[keys]
            q = torch.cat([q_nope[queries], q_pe[queries]], dim=-1)
            k = torch.cat([ckv_cache[rows], kpe_cache[rows]], dim=-1)
            out[queries], lse[queries] = attention(q, k, ckv_cache[rows], self._scale, self._causal)
        return (out, lse * LOG2_E) if return_lse else out


class RaggedPrefill:
    """``flashinfer.BatchPrefillWithRaggedKVCacheWrapper``: attention over keys and values given in full.

    Its LSE is in base 2, as FlashInfer's, while SGLang 0.5.23 merges chunked prefixes in natural logs; with
    ``SGLANG_DCP_BLOCK_CPU_RAGGED_LSE=e`` it returns natural logs, under which that merge is right.
    """

    lse_factor = LOG2_E

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", **unused: Any) -> None:
        if kv_layout != "NHD":
            raise NotImplementedError(f"CPU stand-in for FlashInfer: expected kv_layout 'NHD', got {kv_layout!r}")

    def begin_forward(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, **unused: Any) -> None:
        """Keep a batch's layout.  Head counts are read off the tensors, and masking is said again when it runs."""
        self._queries, self._keys = list(_spans(qo_indptr.tolist())), list(_spans(kv_indptr.tolist()))

    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend; ``q [T, H, D]``, ``k [S, Hk, D]``, ``v [S, Hk, Dv]``, requests one after another.

        Raises:
            NotImplementedError: a soft cap of the logits is asked for.
        """
        if logits_soft_cap:
            raise NotImplementedError(f"CPU stand-in for FlashInfer: expected no soft cap, got {logits_soft_cap}")
        scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        lse = torch.empty(q.shape[:2])
        for queries, keys in zip(self._queries, self._keys, strict=True):
            out[queries], lse[queries] = attention(q[queries], k[keys], v[keys], scale, causal)
        return out, lse * self.lse_factor

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Like :meth:`forward_return_lse`, the output alone."""
        return self.forward_return_lse(*args, **kwargs)[0]


class NaturalRaggedPrefill(RaggedPrefill):
    """:class:`RaggedPrefill` with its LSE in natural logs."""

    lse_factor = 1.0


def install() -> None:
    """Give the backend the torch wrappers, and CPU memory where it says ``device="cuda"`` or pins."""
    base = os.environ.get(RAGGED_LSE, "2")
    wrappers = {"2": RaggedPrefill, "e": NaturalRaggedPrefill}
    if base not in wrappers:
        raise ShimError(f"{RAGGED_LSE}: expected 2 or e, got {base!r}")
    setup = ("FlashInferMLAAttnBackend.__init__",)
    shadow_global(MODULE, "BatchMLAPagedAttentionWrapper", PagedMla, readers=setup)
    shadow_global(MODULE, "BatchPrefillWithRaggedKVCacheWrapper", wrappers[base], readers=setup)
    shadow_global(
        MODULE, "torch", TorchOnCpu(), readers=(*setup, "FlashInferMLAIndicesUpdaterDecode.call_begin_forward")
    )
