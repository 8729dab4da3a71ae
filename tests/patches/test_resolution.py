"""A block size through SGLang's real argument resolution: what it becomes, what it changes, what it is refused with.

No engine is started.  All cases run in one process (resolve_cases.py), because importing SGLang takes longer than they do.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from children import run_script

from sglang_dcp_block.cpu.checkpoints import tiny_config, write_tiny
from sglang_dcp_block.support import Facts

Outcome = dict[str, Any]

HOPPER = {"is_cuda": True, "is_hopper_with_cuda_12_3": True, "has_flashinfer": True}
BLACKWELL = {"is_cuda": True, "is_sm100": True, "is_blackwell": True, "has_flashinfer": True}
VARIABLE = "SGLANG_DCP_BLOCK_SIZE"

# A patch point of each of the lists: of the flag, launcher, controller, scheduler, KV cache, and one that is relied on.
ONE_OF_EACH = [
    "sglang.srt.runtime_context.publish",
    "sglang.srt.entrypoints.engine._wait_for_scheduler_ready",
    "sglang.srt.managers.data_parallel_controller.DataParallelController.get_init_info",
    "sglang.srt.managers.scheduler.Scheduler.get_init_info",
    "sglang.srt.layers.dcp.layout.get_dcp_lens",
    "sglang.srt.mem_cache.kv_loc_plan.KVLocPlan",
]
HICACHE = "--enable-hierarchical-cache"
STORAGE_NAME = "sglang.srt.managers.cache_controller.storage_model_name"


def gqa(folder: Path) -> str:
    return str(write_tiny("gqa", folder / "gqa"))


def with_argv(model: str, *argv: str, device: str = "cpu", dcp: int = 2, **case: Any) -> dict[str, Any]:
    """A case of a command line."""
    sizes = ["--tp-size", str(max(dcp, 2)), "--dcp-size", str(dcp)]
    return {"argv": ["--model-path", model, "--skip-tokenizer-init", "--device", device, *sizes, *argv], **case}


def with_keywords(model: str, **keywords: Any) -> dict[str, Any]:
    """A case of ``Engine(**keywords)``."""
    common = {"model_path": model, "skip_tokenizer_init": True, "device": "cpu", "tp_size": 2, "dcp_size": 2}
    return {"keywords": {**common, **keywords}}


TRITON = ("--attention-backend", "triton")


def cpu_cases(model: str, mla: str) -> dict[str, dict[str, Any]]:
    """Attention backends on CPUs, most of which know nothing of DCP."""
    whole, prefill, decode = "--attention-backend", "--prefill-attention-backend", "--decode-attention-backend"
    flag = "--dcp-block-size"
    return {
        "unset": with_argv(model),
        "torch_native": with_argv(model, whole, "torch_native"),
        "torch_native, no DCP": with_argv(model, whole, "torch_native", dcp=1),
        "torch_native, blocks": with_argv(model, flag, "16", whole, "torch_native"),
        "intel_amx, blocks of 1": with_argv(model, flag, "1", whole, "intel_amx"),
        "decode": with_argv(model, whole, "triton", decode, "torch_native"),
        "prefill": with_argv(model, whole, "triton", prefill, "intel_amx"),
        "flashinfer, GQA": with_argv(model, whole, "flashinfer"),
        "flashinfer": with_argv(mla, whole, "flashinfer"),
        "triton, MLA": with_argv(mla, whole, "triton"),
        "triton, MLA, blocks of 1": with_argv(mla, flag, "1", whole, "triton"),
        "torch_native, MLA": with_argv(mla, whole, "torch_native"),
        "trtllm_mla, blocks": with_argv(mla, flag, "32", whole, "flashinfer", decode, "cutedsl_mla"),
    }


HOLD = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
HOLDS: dict[str, dict[str, Any]] = {
    "unset": {},
    "long enough": {"environ": {f"{HOLD}_TIMEOUT": "40"}},
    "too short": {"environ": {f"{HOLD}_TIMEOUT": "39"}},
    "too short for Mooncake": {"environ": {f"{HOLD}_TIMEOUT": "100", "MC_TRANSFER_TIMEOUT": "91"}},
    "unset, slow Mooncake": {"environ": {"MC_TRANSFER_TIMEOUT": "91"}},
    "off": {"environ": {HOLD: "false"}},
    "off, prefill": {"environ": {HOLD: "false"}, "mode": "prefill"},
    "off, block 1": {"environ": {HOLD: "false"}, "block": "1", "backend": "triton"},  # armed, for Triton MLA
}


def held(
    model: str, mode: str = "decode", block: str = "8", backend: str = "flashinfer", **case: Any
) -> dict[str, Any]:
    """A server of prefill -> decode."""
    transfer = ("--disaggregation-mode", mode, "--disaggregation-transfer-backend", "mooncake_tcp")
    return with_argv(model, "--dcp-block-size", block, "--attention-backend", backend, *transfer, **case)


ALLOC_EXTEND = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_extend"


def grouping(model: str, mode: str = "prefill", *argv: str, ranks: str = "2", **case: Any) -> dict[str, Any]:
    """A server that orders its pages."""
    transfer = ("--disaggregation-mode", mode, "--disaggregation-transfer-backend", "mooncake_tcp", "--page-size", "16")
    flags = ("--attention-backend", "flashinfer", "--dcp-group-pages", ranks)
    return with_argv(model, *transfer, *flags, *argv, dcp=1 if mode == "prefill" else 2, **case)


def grouping_cases(model: str, mla: str) -> dict[str, dict[str, Any]]:
    return {
        "prefill": grouping(mla),
        "prefill, 8 ranks": grouping(mla, ranks="8"),
        "prefill, with a block size": grouping(mla, "prefill", "--dcp-block-size", "16"),
        "prefill, unknown version": grouping(mla, upstream={"version": "0.5.99"}),
        "prefill, altered": grouping(mla, upstream={"altered": ALLOC_EXTEND}),
        "prefill, without MLA": grouping(model),
        "decode": grouping(mla, "decode", "--dcp-block-size", "auto"),
        "decode, token round-robin": grouping(mla, "decode"),
        "decode, other ranks": grouping(mla, "decode", "--dcp-block-size", "auto", ranks="4"),
        "neither": with_argv(model, "--dcp-group-pages", "2"),
        "one": grouping(mla, ranks="1"),
        "keyword": with_keywords(mla, dcp_group_pages=2, dcp_size=1, page_size=16, disaggregation_mode="prefill",
                                 disaggregation_transfer_backend="mooncake_tcp"),
        "keyword, neither": with_keywords(mla, dcp_group_pages=2, dcp_size=1),
        "keyword, text": with_keywords(mla, dcp_group_pages="auto"),
    }  # fmt: skip


def cases_of(model: str, mla: str, yaml: str) -> dict[str, dict[str, Any]]:
    flag = "--dcp-block-size"
    return {
        "nothing asked for": with_argv(model, *TRITON),
        "16": with_argv(model, flag, "16"),
        "alias": with_argv(model, "--dcp-interleave-size", "16"),
        "yaml": {"argv": ["--config", yaml]},
        "auto": with_argv(model, flag, "auto"),
        "explicit page": with_argv(model, flag, "4", "--page-size", "32"),
        "auto, explicit page": with_argv(model, flag, "auto", "--page-size", "32"),
        "auto, page 1": with_argv(model, flag, "auto", "--page-size", "1"),
        "not a divisor": with_argv(model, flag, "6", "--page-size", "16"),
        "larger than the page": with_argv(model, flag, "64", "--page-size", "32"),
        "dcp off": with_argv(model, flag, "16", dcp=1),
        "one": with_argv(model, flag, "1", *TRITON),
        "one, dcp off": with_argv(model, flag, "1", dcp=1),
        "keyword": with_keywords(model, dcp_block_size=16),
        "keyword text": with_keywords(model, dcp_block_size="auto"),
        "keyword none": with_keywords(model, dcp_block_size=None, attention_backend="triton"),
        "keyword zero": with_keywords(model, dcp_block_size=0),
        "keyword true": with_keywords(model, dcp_block_size=True),
        "variable": with_argv(model, environ={VARIABLE: "8"}),
        "variable, Engine": {**with_keywords(model), "environ": {VARIABLE: "auto"}},
        "variable, dcp off": with_argv(model, dcp=1, environ={VARIABLE: "8"}),
        "keyword, dcp off": with_keywords(model, dcp_block_size=8, dcp_size=1),
        "variable, nonsense": with_argv(model, environ={VARIABLE: "big"}),
        "variable, dummy model": with_argv("dummy", environ={VARIABLE: "8"}),
        "flag beats variable": with_argv(model, flag, "16", environ={VARIABLE: "8"}),
        "flag 1 beats variable": with_argv(model, flag, "1", *TRITON, environ={VARIABLE: "8"}),
        "keyword beats variable": {**with_keywords(model, dcp_block_size=16), "environ": {VARIABLE: "8"}},
        "zero": with_argv(model, flag, "0"),
        "text": with_argv(model, flag, "many"),
        "Hopper": with_argv(model, flag, "16", device="cuda", platform=HOPPER),
        "Hopper, nothing asked for": with_argv(model, device="cuda", platform=HOPPER),
        "Hopper, block 1": with_argv(model, flag, "1", device="cuda", platform=HOPPER),
        "Hopper, triton": with_argv(model, flag, "16", "--attention-backend", "triton", device="cuda", platform=HOPPER),
        "Hopper, fa3": with_argv(model, flag, "16", "--attention-backend", "fa3", device="cuda", platform=HOPPER),
        "Hopper, decode only": with_argv(
            model, flag, "16", "--decode-attention-backend", "triton", device="cuda", platform=HOPPER
        ),
        "Blackwell": with_argv(model, flag, "16", device="cuda", platform=BLACKWELL),
        "Hopper, MLA": with_argv(mla, flag, "16", device="cuda", platform=HOPPER),
        "Blackwell, MLA": with_argv(mla, flag, "16", device="cuda", platform=BLACKWELL),
        "Blackwell, MLA, cutedsl": with_argv(
            mla, flag, "16", "--decode-attention-backend", "cutedsl_mla", device="cuda", platform=BLACKWELL
        ),
        "Hopper, MLA, flashmla": with_argv(
            mla, flag, "16", "--attention-backend", "flashmla", device="cuda", platform=HOPPER
        ),
        "model's choice, general": with_argv(model, flag, "16", chosen={"attention_backend": "fa4"}),
        "model's choice, special": with_argv(model, flag, "16", chosen={"attention_backend": "minicpm_flashattn"}),
        "model's choice, split": with_argv(model, flag, "16", chosen={"prefill_attention_backend": "flashinfer"}),
        "several": with_argv(
            model, flag, "6", "--page-size", "16", "--attention-backend", "torch_native", "--disable-radix-cache"
        ),
        "copied first": {**with_argv(model, flag, "16"), "pickle_first": True},
        "unknown version": with_argv(model, flag, "16", upstream={"version": "0.5.99"}),
        "unknown version, block 1": with_argv(model, flag, "1", *TRITON, upstream={"version": "0.5.99"}),
        "unknown version, nothing asked for": with_argv(model, *TRITON, upstream={"version": "0.5.99"}),
        **{f"altered {t}": with_argv(model, flag, "16", upstream={"altered": t}) for t in ONE_OF_EACH},
        **{f"group, {name}": case for name, case in grouping_cases(model, mla).items()},
        **{f"hold, {name}": held(mla, **case) for name, case in HOLDS.items()},
        "HiCache": with_argv(mla, flag, "16", HICACHE),
        "HiCache, GQA": with_argv(model, flag, "16", HICACHE),
        "HiCache, direct": with_argv(mla, flag, "16", HICACHE, "--hicache-io-backend", "direct"),
        "HiCache, page_head": with_argv(mla, flag, "16", HICACHE, "--hicache-mem-layout", "page_head"),
        "HiCache, file": with_argv(mla, flag, "16", HICACHE, "--hicache-storage-backend", "file"),
        "HiCache, mooncake": with_argv(mla, flag, "16", HICACHE, "--hicache-storage-backend", "mooncake"),
        "HiCache, altered": with_argv(mla, flag, "16", HICACHE, upstream={"altered": STORAGE_NAME}),
        "no HiCache, altered": with_argv(mla, flag, "16", upstream={"altered": STORAGE_NAME}),
        "elsewhere": {**with_argv(model, flag, "auto"), "elsewhere": True},
        "elsewhere, one": {**with_argv(model, flag, "1", *TRITON), "elsewhere": True},
        **{f"CPU, {name}": case for name, case in cpu_cases(model, mla).items()},
    }


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


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("resolution")
    model, yaml = gqa(folder), folder / "server.yaml"
    options = {"model-path": model, "device": "cpu", "tp-size": 2, "dcp-size": 2, "dcp-block-size": 16}
    yaml.write_text(json.dumps({**options, "skip-tokenizer-init": True}))
    order = {
        "excluded": {
            "flag": with_argv(model, "--dcp-block-size", "16"),
            "keyword": with_keywords(model, dcp_block_size=16),
            "variable": with_argv(model, *TRITON, environ={VARIABLE: "16"}),
        },
        "engine": {"model_path": model, "device": "cpu", "dcp_block_size": 16},
        "cases": cases_of(model, str(write_tiny("mla", folder / "mla")), str(yaml)),
        "facts": {
            "case": with_argv(model, "--dcp-block-size", "8"),
            "changes": {name: change for name, (change, _) in FACTS.items()},
        },
        "models": {},
    }
    for name, (config, _) in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"model_type": name, **config}))
        order["models"][name] = with_argv(str(folder / name), *TRITON, "--disable-radix-cache", dcp=1)
    return run_script("resolve_cases.py", order)


@pytest.fixture
def resolved(answers: dict[str, Any], request: pytest.FixtureRequest) -> Outcome:
    return answers["cases"][request.param]


def refusal(outcome: Outcome) -> str:
    assert "error" in outcome, outcome
    return f"{outcome['error']}: {outcome['message']}"


class TestSizes:
    @pytest.mark.parametrize(
        ("case", "page_size", "block_size"),
        [
            ("nothing asked for", 1, None),
            ("16", 16, 16),
            ("alias", 16, 16),
            ("yaml", 16, 16),
            ("auto", 64, 64),
            ("explicit page", 32, 4),
            ("auto, explicit page", 32, 32),
            ("keyword", 16, 16),
            ("keyword text", 64, 64),
            ("keyword none", 1, None),
            ("variable", 8, 8),
            ("variable, Engine", 64, 64),
            ("flag beats variable", 16, 16),
            ("flag 1 beats variable", 1, 0),
            ("keyword beats variable", 16, 16),
            ("one", 1, 0),
            ("one, dcp off", 1, 0),
            ("copied first", 16, 16),
        ],
    )
    def test_page_and_block(self, answers: dict[str, Any], case: str, page_size: int, block_size: int | None) -> None:
        outcome = answers["cases"][case]
        assert (outcome.get("page_size"), outcome.get("block_size")) == (page_size, block_size), outcome

    def test_what_was_typed_stays_what_was_typed(self, answers: dict[str, Any]) -> None:
        assert answers["cases"]["auto"]["raw_page_size"] is None
        assert answers["cases"]["explicit page"]["raw_page_size"] == 32

    @pytest.mark.parametrize(
        ("case", "said"),
        [
            ("16", ["--dcp-block-size 16: --page-size is unset, taking 16 tokens."]),
            ("alias", ["--dcp-interleave-size 16: --page-size is unset, taking 16 tokens."]),
            ("keyword", ["Engine(dcp_block_size=...) 16: --page-size is unset, taking 16 tokens."]),
            ("variable", [f"{VARIABLE} 8: --page-size is unset, taking 8 tokens."]),
            ("auto", ["--dcp-block-size auto: --page-size is unset, taking 64 tokens.",
                      "--dcp-block-size auto resolves to blocks of 64 tokens."]),
            ("auto, explicit page", ["--dcp-block-size auto resolves to blocks of 32 tokens."]),
            ("explicit page", []),
            ("one", []),
            ("nothing asked for", []),
        ],
    )  # fmt: skip
    def test_what_was_not_typed_is_said(self, answers: dict[str, Any], case: str, said: list[str]) -> None:
        lines = [line for line in answers["cases"][case]["warnings"] if "attention-backend" not in line]
        assert lines == said

    def test_the_block_size_travels_with_the_record(self, answers: dict[str, Any]) -> None:
        """Another process reads what was resolved, whatever its own environment says."""
        assert answers["cases"]["elsewhere"].get("elsewhere") == 64, answers["cases"]["elsewhere"]
        assert answers["cases"]["elsewhere, one"]["elsewhere"] is None


class TestBackends:
    @pytest.mark.parametrize(
        ("case", "default"),
        [
            ("Hopper", "fa3"),
            ("Blackwell", "trtllm_mha"),
            ("16", "(torch_native|intel_amx)"),
            ("Hopper, MLA", "fa3"),
        ],
    )
    def test_a_default_that_cannot_read_blocks_is_replaced_and_said(
        self, answers: dict[str, Any], case: str, default: str
    ) -> None:
        outcome = answers["cases"][case]
        taken = "flashinfer" if "MLA" in case else "triton"
        assert outcome["backends"] == [taken, taken]
        (said,) = [line for line in outcome["warnings"] if "attention-backend" in line]
        assert re.fullmatch(
            "--dcp-block-size 16: --attention-backend is unset and SGLang's default here, "
            f"{default}, cannot read blocks; taking {taken}.",
            said,
        )

    @pytest.mark.parametrize("case", ["Hopper, nothing asked for", "Hopper, block 1"])
    def test_without_blocks_the_default_stays(self, answers: dict[str, Any], case: str) -> None:
        assert answers["cases"][case]["backends"] == ["fa3", "fa3"]
        assert answers["cases"][case]["warnings"] == []

    def test_a_named_one_with_a_block_path_is_kept_in_silence(self, answers: dict[str, Any]) -> None:
        outcome = answers["cases"]["Hopper, triton"]
        assert outcome["backends"] == ["triton", "triton"]
        assert not any("attention-backend" in line for line in outcome["warnings"])

    @pytest.mark.parametrize(
        ("case", "backends"),
        [("Blackwell, MLA", ["trtllm_mla"] * 2), ("Blackwell, MLA, cutedsl", ["trtllm_mla", "cutedsl_mla"])],
    )
    def test_backends_of_page_tables_take_blocks_and_pages_that_they_know(
        self, answers: dict[str, Any], case: str, backends: list[str]
    ) -> None:
        """SGLang's own default on Blackwell. It raises the page that the block asked for; the block still divides it."""
        outcome = answers["cases"][case]
        assert outcome.get("backends") == backends, outcome
        assert (outcome["page_size"], outcome["block_size"]) == (64, 16)
        assert not any("attention-backend" in line for line in outcome["warnings"])

    @pytest.mark.parametrize("case", ["Hopper, fa3", "Hopper, decode only"])
    def test_a_named_one_without_a_block_path_is_refused(self, answers: dict[str, Any], case: str) -> None:
        text = refusal(answers["cases"][case])
        assert "expected triton for GQA and MHA models, got attention backend fa3. Pass it as --" in text
        assert text.startswith("BlockSizeError: --dcp-block-size 16 cannot be used here:")

    @pytest.mark.parametrize(
        ("case", "backend"), [("model's choice, special", "minicpm_flashattn"), ("model's choice, split", "flashinfer")]
    )
    def test_what_the_model_itself_needs_is_refused_not_replaced(
        self, answers: dict[str, Any], case: str, backend: str
    ) -> None:
        assert f"got attention backend {backend}" in refusal(answers["cases"][case])

    def test_a_named_one_of_mla_too(self, answers: dict[str, Any]) -> None:
        """flashmla forces pages of 64 tokens, so the block still fits: the backend is the one reason."""
        _, reason = refusal(answers["cases"]["Hopper, MLA, flashmla"]).splitlines()
        assert "or cutedsl_mla for MLA models, got attention backend flashmla." in reason


