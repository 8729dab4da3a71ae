"""Validation of --dcp-block-size."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.model_override_base import (
    attention_backends_of,
    model_config_of,
    resolved_view,
    use_mla_backend,
)
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.runtime_context import get_platform

# Attention backends whose DCP path takes blocks.
MHA_BACKENDS: frozenset = frozenset()
MLA_BACKENDS: frozenset = frozenset()


def validate_dcp_block_size(server_args: Any) -> None:
    """Refuse block sizes that do not fit, and features without a path for blocks."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import is_deepseek_dsa

    cfg = resolving_view(server_args)
    block_size = cfg.dcp_block_size
    if block_size is None:
        return
    if block_size < 1:
        raise ValueError(f"--dcp-block-size must be at least 1, got {block_size}.")
    if cfg.dcp_size == 1:
        raise ValueError("--dcp-block-size requires --dcp-size > 1.")
    platform = get_platform()
    others = (platform.is_hip, platform.is_npu, platform.is_xpu, platform.is_musa)
    if any(others):
        raise ValueError("--dcp-block-size is not supported on ROCm, NPU, XPU or MUSA.")
    if block_size == 1:
        return
    if cfg.page_size % block_size:
        raise ValueError(
            f"--dcp-block-size {block_size} must divide --page-size {cfg.page_size}."
        )
    allowed = MLA_BACKENDS if use_mla_backend(server_args) else MHA_BACKENDS
    backends = set(attention_backends_of(resolved_view(server_args)))
    if not backends <= allowed:
        raise ValueError(
            f"--dcp-block-size > 1 requires attention backends in {sorted(allowed)} "
            f"for this model, got {sorted(map(str, backends))}."
        )
    model_config = model_config_of(server_args)
    unsupported = {
        "sparse attention (DSA)": is_deepseek_dsa(model_config.hf_config),
        "sliding-window or chunked attention": model_config.is_hybrid_swa
        or model_config.attention_chunk_size is not None,
        "hybrid linear attention": mambaish_config(model_config) is not None,
        "FP4 KV cache": "fp4" in cfg.kv_cache_dtype,
        "speculative decoding": cfg.speculative_algorithm is not None,
        "--enable-unified-memory": cfg.enable_unified_memory,
        "--enable-hierarchical-cache": cfg.enable_hierarchical_cache,
        "--disaggregation-decode-enable-offload-kvcache": (
            cfg.disaggregation_decode_enable_offload_kvcache
        ),
        "--disaggregation-mode": cfg.disaggregation_mode != "null",
    }
    found = [name for name, used in unsupported.items() if used]
    if found:
        raise ValueError(f"--dcp-block-size > 1 does not support {', '.join(found)}.")
