"""What blocks can be combined with.  Each refusal is a rule over plain :class:`Facts`; the docs' table is made from them.

A combination nobody has tested is refused at start, with what was found and what to change: wrong tokens are never an
acceptable way to learn that two features do not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_dcp_block.config import FLAG, GROUP_FLAG, BlockSizeError, GroupRequest, Request

# Attention backends whose DCP path understands blocks, by the kind of attention.
GQA_BACKENDS = ("triton",)
MLA_BACKENDS = ("flashinfer", "triton", "trtllm_mla", "cutedsl_mla")
# Decode kernels that take page tables, with the page sizes in tokens that they know.
PAGE_TABLE_BACKENDS = ("trtllm_mla", "cutedsl_mla")
PAGE_TABLE_SIZES = (32, 64)
# HiCache: I/O backend and layout of host memory, in the pairs that move MLA's KV; and where pages may go from there.
HOST_TRANSFERS = (
    ("kernel", "layer_first"),
    ("kernel", "page_first"),
    ("direct", "layer_first"),
    ("direct", "page_first_direct"),
)
HOST_STORAGE = ("file",)


@dataclass(frozen=True, slots=True)
class Facts:
    """A server's resolved configuration, as far as the rules ask."""

    block_size: int  # tokens
    page_size: int  # tokens, physical, per rank
    dcp_size: int
    tp_size: int  # the TP group that attention runs in
    platform: str  # "cuda", "cpu", "rocm", ...
    is_mla: bool
    num_attention_heads: int  # of the whole model
    num_kv_heads: int  # of the whole model
    prefill_backend: str = "triton"
    decode_backend: str = "triton"
    kv_cache_dtype: str = "auto"
    pp_size: int = 1
    speculative_algorithm: str | None = None
    disaggregation_mode: str = "null"
    transfer_backend: str = ""
    is_dsa: bool = False
    has_sliding_window: bool = False
    has_attention_sinks: bool = False
    has_sparse_layers: bool = False
    is_hybrid_linear: bool = False
    is_encoder_decoder: bool = False
    unified_memory: bool = False
    hierarchical_cache: bool = False
    host_io_backend: str = "kernel"
    host_layout: str = "page_first"
    host_storage: str | None = None
    decode_kv_offload: bool = False
    two_batch_overlap: bool = False
    diffusion_llm: bool = False
    kv_cache_sharding: bool = False
    prefill_context_parallel: bool = False
    hisparse: bool = False
    lmcache: bool = False
    pd_multiplexing: bool = False
    ray: bool = False
    rust_server: bool = False
    elastic_ep: bool = False
    early_release: str | None = None  # why a decode server would give pages of failed transfers away too early

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends that the model's kind of attention may use with blocks on this platform."""
        if not self.is_mla:
            return GQA_BACKENDS
        return tuple(b for b in MLA_BACKENDS if self.platform != "cpu" or b not in PAGE_TABLE_BACKENDS)

    @property
    def is_triton_mla_under_dcp(self) -> bool:
        """A path that SGLang lacks and the plugin adds, also with block size 1."""
        return self.is_mla and self.dcp_size > 1 and "triton" in (self.prefill_backend, self.decode_backend)

    @property
    def leaves_blocks_to_others(self) -> bool:
        """It sends in the blocks of each decode server, and ignores a block size of its own."""
        return self.disaggregation_mode == "prefill" and self.dcp_size == 1

    @property
    def kv_head_groups(self) -> int:
        """Over how many DCP groups the KV heads are dealt: tp_size // dcp_size."""
        return max(1, self.tp_size // self.dcp_size)


@dataclass(frozen=True, slots=True)
class Rule:
    """One combination that is refused."""

    feature: str  # how the docs name it
    got: Callable[[Facts], str | None]  # what was found that is refused, or None
    expected: str
    advice: str
    exact: Callable[[Facts], str] | None = None  # expected, got and advice for these facts, where they say more

    def refusal(self, facts: Facts) -> str | None:
        """One line with what was expected, what was got and what to do; None where this rule has nothing against it."""
        got = self.got(facts)
        if got is None:
            return None
        return f"{self.feature}: " + (
            self.exact(facts) if self.exact else f"expected {self.expected}, got {got}. {self.advice}"
        )


def _is(flag: str, text: str) -> Callable[[Facts], str | None]:
    return lambda facts: text if getattr(facts, flag) else None


def _unsupported_backend(facts: Facts) -> str | None:
    wrong = [b for b in dict.fromkeys((facts.prefill_backend, facts.decode_backend)) if b not in facts.backends]
    return f"attention backend {' and '.join(wrong)}" if wrong else None


def _backends_of_this_model(facts: Facts) -> str:
    kind = "MLA models" if facts.is_mla else "GQA and MHA models"
    where = " on CPUs" if facts.platform == "cpu" else ""
    flags = "--attention-backend"
    if facts.prefill_backend != facts.decode_backend:
        flags = "--prefill-attention-backend and as --decode-attention-backend"
    return (
        f"expected {' or '.join(facts.backends)} for {kind}{where}, got {_unsupported_backend(facts)}. "
        f"Pass {'it' if len(facts.backends) == 1 else 'one of these'} as {flags}, or leave the backends unset."
    )


def _wrong_page_for_table(facts: Facts) -> str | None:
    """SGLang corrects the page size itself where the backend is named; this holds however the backend was chosen."""
    if facts.decode_backend not in PAGE_TABLE_BACKENDS or facts.page_size in PAGE_TABLE_SIZES:
        return None
    return f"page size {facts.page_size} with decode backend {facts.decode_backend}"


def _mixed_kv_heads(facts: Facts) -> str | None:
    """Every rank of a DCP group must hold the same KV head.

    SGLang gives rank r of n the KV head r * num_kv_heads // n, and DCP groups are runs of neighbouring ranks; so no head
    begins inside a group exactly where the heads divide the groups.
    """
    if facts.is_mla or facts.dcp_size == 1 or facts.kv_head_groups % facts.num_kv_heads == 0:
        return None
    return f"{facts.num_kv_heads} KV heads at --tp-size {facts.tp_size}, --dcp-size {facts.dcp_size}"


def _wrong_host_transfer(facts: Facts) -> str | None:
    pair = (facts.host_io_backend, facts.host_layout)
    if not facts.hierarchical_cache or pair in HOST_TRANSFERS:
        return None
    return "--hicache-io-backend {} with --hicache-mem-layout {}".format(*pair)


RULES: tuple[Rule, ...] = (
    Rule(
        "DCP off",
        lambda f: f"--dcp-size {f.dcp_size}" if f.dcp_size == 1 else None,
        "--dcp-size above 1: blocks are dealt over DCP ranks",
        f"Pass --dcp-size (8 with --tp 8, say), or leave {FLAG} out.",
    ),
    Rule(
        "block size that does not divide the page size",
        lambda f: f"block size {f.block_size} with page size {f.page_size}" if f.page_size % f.block_size else None,
        "a block size that divides the page size",
        f"Pass a --page-size that is a multiple of the block size, or {FLAG} auto.",
    ),
    Rule(
        "platforms other than CUDA",
        lambda f: f"platform {f.platform}" if f.platform not in ("cuda", "cpu") else None,
        "NVIDIA CUDA (or the CPU environment of sglang_dcp_block.cpu)",
        f"Leave {FLAG} out on this platform.",
    ),
    Rule(
        "attention backends without a block path",
        _unsupported_backend,
        f"{' or '.join(GQA_BACKENDS)} for GQA and MHA models, {' or '.join(MLA_BACKENDS)} for MLA models",
        "Pass one of these as --attention-backend, or leave the backends unset.",
        _backends_of_this_model,
    ),
    Rule(
        "page sizes that a page table backend does not know",
        _wrong_page_for_table,
        f"a page size of {' or '.join(map(str, PAGE_TABLE_SIZES))} for {' and '.join(PAGE_TABLE_BACKENDS)}",
        "Pass such a --page-size.",
    ),
    Rule(
        "attention TP that dcp_size does not divide",
        lambda f: f"--dcp-size {f.dcp_size} in a TP group of {f.tp_size}" if f.tp_size % f.dcp_size else None,
        "a --dcp-size that divides the TP size",
        "Change --tp-size or --dcp-size.",
    ),
    Rule(
        "query heads that dcp_size does not divide",
        lambda f: (
            f"{f.num_attention_heads} query heads at --tp-size {f.tp_size}" if f.num_attention_heads % f.tp_size else None
        ),
        "the same whole number of query heads on every rank",
        "Choose a --tp-size that divides the head count.",
    ),
    Rule(
        "KV heads split inside a DCP group",
        _mixed_kv_heads,
        "a number of KV heads that divides tp_size / dcp_size, so that all ranks of a DCP group hold the same head",
        "Use a smaller --dcp-size or a larger --tp-size.",
    ),
    Rule("sliding window attention", _is("has_sliding_window", "a model with sliding window layers"),
         "full attention in every layer", f"Leave {FLAG} out for this model."),
    Rule("attention sinks", _is("has_attention_sinks", "a model with attention sinks"),
         "attention without sinks", f"Leave {FLAG} out for this model."),
    Rule("sparse attention", _is("has_sparse_layers", "a model with sparse attention layers"),
         "full attention in every layer", f"Leave {FLAG} out for this model."),
    Rule("hybrid linear attention", _is("is_hybrid_linear", "a model with linear attention layers"),
         "softmax attention in every layer", f"Leave {FLAG} out for this model."),
    Rule("encoder-decoder models", _is("is_encoder_decoder", "an encoder-decoder model"),
         "a decoder-only model", f"Leave {FLAG} out for this model."),
    Rule("DeepSeek sparse attention (DSA)", _is("is_dsa", "a model with DSA"),
         "dense attention", f"Leave {FLAG} out for this model."),
    Rule("diffusion LLMs", _is("diffusion_llm", "--dllm-algorithm"),
         "an autoregressive model", f"Leave {FLAG} out for this model."),
    Rule(
        "speculative decoding",
        lambda f: f"--speculative-algorithm {f.speculative_algorithm}" if f.speculative_algorithm else None,
        "no speculative decoding",
        "Leave --speculative-algorithm out.",
    ),
    Rule(
        "FP4 KV cache",
        lambda f: f"--kv-cache-dtype {f.kv_cache_dtype}" if "fp4" in f.kv_cache_dtype else None,
        "a KV cache of 8 or 16 bits",
        "Pass --kv-cache-dtype auto or fp8_e4m3.",
    ),
    Rule(
        "FP8 KV cache with Triton MLA",
        lambda f: (
            f"--kv-cache-dtype {f.kv_cache_dtype} with --attention-backend triton"
            if f.is_mla and "fp8" in f.kv_cache_dtype and "triton" in (f.prefill_backend, f.decode_backend)
            else None
        ),
        "a KV cache in the model's own type",
        "Pass --kv-cache-dtype auto, or --attention-backend flashinfer.",
    ),
    Rule("pipeline parallelism", lambda f: f"--pp-size {f.pp_size}" if f.pp_size > 1 else None,
         "--pp-size 1", "Use tensor parallelism alone."),
    Rule("two-batch overlap", _is("two_batch_overlap", "--enable-two-batch-overlap"),
         "no two-batch overlap", "Leave the flag out."),
    Rule("unified memory pool", _is("unified_memory", "--enable-unified-memory"),
         "the static KV pool", "Leave the flag out."),
    Rule(
        "HiCache transfers that nobody tried",
        _wrong_host_transfer,
        "one of " + ", ".join(f"{backend} with {layout}" for backend, layout in HOST_TRANSFERS),
        "Leave --hicache-io-backend and --hicache-mem-layout out, or pass such a pair.",
    ),
    Rule(
        "HiCache with prefill/decode disaggregation",
        lambda f: (
            f"--enable-hierarchical-cache with --disaggregation-mode {f.disaggregation_mode}"
            if f.hierarchical_cache and f.disaggregation_mode != "null"
            else None
        ),
        "HiCache on a server that prefills and decodes",
        "Leave --enable-hierarchical-cache out.",
    ),
    Rule(
        "HiCache storage that nobody tried",
        lambda f: (
            f"--hicache-storage-backend {f.host_storage}" if f.host_storage not in (None, *HOST_STORAGE) else None
        ),
        f"no third tier, or {' or '.join(HOST_STORAGE)}",
        f"Leave --hicache-storage-backend out, or pass {' or '.join(HOST_STORAGE)}.",
    ),
    Rule("decode KV offload", _is("decode_kv_offload", "--disaggregation-decode-enable-offload-kvcache"),
         "no decode KV offload", "Leave the flag out."),
    Rule("LMCache", _is("lmcache", "--enable-lmcache"), "SGLang's own radix cache", "Leave the flag out."),
    Rule("HiSparse", _is("hisparse", "--enable-hisparse"), "no HiSparse", "Leave the flag out."),
    Rule("KV cache sharding", _is("kv_cache_sharding", "--enable-kv-cache-sharding"),
         "DCP as the only way of splitting the KV cache", "Leave the flag out."),
    Rule("prefill context parallelism", _is("prefill_context_parallel", "--enable-prefill-cp or --attn-cp-size above 1"),
         "no prefill context parallelism", "Leave the flag out."),
    Rule("PD multiplexing", _is("pd_multiplexing", "--enable-pdmux"), "no PD multiplexing", "Leave the flag out."),
    Rule(
        "PD over anything but Mooncake",
        lambda f: (
            f"--disaggregation-transfer-backend {f.transfer_backend}"
            if f.disaggregation_mode != "null" and not f.transfer_backend.startswith("mooncake")
            else None
        ),
        "mooncake or mooncake_tcp",
        "Pass --disaggregation-transfer-backend mooncake.",
    ),
    Rule(
        "PD decode of GQA and MHA models",
        lambda f: "a model without MLA" if f.disaggregation_mode == "decode" and not f.is_mla else None,
        "an MLA model: SGLang relays nothing else out to DCP",
        f"Leave {FLAG} and --dcp-size out on this decode server.",
    ),
    Rule(
        "PD decode that gives pages of failed transfers away too early",
        lambda f: f.early_release,
        "pages to be kept for as long as Mooncake may write them, and 10 s",
        "Unset the variable that is named, or raise it.",
        lambda f: str(f.early_release),
    ),
    Rule("Ray", _is("ray", "--use-ray"), "schedulers started by SGLang itself", "Leave --use-ray out."),
    Rule("the Rust server", _is("rust_server", "SGLANG_RUST_SERVER"), "the Python HTTP server", "Unset the variable."),
    Rule("elastic expert parallelism", _is("elastic_ep", "--elastic-ep-backend"),
         "a fixed set of ranks", "Leave the flag out."),
)  # fmt: skip


def refusals(facts: Facts) -> list[str]:
    """One line for each rule that refuses ``facts``: expected, got, what to do."""
    return [line for rule in RULES if (line := rule.refusal(facts)) is not None]


def require_supported(facts: Facts, request: Request) -> None:
    """Refuse ``facts`` if any rule does.

    Args:
        request: what was asked for; errors name the way it came in.
    Raises:
        BlockSizeError: naming every refused combination at once.
    """
    _refuse(refusals(facts), request, FLAG)


def _refuse(lines: list[str], request: Request | GroupRequest, flag: str) -> None:
    if lines:
        # Rules speak of the flag; who set the variable or the keyword must find that one.
        lines = [line.replace(flag, request.source) for line in lines]
        raise BlockSizeError(f"{request} cannot be used here:\n  " + "\n  ".join(lines))


_LEAVE_OUT = f"Leave {GROUP_FLAG} out."
# Rules for blocks that hold for a prefill server's allocator and transfer, too.
_GROUPING_RULES = frozenset(
    {
        "platforms other than CUDA",
        "sliding window attention",
        "sparse attention",
        "hybrid linear attention",
        "encoder-decoder models",
        "DeepSeek sparse attention (DSA)",
        "diffusion LLMs",
        "speculative decoding",
        "pipeline parallelism",
        "unified memory pool",
        "HiCache with prefill/decode disaggregation",
        "decode KV offload",
        "LMCache",
        "HiSparse",
        "KV cache sharding",
        "prefill context parallelism",
        "PD multiplexing",
        "PD over anything but Mooncake",
    }
)


def grouping_refusals(facts: Facts, group_pages: int) -> list[str]:
    """One line for each reason why pages cannot be grouped for ``group_pages`` decode ranks."""
    mode = facts.disaggregation_mode
    if mode not in ("prefill", "decode"):
        return [
            f"servers that transfer nothing: expected --disaggregation-mode prefill or decode, got {mode}. {_LEAVE_OUT}"
        ]
    lines = [
        f"{rule.feature}: expected {rule.expected}, got {got}. {_LEAVE_OUT}"
        for rule in RULES
        if rule.feature in _GROUPING_RULES and (got := rule.got(facts)) is not None
    ]
    if not facts.is_mla:
        lines.append(f"models without MLA: expected an MLA model, which decode servers with blocks need. {_LEAVE_OUT}")
    if mode == "prefill":
        if facts.dcp_size > 1:
            lines.append(
                f"prefill servers with DCP: expected --dcp-size 1, got {facts.dcp_size}: pages are copied as they are "
                f"to decode servers of the same size. {_LEAVE_OUT}"
            )
        if facts.page_size < 2:
            lines.append(
                f"pages of one token: expected the decode servers' --page-size, 2 or more, got {facts.page_size}. "
                "Pass --page-size on this server, too."
            )
    elif (facts.dcp_size, facts.block_size) != (group_pages, facts.page_size):
        lines.append(
            f"decode servers of another layout: expected --dcp-size {group_pages} and blocks of a page "
            f"({FLAG} {facts.page_size}), got --dcp-size {facts.dcp_size} and blocks of {facts.block_size}. "
            f"Pass {GROUP_FLAG} with this server's --dcp-size, and {FLAG} auto."
        )
    return lines


def require_groupable(facts: Facts, request: GroupRequest) -> None:
    """Refuse to group pages for ``request.ranks`` decode ranks if anything stands against it.

    Raises:
        BlockSizeError: naming every reason at once.
    """
    _refuse(grouping_refusals(facts, request.ranks), request, GROUP_FLAG)
