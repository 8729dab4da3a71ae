"""Triton attention backend, MLA under DCP: a path that SGLang does not have.

Upstream's Triton backend serves GQA and MHA under DCP.  For MLA the model has gathered the queries of all ranks before it
calls decode, and the latent KV of the whole prefix before it calls extend, so what is left to do here is to run the real
Triton kernels over this rank's rows, or over the gathered buffer, and to hand decode's log-sum-exp to the model's merge.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dcp_block.kernels.neutralise import neutralise_empty

_NAME = "triton"


def admit_triton(result: None, module: Any) -> None:
    """AFTER ``DeepseekMLAForwardMixin.init_mla_forward``: let the absorbed path hand Triton split Q and K."""
    from sglang.srt.models.deepseek_common import utils

    if _NAME not in utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(_NAME)


def triton_lse_is_natural(original: Any, attention_backend: str | None) -> bool:
    """AROUND ``is_mla_dcp_lse_base_on_e``: Triton's log-sum-exp is natural."""
    return attention_backend == _NAME or bool(original(attention_backend))


def decode(
    original: Any,
    self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    *args: Any,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """AROUND ``TritonAttnBackend.forward_decode``: absorbed MLA over this rank's rows.

    Args:
        q, q_rope: [num_requests, heads of all ranks x width], gathered by the model.
        k, k_rope: [num_requests, 1, width] of the new tokens; written by their owners.
    Returns:
        (out [num_requests, heads x kv_lora_rank], natural LSE [num_requests, heads] float32); (0, -inf) for a request
        without KV on this rank.
    """
    if not (self.use_mla and self.dcp_size > 1):
        return original(self, q, k, v, layer, forward_batch, save_kv_cache, *args, **kwargs)
    assert q_rope is not None, "expected the absorbed path to hand over split Q"
    assert k_rope is not None, "expected the absorbed path to hand over split K"
    if save_kv_cache:
        _write(self, layer, forward_batch, k, k_rope)
    metadata, pool = self.forward_metadata, self.token_to_kv_pool
    query = _joined(q, q_rope, layer)
    out = torch.empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim, dtype=torch.float32, device=q.device)
    metadata.attn_lse.fill_(float("-inf"))  # splits without work leave theirs as it was
    self.decode_attention_fwd(
        query,
        pool.get_key_buffer(layer.layer_id),
        pool.get_value_buffer(layer.layer_id),
        out,
        metadata.kv_indptr,
        metadata.kv_indices,
        metadata.attn_logits,
        metadata.attn_lse,
        metadata.num_kv_splits,
        self.max_kv_splits,
        layer.scaling,
        1.0,
        1.0,
        logit_cap=layer.logit_cap,
        sinks=None,
        xai_temperature_len=layer.xai_temperature_len,
        enable_lean=False,
        lean_Mp=metadata.lean_Mp,
        lean_Lp=metadata.lean_Lp,
        lean_Op=metadata.lean_Op,
        lean_locks=metadata.lean_locks,
        uneven_batch=metadata.uneven_batch,
    )
    lse = torch.logsumexp(metadata.attn_lse[: query.shape[0], : layer.tp_q_head_num], dim=-1)
    neutralise_empty(out, lse, metadata.kv_indptr)
    return out.flatten(1).to(q.dtype), lse


def extend(
    original: Any,
    self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    *args: Any,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """AROUND ``TritonAttnBackend.forward_extend``: MLA over the gathered prefix, or MHA where no request has one.

    Args:
        q, q_rope: [num_tokens, this rank's heads x width]; q_rope is None on the MHA path.
        k, k_rope: [num_tokens, heads, width] of the new tokens.
    Returns:
        [num_tokens, heads x v_head_dim]; complete, there is nothing to merge.
    """
    if not (self.use_mla and self.dcp_size > 1):
        return original(self, q, k, v, layer, forward_batch, save_kv_cache, *args, **kwargs)
    metadata = self.forward_metadata
    if q_rope is not None:
        assert k_rope is not None
        if save_kv_cache:
            _write(self, layer, forward_batch, k, k_rope)
        query = _joined(q, q_rope, layer)
        key = torch.cat([k, k_rope.view(k.shape[0], 1, -1)], dim=-1)
        value = key[..., : layer.v_head_dim]
        keys = forward_batch.attn_dcp_metadata.dcp_kv_buffer
        values = keys[..., : layer.v_head_dim]
        indptr, indices = _gathered_prefix(forward_batch)
    else:  # every KV head of these tokens is at hand, split over TP like the queries
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        key, value = k.contiguous(), v.contiguous()
        keys, values = key, value  # never read: no request has a prefix
        indptr, indices = torch.zeros_like(metadata.kv_indptr), metadata.kv_indices[:0]
    out = query.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
    self.extend_attention_fwd(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        out,
        keys,
        values,
        metadata.qo_indptr,
        indptr,
        indices,
        None,
        True,
        None,
        metadata.max_extend_len,
        1.0,
        1.0,
        sm_scale=layer.scaling,
        logit_cap=layer.logit_cap,
        xai_temperature_len=layer.xai_temperature_len,
    )
    return out.flatten(1)


def _write(self: Any, layer: Any, forward_batch: Any, k: torch.Tensor, k_rope: torch.Tensor) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    self.token_to_kv_pool.set_mla_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, k_rope)


def _joined(q: torch.Tensor, q_rope: torch.Tensor, layer: Any) -> torch.Tensor:
    """Latent and RoPE parts side by side, as the cache rows are."""
    heads, width = layer.tp_q_head_num, layer.v_head_dim
    return torch.cat([q.view(-1, heads, width), q_rope.view(-1, heads, layer.head_dim - width)], dim=-1)


def _gathered_prefix(forward_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(indptr, indices) of the prefixes in the gathered buffer, where they lie one after another."""
    lens = forward_batch.extend_prefix_lens
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
    torch.cumsum(lens, dim=0, out=indptr[1:])
    total = forward_batch.attn_dcp_metadata.dcp_extend_prefix_lens_sum
    return indptr, torch.arange(total, dtype=torch.int64, device=lens.device)
