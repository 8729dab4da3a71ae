"""``sglang-dcp-block plan``: what it refuses, as the server would, and what cannot be counted."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from plan_inputs import inputs

from sglang_dcp_block.cpu.checkpoints import tiny_config
from sglang_dcp_block.plan.inputs import InputError
from sglang_dcp_block.plan.whole import plan
from sglang_dcp_block.transfer_model.shapes import from_config, preset


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"dcp_size": 1}, "DCP off: expected --dcp-size above 1"),
            ({"dcp_size": 3}, "expected a --dcp-size that divides the TP size, got --dcp-size 3 in a TP group of 8"),
            ({"page_size": 64, "block_size": 24}, "--block-size: expected a divisor of --page-size 64, got 24"),
            ({"attention_backend": "trtllm_mla", "page_size": 16}, "got page size 16 with decode backend trtllm_mla"),
            (
                {"chunk_tokens": 100},
                "^--chunked-prefill-size: expected a multiple of the page size 16 or 32 or 64, got 100. Take 64.$",
            ),
            (
                {"chunk_tokens": 8, "block_size": 16},
                "^--chunked-prefill-size: .* 64, got 8. Take 64, or another --block",
            ),
            (
                {"chunk_tokens": 100, "page_size": 48},
                "^--chunked-prefill-size: .* 48, got 100. Take 96, or another --pa",
            ),
            (
                {"page_size": 48},
                "^--page-size: .* --chunked-prefill-size, 8192 where it is left out, got 48. .* 8160 as",
            ),
            ({"page_size": 16384}, "^--page-size: .* got 16384. .* or pass --chunked-prefill-size 16384"),
            ({"block_size": 48}, "^--block-size: .* got 48. Take another --block-size, or pass --chunked-prefill-size"),
            ({"tp_size": 0}, "--tp: expected 1 to 4096, got 0"),
            ({"dcp_size": 10**30}, "--dcp: expected 1 to 4096, got 10{30}"),
            ({"page_size": 0}, "--page-size: expected 1 to 1048576, got 0"),
            ({"block_size": 0}, "--block-size: expected 1 to 1048576, got 0"),
            ({"page_size": 10**9, "chunk_tokens": 10**9}, "--page-size: expected 1 to 1048576, got 10{9}; --chunked"),
        ],
    )
    def test_as_the_server_would(self, changes, message):
        with pytest.raises(InputError, match=message):
            plan(inputs(**changes))

    @pytest.mark.parametrize(
        ("changes", "longest"),
        [
            ({"chunk_tokens": 8191}, 120_000),
            ({"chunk_tokens": 100}, 120_000),
            ({"chunk_tokens": 1}, 120_000),
            ({"chunk_tokens": 100}, 10**8),
            ({"chunk_tokens": -1}, 120_000),
            ({"chunk_tokens": 1, "page_size": 48}, 120_000),
            ({"chunk_tokens": -1, "page_size": 48}, 10**8),
            ({"chunk_tokens": 16}, 10**8),
            ({"chunk_tokens": 1, "page_size": 1}, 10**8),
        ],
    )
    def test_a_chunk_that_is_advised_is_taken(self, changes, longest):
        with pytest.raises(InputError, match=r"^--chunked-prefill-size: expected ") as refused:
            plan(inputs(requests=f"{longest}:1", **changes))
        taken = int(re.search(r"[Tt]ake (\d+)", str(refused.value))[1])
        assert plan(inputs(requests=f"{longest}:1", **{**changes, "chunk_tokens": taken})).sendings

    @pytest.mark.parametrize(
        ("requests", "changes", "message"),
        [
            (
                "100000000:1",
                {"chunk_tokens": 1, "page_size": 1},
                "^--chunked-prefill-size: expected at most 100,000 chunks .*, got 100,000,000: .* of 1. Take 1000.$",
            ),
            ("1600001:1", {"chunk_tokens": 16}, "got 100,001: 1,600,001 tokens .*. Take 64.$"),
            ("5:1", {"chunk_tokens": -1}, "got -1. Where chunked prefill is off, a prompt is one chunk: take 64.$"),
            ("5:1", {"chunk_tokens": 10**8 + 1}, "^--chunked-prefill-size: expected 1 to 100000000, got 100000001$"),
            (
                ",".join(["100000000+100000000:100000000"] * 51),
                {},
                r"^--requests: expected at most 1,000,000,000,000,000,000 tokens in all, got 1,020,.*\. Divide the numbers",
            ),
        ],
    )
    def test_what_cannot_be_counted(self, requests, changes, message):
        with pytest.raises(InputError, match=message):
            plan(inputs(requests=requests, **changes))

    def test_the_most_that_can_be_counted(self):
        """In 64 bits, and in seconds."""
        made = plan(inputs(requests=",".join(["100000000+100000000:100000000"] * 50), tp_size=2, dcp_size=2))
        assert sum(made.by_blocks.rows) == 10**18
        assert min(made.by_blocks.rows) > 0
        assert plan(inputs(requests="1600000:1", chunk_tokens=16)).sendings

    def test_a_model_with_sparse_attention(self):
        with pytest.raises(InputError, match=r"this server would not start:\n  DeepSeek sparse attention \(DSA\)"):
            plan(inputs(shape=replace(preset("deepseek-v3"), unusual=("is_dsa",))))

    @pytest.mark.parametrize(
        ("more", "rule"),
        [
            ({"full_attention_interval": 4}, "hybrid linear attention"),
            ({"layer_types": ["indexed_attention"]}, "sparse attention"),
            ({"attention_chunk_size": 8192}, "sliding window attention"),
        ],
    )
    def test_layers_that_keep_no_kv_or_not_all_of_it(self, more, rule):
        """Counting KV in every layer would be too much, too."""
        with pytest.raises(InputError, match=rf"this server would not start:\n  {rule}"):
            plan(inputs(shape=from_config({**tiny_config("mla"), **more}, "x")))

    def test_kv_heads_that_would_be_mixed(self):
        with pytest.raises(InputError, match="KV heads split inside a DCP group"):
            plan(inputs("llama-3.1-70b"))