class TestBackendsOnCpus:
    """The stand-in for the platform check lets DCP start off GPUs; only some backends have it there."""

    @pytest.mark.parametrize(
        "case", ["torch_native, no DCP", "flashinfer", "triton, MLA, blocks of 1"],
    )  # fmt: skip
    def test_with_a_dcp_path_it_starts(self, answers: dict[str, Any], case: str) -> None:
        assert "error" not in answers["cases"][f"CPU, {case}"], answers["cases"][f"CPU, {case}"]

    @pytest.mark.parametrize(
        ("case", "right", "got"),
        [
            ("unset", "triton", "(torch_native|intel_amx)"),
            ("torch_native", "triton", "torch_native"),
            ("intel_amx, blocks of 1", "triton", "(torch_native|intel_amx)"),
            ("decode", "triton", "torch_native"),
            ("prefill", "triton", "(torch_native|intel_amx)"),
            ("flashinfer, GQA", "triton", "flashinfer"),
            ("torch_native, MLA", "flashinfer", "torch_native"),
            ("triton, MLA", "flashinfer", "triton"),
        ],
    )
    def test_without_one_it_is_refused(self, answers: dict[str, Any], case: str, right: str, got: str) -> None:
        text = refusal(answers["cases"][f"CPU, {case}"])
        assert re.match(
            f"ShimError: --dcp-size 2 cannot be used here: expected the attention backend {right}, which has DCP on CPUs "
            rf"for .* models, got {got}\. Pass {right} as --attention-backend",
            text,
        ), text

    def test_with_blocks_too(self, answers: dict[str, Any]) -> None:
        text = refusal(answers["cases"]["CPU, torch_native, blocks"])
        assert text.startswith("BlockSizeError: --dcp-block-size 16 cannot be used here:")
        assert "got attention backend torch_native" in text


