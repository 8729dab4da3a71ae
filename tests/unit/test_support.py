"""What blocks are refused with: every rule, and only it, fires on its fact; the messages say what to change."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from sglang_dcp_block import support
from sglang_dcp_block.config import FLAG, GROUP_FLAG, BlockSizeError, GroupRequest, Request
from sglang_dcp_block.support import RULES, Facts, Rule, grouping_refusals, refusals, require_groupable

# A server that blocks can serve: TP8+DCP8, one KV head.
BASE = Facts(
    block_size=16,
    page_size=64,
    dcp_size=8,
    tp_size=8,
    platform="cuda",
    is_mla=False,
    num_attention_heads=32,
    num_kv_heads=1,
)
ASKED = Request(16, FLAG)

# For each rule: changes to BASE that it refuses, and what it says it got.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "DCP off": [({"dcp_size": 1}, "--dcp-size 1")],
    "block size that does not divide the page size": [
        ({"block_size": 48}, "block size 48 with page size 64"),
        ({"block_size": 128}, "block size 128 with page size 64"),
        ({"page_size": 1}, "block size 16 with page size 1"),
    ],
    "platforms other than CUDA": [
        ({"platform": p}, f"platform {p}") for p in ("hip", "npu", "xpu", "musa", "mps", "hpu")
    ],
    "attention backends without a block path": [
        ({"decode_backend": "fa3"}, "attention backend fa3"),
        ({"prefill_backend": "flashmla"}, "attention backend flashmla"),
        ({"prefill_backend": "fa4", "decode_backend": "fa4"}, "attention backend fa4"),
        ({"prefill_backend": "fa3", "decode_backend": "trtllm_mha"}, "attention backend fa3 and trtllm_mha"),
        ({"prefill_backend": "flashinfer"}, "attention backend flashinfer"),
        ({"is_mla": True, "decode_backend": "flashmla"}, "attention backend flashmla"),
    ],
    "page sizes that a page table backend does not know": [
        (
            {"is_mla": True, "decode_backend": backend, "page_size": page},
            f"page size {page} with decode backend {backend}",
        )
        for backend in ("trtllm_mla", "cutedsl_mla")
        for page in (16, 128)
    ],
    "attention TP that dcp_size does not divide": [({"tp_size": 4}, "--dcp-size 8 in a TP group of 4")],
    "query heads that dcp_size does not divide": [({"num_attention_heads": 12}, "12 query heads at --tp-size 8")],
    "KV heads split inside a DCP group": [
        ({"num_kv_heads": 2}, "2 KV heads at --tp-size 8, --dcp-size 8"),
        ({"num_kv_heads": 8}, "8 KV heads at --tp-size 8, --dcp-size 8"),
        ({"num_kv_heads": 8, "dcp_size": 2}, "8 KV heads at --tp-size 8, --dcp-size 2"),
        # As many heads as groups or fewer, and yet one group of four ranks holds the second half of one head's ranks.
        (
            {"num_kv_heads": 2, "tp_size": 12, "dcp_size": 4, "num_attention_heads": 24},
            "2 KV heads at --tp-size 12, --dcp-size 4",
        ),
    ],
    "sliding window attention": [({"has_sliding_window": True}, "a model with sliding window layers")],
    "attention sinks": [({"has_attention_sinks": True}, "a model with attention sinks")],
    "sparse attention": [({"has_sparse_layers": True}, "a model with sparse attention layers")],
    "hybrid linear attention": [({"is_hybrid_linear": True}, "a model with linear attention layers")],
    "encoder-decoder models": [({"is_encoder_decoder": True}, "an encoder-decoder model")],
    "DeepSeek sparse attention (DSA)": [({"is_dsa": True}, "a model with DSA")],
    "diffusion LLMs": [({"diffusion_llm": True}, "--dllm-algorithm")],
    "speculative decoding": [({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE")],
    "FP4 KV cache": [({"kv_cache_dtype": "fp4_e2m1"}, "--kv-cache-dtype fp4_e2m1")],
    "FP8 KV cache with Triton MLA": [
        (
            {"is_mla": True, "kv_cache_dtype": "fp8_e4m3", "prefill_backend": "flashinfer"},
            "--kv-cache-dtype fp8_e4m3 with --attention-backend triton",
        )
    ],
    "pipeline parallelism": [({"pp_size": 2}, "--pp-size 2")],
    "two-batch overlap": [({"two_batch_overlap": True}, "--enable-two-batch-overlap")],
    "unified memory pool": [({"unified_memory": True}, "--enable-unified-memory")],
    "HiCache transfers that nobody tried": [
        (
            {"hierarchical_cache": True, "host_io_backend": backend, "host_layout": layout},
            f"--hicache-io-backend {backend} with --hicache-mem-layout {layout}",
        )
        for backend, layout in (
            ("kernel", "page_first_direct"),
            ("kernel", "page_head"),
            ("direct", "page_first"),
            ("kernel_ascend", "page_first_kv_split"),
        )
    ],
    "HiCache with prefill/decode disaggregation": [
        (
            {"hierarchical_cache": True, "disaggregation_mode": "prefill", "transfer_backend": "mooncake"},
            "--enable-hierarchical-cache with --disaggregation-mode prefill",
        )
    ],
    "HiCache storage that nobody tried": [
        ({"hierarchical_cache": True, "host_storage": storage}, f"--hicache-storage-backend {storage}")
        for storage in ("mooncake", "nixl", "dynamic")
    ],
    "decode KV offload": [({"decode_kv_offload": True}, "--disaggregation-decode-enable-offload-kvcache")],
    "LMCache": [({"lmcache": True}, "--enable-lmcache")],
    "HiSparse": [({"hisparse": True}, "--enable-hisparse")],
    "KV cache sharding": [({"kv_cache_sharding": True}, "--enable-kv-cache-sharding")],
    "prefill context parallelism": [
        ({"prefill_context_parallel": True}, "--enable-prefill-cp or --attn-cp-size above 1")
    ],
    "PD multiplexing": [({"pd_multiplexing": True}, "--enable-pdmux")],
    "PD over anything but Mooncake": [
        (
            {
                "disaggregation_mode": mode,
                "transfer_backend": "nixl",
                "is_mla": True,
                "prefill_backend": "flashinfer",
                "decode_backend": "flashinfer",
            },
            "--disaggregation-transfer-backend nixl",
        )
        for mode in ("prefill", "decode")
    ],
    "PD decode of GQA and MHA models": [
        ({"disaggregation_mode": "decode", "transfer_backend": "mooncake_tcp"}, "a model without MLA")
    ],
    "PD decode that gives pages of failed transfers away too early": [
        ({"early_release": "expected 40 s or more, got V=39: ... Unset V."}, "expected 40 s or more, got V=39")
    ],
    "Ray": [({"ray": True}, "--use-ray")],
    "the Rust server": [({"rust_server": True}, "SGLANG_RUST_SERVER")],
    "elastic expert parallelism": [({"elastic_ep": True}, "--elastic-ep-backend")],
}
CASES = [
    pytest.param(feature, changes, got, id=f"{feature}-{i}")
    for feature, cases in REFUSED.items()
    for i, (changes, got) in enumerate(cases)
]


def of_feature(feature: str) -> Rule:
    (rule,) = [rule for rule in RULES if rule.feature == feature]
    return rule


def test_the_base_passes() -> None:
    assert refusals(BASE) == []
    support.require_supported(BASE, ASKED)


@pytest.mark.parametrize(("feature", "changes", "got"), CASES)
def test_a_rule_fires_on_its_fact_alone(feature: str, changes: dict[str, Any], got: str) -> None:
    rule = of_feature(feature)
    facts = dataclasses.replace(BASE, **changes)
    (line,) = refusals(facts)
    if rule.exact is None:
        assert line == f"{feature}: expected {rule.expected}, got {got}. {rule.advice}"
    assert line.startswith(f"{feature}: expected ")
    assert got in line
    assert line.endswith(".")
    with pytest.raises(BlockSizeError, match=re.escape(got)):
        support.require_supported(facts, ASKED)


def test_every_rule_has_a_case() -> None:
    assert set(REFUSED) == {rule.feature for rule in RULES}
    assert len({rule.feature for rule in RULES}) == len(RULES)


def test_every_fact_is_asked_for() -> None:
    """A fact that no rule reads is a refusal that somebody forgot to write."""
    read: set[str] = set()

    class Spy:
        def __getattr__(self, name: str) -> Any:
            read.add(name)
            value = getattr(Facts, name, None)
            return value.fget(self) if isinstance(value, property) else getattr(BASE, name)

    for rule in RULES:
        rule.got(Spy())  # type: ignore[arg-type]
    unread = {field.name for field in dataclasses.fields(Facts)} - read
    # Which transfer engine moves KV is asked for under disaggregation only, how HiCache moves it only with HiCache.
    assert unread <= {"transfer_backend", "host_io_backend", "host_layout"}, unread


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 64},
        {"block_size": 1, "page_size": 1},
        {"block_size": 6, "page_size": 18},
        {"platform": "cpu"},
        {"dcp_size": 4, "num_kv_heads": 2},
        {"dcp_size": 2, "num_kv_heads": 4},
        {"dcp_size": 2, "num_kv_heads": 2},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"is_mla": True, "num_attention_heads": 128, "num_kv_heads": 128},
        {"is_mla": True, "num_kv_heads": 32, "prefill_backend": "flashinfer", "decode_backend": "flashinfer"},
        {"tp_size": 12, "dcp_size": 4, "num_attention_heads": 24, "num_kv_heads": 3},
        {"is_mla": True, "prefill_backend": "trtllm_mla", "decode_backend": "trtllm_mla", "page_size": 32},
        {
            "is_mla": True,
            "prefill_backend": "trtllm_mla",
            "decode_backend": "cutedsl_mla",
            "kv_cache_dtype": "fp8_e4m3",
        },
        {"is_mla": True, "prefill_backend": "trtllm_mla", "decode_backend": "flashinfer", "page_size": 16},
        {"hierarchical_cache": True},
        {"hierarchical_cache": True, "host_storage": "file"},
        {"hierarchical_cache": True, "host_io_backend": "direct", "host_layout": "page_first_direct"},
        {"host_layout": "page_head"},
    ],
    ids=str,
)
def test_what_is_supported_passes(changes: dict[str, Any]) -> None:
    assert refusals(dataclasses.replace(BASE, **changes)) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "expected triton for GQA and MHA models, got attention backend fa3. Pass it as"),
        (
            {"is_mla": True},
            "expected flashinfer or triton or trtllm_mla or cutedsl_mla for MLA models, got attention backend fa3. Pass one "
            "of these as",
        ),
        (
            {"is_mla": True, "platform": "cpu"},
            "expected flashinfer or triton for MLA models on CPUs, got attention backend fa3. Pass one of these as",
        ),
    ],
)
def test_backends_of_this_kind_of_model_are_named(changes: dict[str, Any], sentence: str) -> None:
    both = {"prefill_backend": "fa3", "decode_backend": "fa3"}
    (line,) = refusals(dataclasses.replace(BASE, **both, **changes))
    assert line == (
        f"attention backends without a block path: {sentence} --attention-backend, or leave the backends unset."
    )


@pytest.mark.parametrize("backend", ["trtllm_mla", "cutedsl_mla"])
def test_kernels_of_gpus_are_no_backends_of_a_cpu(backend: str) -> None:
    facts = dataclasses.replace(BASE, is_mla=True, platform="cpu", decode_backend=backend)
    (line,) = refusals(facts)
    assert f"got attention backend {backend}. Pass one of these as --prefill-attention-backend and as --decode-" in line


@pytest.mark.parametrize(
    "source", ["--dcp-interleave-size", "SGLANG_DCP_BLOCK_SIZE", "Engine(dcp_block_size=...)"]
)  # fmt: skip
def test_a_refusal_names_the_way_that_blocks_came_in(source: str) -> None:
    facts = dataclasses.replace(BASE, dcp_size=1, platform="hip")
    with pytest.raises(BlockSizeError) as refused:
        support.require_supported(facts, Request("auto", source))
    first, off, platform = str(refused.value).splitlines()
    assert first == f"{source} auto cannot be used here:"
    assert off.endswith(f"or leave {source} out.")
    assert platform.endswith(f"Leave {source} out on this platform.")


def test_a_refusal_of_grouping_names_the_way_it_came_in() -> None:
    with pytest.raises(BlockSizeError) as refused:
        require_groupable(BASE, GroupRequest(8, "Engine(dcp_group_pages=...)"))
    first, line = str(refused.value).splitlines()
    assert first == "Engine(dcp_group_pages=...) 8 cannot be used here:"
    assert line.endswith("Leave Engine(dcp_group_pages=...) out.")


def test_several_refusals_are_listed_together() -> None:
    facts = dataclasses.replace(BASE, decode_backend="fa3", pp_size=4, unified_memory=True)
    with pytest.raises(BlockSizeError) as refused:
        support.require_supported(facts, ASKED)
    first, *lines = str(refused.value).splitlines()
    assert first == f"{FLAG} 16 cannot be used here:"
    assert [line.strip().partition(":")[0] for line in lines] == [
        "attention backends without a block path",
        "pipeline parallelism",
        "unified memory pool",
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.feature)
def test_texts_read_as_sentences(rule: Rule) -> None:
    """They are joined as "feature: expected X, got Y. Advice."."""
    assert rule.feature
    assert not rule.expected.endswith(".")
    assert rule.advice.endswith(".")
    assert rule.advice[0].isupper()


def kv_heads_by_rank(tp_size: int, num_kv_heads: int) -> list[set[int]]:
    """The KV heads each rank stores: SGLang deals them out, or repeats each one on a run of ranks."""
    if num_kv_heads >= tp_size:
        each = num_kv_heads // tp_size
        return [set(range(rank * each, (rank + 1) * each)) for rank in range(tp_size)]
    repeats = tp_size // num_kv_heads
    return [{rank // repeats} for rank in range(tp_size)]


@pytest.mark.parametrize("tp_size", range(2, 25))
def test_kv_heads_are_refused_exactly_where_a_group_mixes_them(tp_size: int) -> None:
    sizes = [size for size in range(2, tp_size + 1) if tp_size % size == 0]
    # SGLang itself asks that one number divides the other.
    counts = [n for n in range(1, 3 * tp_size + 1) if tp_size % n == 0 or n % tp_size == 0]
    for dcp_size in sizes:
        for num_kv_heads in counts:
            held = kv_heads_by_rank(tp_size, num_kv_heads)
            mixed = any(held[rank] != held[rank - rank % dcp_size] for rank in range(tp_size))
            facts = dataclasses.replace(
                BASE,
                tp_size=tp_size,
                dcp_size=dcp_size,
                num_kv_heads=num_kv_heads,
                num_attention_heads=math.lcm(tp_size, num_kv_heads),
            )
            lines = refusals(facts)
            assert [line.partition(":")[0] for line in lines] == ["KV heads split inside a DCP group"] * mixed, (
                tp_size, dcp_size, num_kv_heads,
            )  # fmt: skip


# A prefill server that can group its pages for 8 decode ranks, and their decode server.
PREFILL = dataclasses.replace(
    BASE, block_size=1, dcp_size=1, is_mla=True, prefill_backend="fa3", decode_backend="fa3",
    disaggregation_mode="prefill", transfer_backend="mooncake",
)  # fmt: skip
DECODE = dataclasses.replace(
    BASE, block_size=64, is_mla=True, disaggregation_mode="decode", transfer_backend="mooncake_tcp",
    prefill_backend="flashinfer", decode_backend="flashinfer",
)  # fmt: skip


class TestGrouping:
    def test_both_sides_of_a_pair_can(self) -> None:
        assert grouping_refusals(PREFILL, 8) == []
        assert grouping_refusals(DECODE, 8) == []
        assert refusals(DECODE) == []

    @pytest.mark.parametrize(
        ("facts", "changes", "said"),
        [
            (PREFILL, {"disaggregation_mode": "null"}, "expected --disaggregation-mode prefill or decode, got null"),
            (PREFILL, {"dcp_size": 8}, "expected --dcp-size 1, got 8"),
            (PREFILL, {"page_size": 1}, "expected the decode servers' --page-size, 2 or more, got 1"),
            (PREFILL, {"is_mla": False}, "expected an MLA model"),
            (
                DECODE,
                {"dcp_size": 4},
                "expected --dcp-size 8 and blocks of a page (--dcp-block-size 64), got --dcp-size 4",
            ),
            (DECODE, {"block_size": 32}, "got --dcp-size 8 and blocks of 32"),
        ],
    )
    def test_is_refused_otherwise(self, facts: Facts, changes: dict[str, Any], said: str) -> None:
        (line,) = grouping_refusals(dataclasses.replace(facts, **changes), 8)
        assert said in line
        assert line.endswith(".")
        with pytest.raises(BlockSizeError, match=r"^--dcp-group-pages 8 cannot be used here:\n  ") as refused:
            require_groupable(dataclasses.replace(facts, **changes), GroupRequest(8, GROUP_FLAG))
        assert line in str(refused.value)

    @pytest.mark.parametrize("feature", sorted(support._GROUPING_RULES))
    def test_what_its_allocator_or_transfer_was_not_tested_with_is_refused(self, feature: str) -> None:
        """The rules for blocks that hold here, too."""
        changes, _ = REFUSED[feature][0]
        kept = {"disaggregation_mode": "prefill", "is_mla": True, "dcp_size": 1}
        lines = grouping_refusals(dataclasses.replace(PREFILL, **{**changes, **kept}), 8)
        assert [line.partition(":")[0] for line in lines] == [feature]

    def test_backends_and_heads_are_a_prefill_servers_own_matter(self) -> None:
        free = dataclasses.replace(PREFILL, num_attention_heads=12, num_kv_heads=3, kv_cache_dtype="fp4_e2m1")
        assert grouping_refusals(free, 8) == []
