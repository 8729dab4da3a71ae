"""Reads SGLang's resolved arguments into the plain :class:`~sglang_dcp_block.support.Facts` that the rules ask."""

from __future__ import annotations

import os
from typing import Any

from sglang_dcp_block.patches import pd_release
from sglang_dcp_block.support import Facts


def attention_is_mla(server_args: Any) -> bool:
    """Whether the model has MLA."""
    from sglang.srt.arg_groups.model_override_base import use_mla_backend

    return bool(use_mla_backend(server_args))


def facts_of(server_args: Any, block_size: int) -> Facts:
    """The resolved configuration of ``server_args`` as plain data."""
    from sglang.srt.arg_groups.model_override_base import attention_backends_of, model_config_of
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import is_deepseek_dsa, is_minimax_sparse

    cfg = resolving_view(server_args)
    model = model_config_of(server_args)
    prefill_backend, decode_backend = attention_backends_of(cfg)
    return Facts(
        block_size=block_size,
        page_size=cfg.page_size,
        dcp_size=cfg.dcp_size,
        tp_size=cfg.tp_size // cfg.attn_dp_size // cfg.attn_cp_size,
        platform=_platform(cfg.device),
        is_mla=attention_is_mla(server_args),
        num_attention_heads=model.get_max_num_attention_heads(),
        num_kv_heads=model.get_total_num_kv_heads(),
        prefill_backend=prefill_backend,
        decode_backend=decode_backend,
        kv_cache_dtype=cfg.kv_cache_dtype,
        pp_size=cfg.pp_size,
        speculative_algorithm=cfg.speculative_algorithm,
        disaggregation_mode=cfg.disaggregation_mode,
        transfer_backend=cfg.disaggregation_transfer_backend,
        is_dsa=bool(is_deepseek_dsa(model.hf_config)),
        has_sliding_window=bool(model.is_hybrid_swa or model.attention_chunk_size),
        has_attention_sinks=bool(model.has_attention_sinks),
        has_sparse_layers=is_minimax_sparse(model.hf_config),
        is_hybrid_linear=mambaish_config(model) is not None,
        is_encoder_decoder=bool(model.is_encoder_decoder),
        unified_memory=bool(cfg.enable_unified_memory),
        hierarchical_cache=bool(cfg.enable_hierarchical_cache),
        host_io_backend=cfg.hicache_io_backend,
        host_layout=cfg.hicache_mem_layout,
        host_storage=cfg.hicache_storage_backend,
        decode_kv_offload=bool(cfg.disaggregation_decode_enable_offload_kvcache),
        two_batch_overlap=bool(cfg.enable_two_batch_overlap or cfg.enable_single_batch_overlap),
        diffusion_llm=cfg.dllm_algorithm is not None,
        kv_cache_sharding=bool(cfg.enable_kv_cache_sharding),
        prefill_context_parallel=bool(cfg.enable_prefill_cp or cfg.attn_cp_size > 1),
        hisparse=bool(cfg.enable_hisparse),
        lmcache=bool(cfg.enable_lmcache),
        pd_multiplexing=bool(cfg.enable_pdmux),
        ray=bool(cfg.use_ray),
        rust_server=os.environ.get("SGLANG_RUST_SERVER", "0").lower() not in ("", "0", "false"),
        elastic_ep=cfg.elastic_ep_backend is not None,
        early_release=pd_release.why_not_here() if cfg.disaggregation_mode == "decode" and block_size > 1 else None,
    )


def _platform(device: str) -> str:
    """SGLang's word for the accelerator in use; a CPU run counts as the CPU whatever else the machine has."""
    from sglang.srt.runtime_context import get_platform

    if device == "cpu":
        return "cpu"
    platform = get_platform()
    known = ("cuda", "hip", "npu", "xpu", "musa", "mps")
    return next((name for name in known if getattr(platform, f"is_{name}")), device)