class TestRefused:
    @pytest.mark.parametrize(
        ("case", "text"),
        [
            ("auto, page 1", "expected a page size above 1, got --page-size 1"),
            ("not a divisor", "got block size 6 with page size 16"),
            ("larger than the page", "got block size 64 with page size 32"),
            ("dcp off", "DCP off: expected --dcp-size above 1: blocks are dealt over DCP ranks, got --dcp-size 1"),
            ("keyword zero", "Engine(dcp_block_size=...): expected a positive number of tokens or 'auto', got 0"),
            ("keyword true", "Engine(dcp_block_size=...): expected a positive number of tokens or 'auto', got True"),
            ("variable, nonsense", f"{VARIABLE}: expected a positive number of tokens or 'auto', got 'big'"),
        ],
    )
    def test_with_the_reason(self, answers: dict[str, Any], case: str, text: str) -> None:
        outcome = answers["cases"][case]
        assert outcome.get("error") == "BlockSizeError", outcome
        assert text in outcome["message"]

    @pytest.mark.parametrize(
        ("case", "source"), [("variable, dcp off", VARIABLE), ("keyword, dcp off", "Engine(dcp_block_size=...)")]
    )
    def test_naming_where_the_block_size_came_from(self, answers: dict[str, Any], case: str, source: str) -> None:
        text = refusal(answers["cases"][case])
        assert text.startswith(f"BlockSizeError: {source} 8 cannot be used here:")
        assert text.endswith(f"or leave {source} out.")

    def test_dcp_off_is_not_blamed_on_anything_else(self, answers: dict[str, Any]) -> None:
        assert len(answers["cases"]["dcp off"]["message"].splitlines()) == 2

    @pytest.mark.parametrize(("case", "got"), [("zero", "0"), ("text", "'many'")])
    def test_on_the_command_line_before_anything_starts(self, answers: dict[str, Any], case: str, got: str) -> None:
        outcome = answers["cases"][case]
        assert (outcome["error"], outcome["status"]) == ("SystemExit", 2)
        assert outcome["message"].endswith(f"expected a positive number of tokens or 'auto', got {got}")

    def test_an_unknown_version(self, answers: dict[str, Any]) -> None:
        text = refusal(answers["cases"]["unknown version"])
        assert text.startswith("PatchError: cannot place KV in blocks: ")
        assert "do not fit SGLang 0.5.99 (known versions: 0.5.23)" in text

    @pytest.mark.parametrize("case", ["unknown version, block 1", "unknown version, nothing asked for"])
    def test_an_unknown_version_serves_without_blocks(self, answers: dict[str, Any], case: str) -> None:
        assert "error" not in answers["cases"][case]

    @pytest.mark.parametrize("target", ONE_OF_EACH)
    def test_an_altered_definition(self, answers: dict[str, Any], target: str) -> None:
        text = refusal(answers["cases"][f"altered {target}"])
        assert text.startswith("PatchError: cannot place KV in blocks: 1 patch point(s) do not fit SGLang 0.5.23")
        assert f"{target}: source " in text
        assert "expected 0123456789abcdef" in text

    @pytest.mark.parametrize("case", ["HiCache", "HiCache, direct", "HiCache, file", "no HiCache, altered"])
    def test_hicache_with_what_was_tried(self, answers: dict[str, Any], case: str) -> None:
        assert answers["cases"][case].get("block_size") == 16, answers["cases"][case]

    @pytest.mark.parametrize(
        ("case", "text"),
        [
            ("HiCache, GQA", "NotImplementedError: HiCache with --dcp-size > 1 is only supported for MLA models"),
            ("HiCache, page_head", "got --hicache-io-backend kernel with --hicache-mem-layout page_head."),
            ("HiCache, mooncake", "HiCache storage that nobody tried: expected no third tier, or file, got "
             "--hicache-storage-backend mooncake."),
            ("HiCache, altered", f"PatchError: cannot place KV in blocks: 1 patch point(s) do not fit SGLang 0.5.23 (known "
             f"versions: 0.5.23).\n  {STORAGE_NAME}: source "),
        ],
    )  # fmt: skip
    def test_hicache_with_what_was_not(self, answers: dict[str, Any], case: str, text: str) -> None:
        """SGLang itself refuses models without MLA."""
        assert text in refusal(answers["cases"][case])

    def test_all_reasons_at_once(self, answers: dict[str, Any]) -> None:
        text = refusal(answers["cases"]["several"])
        assert "got block size 6 with page size 16" in text
        assert "got attention backend torch_native" in text


