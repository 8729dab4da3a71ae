"""``sglang-dcp-block plan``: what it recommends, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_inputs import inputs

from sglang_dcp_block.plan.whole import plan
from sglang_dcp_block.transfer_model.links import presets
from sglang_dcp_block.transfer_model.shapes import preset


class TestAdvice:
    def test_long_requests_take_blocks_of_the_longest_page(self):
        advice = plan(inputs(requests="long")).advice
        assert (advice.page_size, advice.block_size, advice.group_pages, advice.sent) == (64, 64, 8, "blocks_grouped")
        assert advice.decode_flags == (
            "--tp", "8", "--dcp-size", "8", "--page-size", "64", "--dcp-block-size", "64", "--dcp-group-pages", "8"
        )  # fmt: skip
        assert advice.prefill_flags == ("--page-size", "64", "--dcp-group-pages", "8")

    def test_shorter_requests_take_shorter_blocks(self):
        blocks = [plan(inputs(requests=f"{tokens}:1")).advice.block_size for tokens in (32_000, 600, 30)]
        assert blocks == [64, 16, 4]

    def test_blocks_that_are_packed_are_not_grouped(self):
        """Short ones go through SGLang's pack buffer, whatever the order of pages is."""
        made = plan(inputs(shape=replace(preset("deepseek-v3"), element_bytes=1), page_size=16))
        assert (made.advice.block_size, made.advice.sent, made.advice.group_pages) == (16, "blocks_packed", None)

    def test_where_nothing_fits_balance_is_not_given_up(self):
        made = plan(inputs(requests="20+5:100"))
        assert made.advice.block_size == 1
        assert made.advice.warnings

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"block_size": 1}, "The block was given."),
            ({"page_size": 1}, "A page of one token has no longer block."),
            ({"requests": "20+5:100"}, "No longer block keeps the fullest rank within 1.1 times the mean. Longer"),
            (
                {"requests": "128000+1000:10", "max_imbalance": 1},
                "within 1 times the mean. Longer requests, or a higher",
            ),
        ],
    )
    def test_why_it_says_no_blocks(self, changes, reason):
        assert reason in plan(inputs(**changes)).advice.reasons[0]

    def test_limits_are_kept_where_anything_keeps_them(self):
        made = plan(inputs(requests="700:1", page_size=64, max_imbalance=1.02, max_rounding=1))
        taken = (made.advice.page_size, made.advice.block_size)
        (chosen,) = (one for one in made.candidates if (one.page_size, one.block_size) == taken)
        assert (chosen.block_size, chosen.imbalance) == (8, 88 * 8 / 700)
        assert not chosen.against
        assert not made.advice.warnings
        assert all(c.against for c in made.candidates if c.block_size > chosen.block_size)

    def test_what_no_choice_keeps_is_said(self):
        made = plan(inputs(requests="3:9", max_rounding=0.1))
        assert any("no choice is within the limits" in warning for warning in made.advice.warnings)

    def test_a_share_that_is_small_is_not_nothing(self):
        made = plan(inputs(requests="128000+1:1", max_rounding=0))
        assert "0.398% of what is allocated holds nothing, more than 0%" in made.candidates[0].against

    def test_given_sizes_are_taken(self):
        advice = plan(inputs(page_size=64, block_size=16)).advice
        assert (advice.page_size, advice.block_size, advice.group_pages) == (64, 16, None)
        assert advice.sent == "blocks"  # 18,432 bytes
        assert plan(inputs(page_size=64, block_size=8)).advice.sent == "blocks_packed"

    def test_a_given_block_finds_a_page(self):
        assert plan(inputs(block_size=32)).advice.page_size == 32
        assert plan(inputs(block_size=128)).advice.page_size == 128

    def test_page_tables_get_a_page_that_they_know(self):
        made = plan(inputs(attention_backend="trtllm_mla", max_imbalance=1.001))
        assert made.advice.page_size in (32, 64)
        rule = "page sizes that a page table backend does not know"
        assert {one.page_size for one in made.candidates if rule in one.against} == {16}

    @pytest.mark.parametrize(("chunk", "left_out"), [(8176, {32, 64}), (16, {32, 64}), (96, {64}), (64, set())])
    def test_pages_that_do_not_divide_the_chunk_are_left_out(self, chunk, left_out):
        """Nobody typed them; what is against them is said."""
        made = plan(inputs(chunk_tokens=chunk))
        rule = f"chunks of {chunk} tokens that the page does not divide"
        assert {one.page_size for one in made.candidates if rule in one.against} == left_out
        assert made.advice.page_size not in left_out

    def test_faster_packing_is_said(self):
        """Short blocks that go as they lie, on a link where a segment costs much."""
        made = plan(inputs(page_size=64, block_size=16, link=presets()["nvlink"]))
        assert any(
            "packed is faster here than what will happen (blocks)" in warning for warning in made.advice.warnings
        )

    def test_models_without_transfers_gain_nothing(self):
        made = plan(
            inputs("llama-3.1-70b", tp_size=8, dcp_size=8, shape=replace(preset("llama-3.1-70b"), num_kv_heads=1))
        )
        assert (made.advice.block_size, made.advice.sent, made.sendings) == (1, None, ())
        assert "--dcp-block-size" not in made.advice.decode_flags
        assert any("PD decode of GQA and MHA models" in reason for reason in made.advice.reasons)
