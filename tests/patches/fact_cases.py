"""What of SGLang's configuration, and of models, must show in the facts that the rules ask."""

from __future__ import annotations

from typing import Any

from resolution_cases import HOLD

from sglang_dcp_block.cpu.checkpoints import tiny_config

# A resolved field of SGLang, or an attribute of its model configuration -> the facts that must follow.
FACTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "page_size": ({"fields": {"page_size": 128}}, {"page_size": 128}),
    "dcp_size": ({"fields": {"dcp_size": 8}}, {"dcp_size": 8}),
    "tp_size": ({"fields": {"tp_size": 8}}, {"tp_size": 8}),
    "attention DP": ({"fields": {"tp_size": 8, "attn_dp_size": 2}}, {"tp_size": 4}),
    "attention CP": (
        {"fields": {"tp_size": 8, "attn_cp_size": 2}},
        {"tp_size": 4, "prefill_context_parallel": True},
    ),
    "backend": ({"fields": {"attention_backend": "fa3"}}, {"prefill_backend": "fa3", "decode_backend": "fa3"}),
    "decode backend": ({"fields": {"decode_attention_backend": "fa3"}}, {"decode_backend": "fa3"}),
    "prefill backend": ({"fields": {"prefill_attention_backend": "fa3"}}, {"prefill_backend": "fa3"}),
    "kv_cache_dtype": ({"fields": {"kv_cache_dtype": "fp4_e2m1"}}, {"kv_cache_dtype": "fp4_e2m1"}),
    "pp_size": ({"fields": {"pp_size": 2}}, {"pp_size": 2}),
    "speculative": ({"fields": {"speculative_algorithm": "EAGLE"}}, {"speculative_algorithm": "EAGLE"}),
    "disaggregation": ({"fields": {"disaggregation_mode": "decode"}}, {"disaggregation_mode": "decode"}),
    "transfer": ({"fields": {"disaggregation_transfer_backend": "nixl"}}, {"transfer_backend": "nixl"}),
    "unified memory": ({"fields": {"enable_unified_memory": True}}, {"unified_memory": True}),
    "HiCache": ({"fields": {"enable_hierarchical_cache": True}}, {"hierarchical_cache": True}),
    "HiCache I/O": ({"fields": {"hicache_io_backend": "direct"}}, {"host_io_backend": "direct"}),
    "HiCache layout": ({"fields": {"hicache_mem_layout": "layer_first"}}, {"host_layout": "layer_first"}),
    "HiCache storage": ({"fields": {"hicache_storage_backend": "file"}}, {"host_storage": "file"}),
    "offload": ({"fields": {"disaggregation_decode_enable_offload_kvcache": True}}, {"decode_kv_offload": True}),
    "TBO": ({"fields": {"enable_two_batch_overlap": True}}, {"two_batch_overlap": True}),
    "SBO": ({"fields": {"enable_single_batch_overlap": True}}, {"two_batch_overlap": True}),
    "dllm": ({"fields": {"dllm_algorithm": "LowConfidence"}}, {"diffusion_llm": True}),
    "KV sharding": ({"fields": {"enable_kv_cache_sharding": True}}, {"kv_cache_sharding": True}),
    "prefill CP": ({"fields": {"enable_prefill_cp": True}}, {"prefill_context_parallel": True}),
    "HiSparse": ({"fields": {"enable_hisparse": True}}, {"hisparse": True}),
    "LMCache": ({"fields": {"enable_lmcache": True}}, {"lmcache": True}),
    "PDMux": ({"fields": {"enable_pdmux": True}}, {"pd_multiplexing": True}),
    "Ray": ({"fields": {"use_ray": True}}, {"ray": True}),
    "hold": (
        {"fields": {"disaggregation_mode": "decode"}, "environ": {HOLD: "false"}},
        {
            "disaggregation_mode": "decode",
            "early_release": f"expected pages of a failed transfer to be kept for 40 s or more, got {HOLD} off: Mooncake "
            f"may write for 30 s where MC_TRANSFER_TIMEOUT is 30 s, and 10 s are margin. Unset {HOLD}.",
        },
    ),
    "elastic EP": ({"fields": {"elastic_ep_backend": "mooncake"}}, {"elastic_ep": True}),
    "Rust": ({"environ": {"SGLANG_RUST_SERVER": "1"}}, {"rust_server": True}),
    "Rust off": ({"environ": {"SGLANG_RUST_SERVER": "false"}}, {}),
    "sliding window": ({"model": {"is_hybrid_swa": True}}, {"has_sliding_window": True}),
    "chunked attention": ({"model": {"attention_chunk_size": 8192}}, {"has_sliding_window": True}),
    "sinks": ({"model": {"has_attention_sinks": True}}, {"has_attention_sinks": True}),
    "linear": ({"model": {"linear_attn_registry_result": ["a spec", "a config"]}}, {"is_hybrid_linear": True}),
    "encoder-decoder": ({"model": {"is_encoder_decoder": True}}, {"is_encoder_decoder": True}),
    # A real DSA configuration cannot be resolved without a GPU: SGLang asks for its compute capability.
    "DSA": ({"hf_config": {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048}}, {"is_dsa": True}),
    "MiniMax": ({"hf_config": {"architectures": ["MiniMaxM3SparseForCausalLM"]}}, {"has_sparse_layers": True}),
    "CUDA": ({"fields": {"device": "cuda"}, "platform": {"is_cuda": True}}, {"platform": "cuda"}),
    "ROCm": ({"fields": {"device": "cuda"}, "platform": {"is_hip": True}}, {"platform": "hip"}),
    "NPU": ({"fields": {"device": "npu"}, "platform": {"is_npu": True}}, {"platform": "npu"}),
    "CPU run beside a GPU": ({"platform": {"is_cuda": True}}, {}),
}

# Configurations of real model families, made small: SGLang's own reading of them -> the facts that must follow.
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "torch_dtype": "float32",
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt_oss": (
        {**SMALL, "architectures": ["GptOssForCausalLM"], "sliding_window": 128, "num_local_experts": 4,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"has_sliding_window": True, "has_attention_sinks": True},
    ),
    "qwen3_next": (
        {**SMALL, **EXPERTS, "architectures": ["Qwen3NextForCausalLM"], "shared_expert_intermediate_size": 32},
        {"is_hybrid_linear": True},
    ),
    "mllama": (
        {"architectures": ["MllamaForConditionalGeneration"]},
        {"is_encoder_decoder": True, "num_attention_heads": 32, "num_kv_heads": 8},
    ),
    "llama4": (
        {"architectures": ["Llama4ForConditionalGeneration"]},
        {"has_sliding_window": True, "num_attention_heads": 40, "num_kv_heads": 8},
    ),
    "llama": ({**SMALL, "architectures": ["LlamaForCausalLM"]}, {}),
    "qwen3": ({**SMALL, "architectures": ["Qwen3ForCausalLM"]}, {}),
    "deepseek_v3": (
        tiny_config("mla"), {"is_mla": True, "num_attention_heads": 8, "num_kv_heads": 8},
    ),
}  # fmt: skip