class TestPagesThatMayStillBeWritten:
    """A decode server with blocks keeps them long enough for Mooncake, or does not start."""

    @pytest.mark.parametrize(
        ("case", "said"),
        [
            ("unset", f"{HOLD}_TIMEOUT is unset: pages of a failed transfer are kept for 40 s instead of 30 s: Mooncake may "
                      "write for 30 s."),
            ("unset, slow Mooncake", f"{HOLD}_TIMEOUT is unset: pages of a failed transfer are kept for 101 s instead of "
                                     "30 s: Mooncake may write for 91 s."),
            ("long enough", None),
            ("off, prefill", None),
            ("off, block 1", None),
        ],
    )  # fmt: skip
    def test_it_starts(self, answers: dict[str, Any], case: str, said: str | None) -> None:
        outcome = answers["cases"][f"hold, {case}"]
        assert "error" not in outcome, outcome
        assert [line for line in outcome["warnings"] if "page" in line and "--page-size" not in line] == (
            [said] if said else []
        )

    @pytest.mark.parametrize(
        ("case", "expected", "got", "advice"),
        [
            ("too short", "40 s or more", f"{HOLD}_TIMEOUT=39", "or set it to 40 or more."),
            ("too short for Mooncake", "101 s or more", f"{HOLD}_TIMEOUT=100", "or set it to 101 or more."),
            ("off", "40 s or more", f"{HOLD} off", f"Unset {HOLD}."),
        ],
    )
    def test_it_is_refused(self, answers: dict[str, Any], case: str, expected: str, got: str, advice: str) -> None:
        text = refusal(answers["cases"][f"hold, {case}"])
        assert text.startswith(
            "BlockSizeError: --dcp-block-size 8 cannot be used here:\n  PD decode that gives pages of failed transfers away "
            "too early: expected pages of a failed transfer to be kept for "
        )
        assert f"{expected}, got {got}" in text
        assert text.endswith(advice)


