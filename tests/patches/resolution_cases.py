"""Command lines and keywords for SGLang's argument resolution; resolve_cases.py resolves them all in one process."""

from __future__ import annotations

from typing import Any

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


def refusal(outcome: Outcome) -> str:
    assert "error" in outcome, outcome
    return f"{outcome['error']}: {outcome['message']}"
