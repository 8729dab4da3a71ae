"""``sglang-dcp-block plan``: laws of its figures."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_inputs import inputs

from sglang_dcp_block.cpu.checkpoints import tiny_config
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.demo.pd.plan import PAGE_SIZE, pd_plan
from sglang_dcp_block.plan.figures import balance, memory, rounding, sendings
from sglang_dcp_block.plan.mix import Lengths, Mix
from sglang_dcp_block.transfer_model.shapes import from_config

laws = settings(max_examples=60)
mixes = st.lists(
    st.builds(Lengths, st.integers(1, 3000), st.integers(0, 500), st.integers(1, 5)), min_size=1, max_size=4
).map(lambda requests: Mix("any", tuple(requests)))


class TestFigures:
    @laws
    @given(mixes, st.integers(1, 8), st.sampled_from([1, 4, 16, 64]))
    def test_rows_of_all_ranks_are_the_mix(self, mix, dcp_size, block):
        got = balance(mix, DcpLayout(dcp_size, block))
        assert sum(got.rows) == mix.total_tokens
        assert got.imbalance >= 1
        assert max(got.rows) - min(got.rows) <= block * mix.number

    @laws
    @given(mixes, st.sampled_from([16, 64]), st.integers(1, 8))
    def test_pages_hold_all_tokens_and_less_than_one_more_a_request(self, mix, page, dcp_size):
        got = rounding(mix, page, dcp_size)
        assert 0 <= got.taken - got.used < mix.number * got.virtual_page
        assert got.used == mix.total_tokens
        assert 0 <= got.share_lost < 1

    @laws
    @given(mixes, st.booleans())
    def test_each_way_sends_every_row_once(self, mix, scattered):
        for one in sendings(inputs(requests=mix, scattered=scattered), 64, 64):
            assert one.num_bytes == 61 * 1152 * sum(request.number * request.prompt_tokens for request in mix.requests)
            assert one.staged_bytes in (0, one.num_bytes)

    @laws
    @given(mixes)
    def test_segments_of_the_ways(self, mix):
        prompts = [(request.prompt_tokens, request.number) for request in mix.requests]
        ways = {one.name: one for one in sendings(inputs(requests=mix), 64, 64)}
        assert ways["tokens"].segments == 61 * sum(tokens * number for tokens, number in prompts)
        assert ways["blocks"].segments == 61 * sum(-(-tokens // 64) * number for tokens, number in prompts)
        # One chunk each: a segment a rank that has anything.
        assert ways["blocks_grouped"].segments == 61 * sum(
            min(8, -(-tokens // 64)) * number for tokens, number in prompts
        )
        assert ways["one_segment"].segments == ways["blocks_grouped"].segments

    def test_memory_of_a_latent_is_divided_by_the_ranks_and_of_kv_heads_by_what_was_replicated(self):
        mix = Mix("even", (Lengths(64 * 8 * 10, 0),))
        mla = inputs(requests=mix)
        assert memory(mla, balance(mix, DcpLayout(8, 64))).saving == 8
        gqa = inputs("qwen3-235b-a22b", mix, tp_size=8, dcp_size=2)  # 4 KV heads: each on two of eight GPUs
        assert memory(gqa, balance(mix, DcpLayout(2, 64))).saving == 2

    def test_the_demo_of_prefill_and_decode_servers_counts_the_same(self):
        """`make demo-pd` compares these numbers with the counters of real servers."""
        demo = pd_plan(8)
        mix = Mix("demo", tuple(Lengths(len(question.ids), 6) for question in demo.questions))
        shape = from_config(tiny_config("mla"), "tiny")
        made = inputs(requests=mix, shape=shape, chunk_tokens=64)
        ways = {one.name: one for one in sendings(made, PAGE_SIZE, PAGE_SIZE)}
        for name, block in (("tokens", 1), ("blocks", PAGE_SIZE)):
            assert (ways[name].segments, ways[name].num_bytes) == (demo.num_segments(block), demo.num_bytes)