class TestExcluded:
    """SGLANG_PLUGINS leaves the plugin out: what names blocks is an error, and the variable alone does nothing."""

    def test_flag(self, answers: dict[str, Any]) -> None:
        outcome = answers["excluded"]["flag"]
        assert (outcome["error"], outcome["status"]) == ("SystemExit", 2)
        assert "unrecognized arguments: --dcp-block-size 16" in outcome["message"]

    def test_keyword(self, answers: dict[str, Any]) -> None:
        assert refusal(answers["excluded"]["keyword"]).startswith("TypeError: Unexpected keyword argument")
        assert "dcp_block_size" in answers["excluded_engine"]
        assert answers["excluded_engine"].startswith("TypeError")

    def test_variable_alone_is_stock_sglang(self, answers: dict[str, Any]) -> None:
        outcome = answers["excluded"]["variable"]
        assert (outcome["page_size"], outcome["block_size"], outcome["warnings"]) == (1, None, [])
        assert answers["excluded_registered"] == {"hooks": [], "steps": [], "imported": False, "layout": False}


class TestGrouping:
    @pytest.mark.parametrize(
        ("case", "ranks"),
        [("prefill", 2), ("prefill, 8 ranks", 8), ("prefill, with a block size", 2), ("decode", 2), ("keyword", 2)],
    )
    def test_is_on_where_it_is_asked_for(self, answers: dict[str, Any], case: str, ranks: int) -> None:
        assert answers["cases"][f"group, {case}"]["group_pages"] == ranks

    def test_is_off_otherwise(self, answers: dict[str, Any]) -> None:
        assert answers["cases"]["16"]["group_pages"] == answers["cases"]["nothing asked for"]["group_pages"] == 0

    @pytest.mark.parametrize(
        ("case", "error", "text"),
        [
            ("prefill, unknown version", "PatchError", "do not fit SGLang 0.5.99"),
            ("prefill, altered", "PatchError", f"{ALLOC_EXTEND}: source"),
            ("prefill, without MLA", "BlockSizeError", "expected an MLA model"),
            ("decode, token round-robin", "BlockSizeError", "blocks of a page (--dcp-block-size 16), got"),
            ("decode, other ranks", "BlockSizeError", "expected --dcp-size 4 and blocks of a page"),
            ("neither", "BlockSizeError", "expected --disaggregation-mode prefill or decode, got null"),
            ("one", "SystemExit", "--dcp-group-pages: expected the decode servers' --dcp-size, 2 or more, got '1'"),
            ("keyword, neither", "BlockSizeError", "Engine(dcp_group_pages=...) 2 cannot be used here:"),
            ("keyword, text", "BlockSizeError", "Engine(dcp_group_pages=...): expected the decode servers' --dcp-size"),
        ],
    )
    def test_is_refused(self, answers: dict[str, Any], case: str, error: str, text: str) -> None:
        found = answers["cases"][f"group, {case}"]
        assert found["error"] == error
        assert text in found["message"]


def test_only_the_flag_and_the_start_are_hooked_until_blocks_are_asked_for(answers: dict[str, Any]) -> None:
    """All cases above only resolved arguments: nothing of the KV cache may be patched by that."""
    found = answers["registered"]
    assert found["hooks"] == ["add_flag", "carry_flag", "arm_process"]
    assert found["steps"] == ["_choose_page_size", "_choose_backend", "_finish"]
    assert not found["layout"]


class TestFacts:
    def test_base(self, answers: dict[str, Any]) -> None:
        assert answers["facts"]["base"] == dataclasses.asdict(
            Facts(
                block_size=8,
                page_size=8,
                dcp_size=2,
                tp_size=2,
                platform="cpu",
                is_mla=False,
                num_attention_heads=8,
                num_kv_heads=1,
                transfer_backend="mooncake",
            )
        )

    @pytest.mark.parametrize("name", FACTS)
    def test_follows_the_resolved_argument(self, answers: dict[str, Any], name: str) -> None:
        _, facts = FACTS[name]
        assert answers["facts"]["changes"][name] == facts

    @pytest.mark.parametrize("name", MODELS)
    def test_follows_the_model(self, answers: dict[str, Any], name: str) -> None:
        _, expected = MODELS[name]
        found = answers["models"][name]
        usual = {"num_attention_heads": 8, "num_kv_heads": 2, "block_size": 8}
        asked = [fact for fact in found if fact.startswith(("is_", "has_", "num_"))]
        assert {fact: found[fact] for fact in asked} == {
            fact: expected.get(fact, usual.get(fact, False)) for fact in asked
        }

    def test_each_is_seen_to_change(self) -> None:
        seen = {fact for cases in (FACTS, MODELS) for _, facts in cases.values() for fact in facts}
        assert {field.name for field in dataclasses.fields(Facts)} - seen == {"block_size"}
