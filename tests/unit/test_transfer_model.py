"""The transfer model: counts against a walk over tokens, laws of counts and times, presets and config.json."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.dcp.transfer import plan_runs
from sglang_dcp_block.kernels.group_pages import group_pages_torch
from sglang_dcp_block.transfer_model.counts import Counts, Way, count
from sglang_dcp_block.transfer_model.links import Link, from_json, parse, presets
from sglang_dcp_block.transfer_model.shapes import PRESETS, from_config, preset
from sglang_dcp_block.transfer_model.times import break_even_block, long_run_break_even, rank_seconds, seconds

laws = settings(deadline=None, max_examples=60)
LINK = Link("test", segment_seconds=2e-6, bytes_per_second=1e10, gather_bytes_per_second=1e12, sync_seconds=5e-5)


@st.composite
def prompts(draw: st.DrawFn) -> dict:
    """Arguments of count(), with blocks that divide pages that divide chunks."""
    page = draw(st.sampled_from([1, 2, 4, 6, 8, 16]))
    block = draw(st.sampled_from([b for b in range(1, page + 1) if page % b == 0]))
    return {
        "tokens": draw(st.integers(0, 300)),
        "layout": DcpLayout(draw(st.integers(1, 8)), block),
        "page_size": page,
        "chunk_tokens": page * draw(st.integers(1, 9)),
        "scattered": draw(st.booleans()),
    }


def planned(way, tokens, layout, page_size, chunk_tokens, scattered) -> Counts:
    """The same by the sender's planner, over page tables that are made up as :mod:`counts` says."""
    P, step, totals = layout.dcp_size, 2 if scattered else 1, []
    dst_pages = [step * page for page in range(-(-tokens // page_size))]
    for rank in range(P):
        rows = segments = chunks = 0
        for first in range(0, tokens, chunk_tokens):
            length = min(chunk_tokens, tokens - first)
            src_pages = torch.arange(-(-length // page_size))
            if way is Way.GROUPED:
                lens = torch.tensor([first]), torch.tensor([first + length])
                src_pages = group_pages_torch(src_pages, *lens, page_size=page_size, dcp_size=P)
            runs = plan_runs(
                [step * page for page in src_pages.tolist()], dst_pages, page_size=page_size, layout=layout, rank=rank,
                src_page_offset=first // page_size, num_kv_tokens=length,
            )  # fmt: skip
            ends = runs.dst_rows + runs.lengths
            packed = int((runs.dst_rows[1:] != ends[:-1]).sum()) + (len(ends) > 0)
            rows, segments = rows + runs.num_rows, segments + (packed if way is Way.PACKED else len(ends))
            chunks += len(ends) > 0
        totals.append((rows, segments, chunks))
    return Counts(*zip(*totals, strict=True))


def walked(tokens, layout, page_size, chunk_tokens, scattered, packed=False) -> Counts:
    """The same by dealing tokens one by one to page tables, and cutting wherever a neighbour is not the next row."""
    P, step = layout.dcp_size, 2 if scattered else 1
    rows, segments, chunks = [], [], []
    for rank in range(P):
        own = [t for t in range(tokens) if reference.owner(t, P, layout.block_size) == rank]
        places = []
        for t in own:
            page, within = divmod(reference.local_index(t, P, layout.block_size), page_size)
            chunk, at = divmod(t, chunk_tokens)
            source = step * (at // page_size) * page_size + at % page_size
            places.append((chunk, source, step * page * page_size + within))
        cuts = [
            i
            for i in range(len(places))
            if i == 0
            or places[i][0] != places[i - 1][0]
            or places[i][2] != places[i - 1][2] + 1
            or (not packed and places[i][1] != places[i - 1][1] + 1)
        ]
        rows.append(len(own))
        segments.append(len(cuts))
        chunks.append(len({place[0] for place in places}))
    return Counts(tuple(rows), tuple(segments), tuple(chunks))


class TestCounts:
    @laws
    @given(prompts(), st.booleans())
    def test_as_a_walk_over_every_token_has_it(self, prompt, packed):
        assert count(Way.PACKED if packed else Way.DIRECT, **prompt) == walked(**prompt, packed=packed)

    @laws
    @given(prompts(), st.sampled_from([Way.DIRECT, Way.PACKED, Way.GROUPED]))
    def test_as_the_sender_plans_it(self, prompt, way):
        if way is Way.GROUPED:
            prompt["layout"] = DcpLayout(prompt["layout"].dcp_size, prompt["page_size"])
        assert count(way, **prompt) == planned(way, **prompt)

    @laws
    @given(prompts(), st.lists(st.tuples(st.integers(0, 300), st.integers(0, 4)), max_size=4))
    def test_prompts_add_up(self, prompt, several):
        del prompt["tokens"]
        together = count(Way.DIRECT, [t for t, _ in several], [n for _, n in several], **prompt)
        alone = [(count(Way.DIRECT, t, **prompt), n) for t, n in several]
        for field in ("rows", "segments", "chunks"):
            each = [[n * value for value in getattr(got, field)] for got, n in alone]
            assert getattr(together, field) == tuple(sum(column) for column in zip(*each, strict=True)) or not several

    @laws
    @given(prompts(), st.sampled_from([way for way in Way if way is not Way.GROUPED]))
    def test_rows_of_all_ranks_are_the_prompt(self, prompt, way):
        got = count(way, **prompt)
        assert sum(got.rows) == prompt["tokens"]
        assert all(pieces <= rows for pieces, rows in zip(got.segments, got.rows, strict=True))

    @laws
    @given(prompts())
    def test_token_round_robin_has_a_segment_a_row(self, prompt):
        P = prompt["layout"].dcp_size
        got = count(Way.DIRECT, **{**prompt, "layout": DcpLayout(P, 1)})
        if P > 1:
            assert got.segments == got.rows

    @laws
    @given(prompts())
    def test_grouped_fresh_pages_are_a_segment_a_rank_and_chunk(self, prompt):
        layout = DcpLayout(prompt["layout"].dcp_size, prompt["page_size"])
        got = count(Way.GROUPED, **{**prompt, "layout": layout, "scattered": False})
        assert got.segments == got.chunks

    @laws
    @given(prompts())
    def test_grouping_has_nothing_to_work_with_in_scattered_pages(self, prompt):
        changed = {**prompt, "layout": DcpLayout(prompt["layout"].dcp_size, prompt["page_size"]), "scattered": True}
        assert count(Way.GROUPED, **changed) == count(Way.DIRECT, **changed)

    @laws
    @given(prompts())
    def test_one_segment_is_the_least(self, prompt):
        least = count(Way.ONE_SEGMENT, **prompt)
        for way in (Way.DIRECT, Way.PACKED):
            assert all(a <= b for a, b in zip(least.segments, count(way, **prompt).segments, strict=True))

    def test_whole_blocks_in_the_measured_case(self):
        """61 layers x 16,384 tokens to one of eight ranks, as benchmarks/transfer.py counts them at Mooncake's call."""
        got = {
            (way, block): count(way, 16384, layout=DcpLayout(8, block), page_size=64, chunk_tokens=16384).segments[0]
            for way, block in ((Way.DIRECT, 1), (Way.DIRECT, 8), (Way.DIRECT, 64), (Way.PACKED, 1), (Way.GROUPED, 64))
        }
        assert list(got.values()) == [2048, 256, 32, 1, 1]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"tokens": -1}, "tokens: expected 0 or more, got -1"),
            ({"page_size": 6}, "expected a multiple of the block of 4 tokens, got 6"),
            ({"chunk_tokens": 12}, "expected a multiple of the page of 8 tokens, got 12"),
        ],
    )
    def test_numbers_that_do_not_fit(self, change, message):
        fitting = {"tokens": 9, "layout": DcpLayout(2, 4), "page_size": 8, "chunk_tokens": 16}
        with pytest.raises(ValueError, match=message):
            count(Way.DIRECT, **{**fitting, **change})

    def test_only_blocks_of_a_page_are_grouped(self):
        with pytest.raises(ValueError, match="expected blocks of a page of 8, got 4"):
            count(Way.GROUPED, 9, layout=DcpLayout(2, 4), page_size=8, chunk_tokens=16)


class TestTimes:
    def test_the_formula(self):
        assert seconds(LINK, 10, 1000) == pytest.approx(10 * 2e-6 + 1e-7)
        assert seconds(LINK, 10, 1000, packings=2) == pytest.approx(10 * 2e-6 + 1e-7 + 1e-9 + 1e-4)

    def test_of_rank_0_which_gets_the_most(self):
        sizes = {"page_size": 64, "chunk_tokens": 8192, "num_layers": 61, "row_bytes": 1152}
        got = rank_seconds(LINK, Way.DIRECT, 8192 + 64, layout=DcpLayout(8, 64), **sizes)
        assert got == pytest.approx(61 * 17 * 2e-6 + 61 * 17 * 64 * 1152 / 1e10)

    @laws
    @given(st.integers(1, 40), st.sampled_from([64, 576, 1152]), st.floats(1e-7, 1e-4), st.booleans())
    def test_break_even_is_where_the_two_ways_meet(self, chunks, row_bytes, segment, scattered):
        link = Link("x", segment, 1e10, 1e11, 1e-5)
        blocks = (2, 4, 8, 16, 32, 64)
        sizes = {"page_size": 64, "chunk_tokens": 4096, "num_layers": 8, "row_bytes": row_bytes, "scattered": scattered}
        found = break_even_block(link, blocks, 4096 * chunks, dcp_size=8, **sizes)
        for block in blocks:
            direct, packed = (
                rank_seconds(link, way, 4096 * chunks, layout=DcpLayout(8, block), **sizes)
                for way in (Way.DIRECT, Way.PACKED)
            )
            assert (direct <= packed) == (found is not None and block >= found)

    def test_the_formula_for_long_runs_agrees_with_the_counts(self):
        """Scattered pages of 64, one chunk of 2**20 tokens: a block that the formula calls long enough is."""
        exact = long_run_break_even(LINK, 1152, packed_segment_rows=64, sync_rows=2**17 * 61)
        sizes = {"page_size": 64, "chunk_tokens": 2**20, "num_layers": 61, "row_bytes": 1152, "scattered": True}
        found = break_even_block(LINK, (1, 2, 4, 8, 16, 32, 64), 2**20, dcp_size=8, **sizes)
        assert found == 64
        assert 32 < exact <= 64


class TestLinks:
    def test_every_preset_names_a_source_for_every_figure(self):
        for link in presets().values():
            assert {source.figure for source in link.sources} == {
                "segment_seconds", "bytes_per_second", "gather_bytes_per_second", "sync_seconds"
            }, link.name  # fmt: skip
            assert all(source.text for source in link.sources)

    def test_figures_of_a_users_own(self):
        link = parse("segment-us=2,gbytes=10,sync-us=7")
        assert (link.segment_seconds, link.bytes_per_second, link.sync_seconds) == pytest.approx((2e-6, 1e10, 7e-6))
        assert link.gather_bytes_per_second == presets()["rdma-400"].gather_bytes_per_second

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "rdma",
                "expected one of rdma-400, rdma-200, nvlink, tcp-loopback, or segment-us=1.4,gbytes=42, got 'rdma'",
            ),
            ("gbytes=1", "expected segment-us too, got 'gbytes=1'"),
            ("segment-us=x,gbytes=1", "segment-us: expected a number from 0.000001 to 1,000,000, got 'x'"),
            ("segment-us=,gbytes=1", "segment-us: expected a number from .*, got ''"),
            ("segment-us=0,gbytes=1", "segment-us: expected a number from .*, got '0'"),
            ("segment-us=1,gbytes=1e300", "gbytes: expected a number from .*, got '1e300'"),
            ("segment-us=1,gbytes=1,sync-us=-1", "sync-us: expected a number from .* to 1,000,000, or 0, got '-1'"),
            ("segment-us=1,gbytes=1,gather-gbytes=inf", "gather-gbytes: expected a number from .*, got 'inf'"),
            ("speed=1", "expected figures among segment-us, gbytes, gather-gbytes, sync-us, got 'speed=1'"),
            ("segment-us=1,gbytes=1, gbytes=2", "expected gbytes once, got"),
            ("segment-us=nan,gbytes=1", "segment-us: expected a number from .*, got 'nan'"),
            ("segment-us=" + "1" * 5000 + ",gbytes=1", r"segment-us: .* \(... of 5002 characters\)$"),
        ],
    )
    def test_wrong_figures(self, text, message):
        with pytest.raises(ValueError, match=message):
            parse(text)

    def test_a_sync_may_cost_nothing(self):
        assert parse("segment-us=1, gbytes = 2, sync-us=0").sync_seconds == 0

    @pytest.mark.parametrize(
        "figures", [(0, 1, 1, 0), (1, 0, 1, 0), (1, 1, 0, 0), (1, 1, 1, -1), (float("inf"), 1, 1, 0)]
    )
    def test_a_link_that_is_none(self, figures):
        with pytest.raises(ValueError, match="expected a finite positive number"):
            Link("x", *figures)

    def test_a_data_file_that_lacks_something(self):
        with pytest.raises(ValueError, match=r"tcp_loopback.json: expected entries .*origin"):
            from_json({"name": "x"})


MLA = {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
GQA = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}


class TestShapes:
    def test_mla(self):
        shape = from_config(MLA, "x")
        assert shape.is_mla
        assert (shape.row_bytes(), shape.row_bytes(8, 8), shape.token_bytes()) == (1152, 1152, 61 * 1152)

    def test_gqa_and_its_heads_on_a_rank(self):
        """SGLang deals 8 KV heads over tp / dcp groups of ranks."""
        shape = from_config(GQA, "x")
        assert not shape.is_mla
        heads = [shape.kv_heads_of_a_rank(tp, dcp) for tp, dcp in ((1, 1), (8, 1), (8, 2), (8, 8), (16, 2))]
        assert heads == [8, 1, 2, 8, 1]
        assert shape.row_bytes(8) == 2 * 128 * 2

    def test_head_dim_and_type_are_taken_where_they_are_named(self):
        assert from_config({**GQA, "head_dim": 64, "torch_dtype": "float32"}, "x").row_bytes() == 8 * 2 * 64 * 4

    @pytest.mark.parametrize(
        ("more", "size"),
        [
            ({}, 2),
            ({"torch_dtype": None}, 2),
            ({"dtype": "float32"}, 4),
            ({"torch_dtype": "torch.float32"}, 4),
            ({"torch_dtype": "fp8"}, 1),
        ],
    )
    def test_the_model_s_own_type(self, more, size):
        assert from_config({**MLA, **more}, "x").element_bytes == size
        assert from_config({"text_config": MLA, **more}, "x").element_bytes == size

    def test_a_type_of_the_cache_needs_no_other(self):
        assert from_config({**MLA, "torch_dtype": "int8"}, "x", "fp8").row_bytes() == 576

    def test_a_nested_language_model(self):
        assert from_config({"text_config": MLA}, "x").row_bytes() == 1152

    def test_kv_of_eight_bits(self):
        assert preset("DeepSeek-V3").stored_as("fp8").row_bytes() == 576
        with pytest.raises(ValueError, match="expected one of float32, bfloat16, float16, fp8, got 'int3'"):
            preset("kimi-k2").stored_as("int3")

    def test_presets_are_what_the_published_configurations_say(self):
        assert PRESETS["deepseek-v3"].token_bytes() == PRESETS["kimi-k2"].token_bytes() == 70272
        assert PRESETS["llama-3.1-70b"].token_bytes() == 80 * 8 * 2 * 128 * 2

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({}, "num_hidden_layers: expected a positive integer, got nothing"),
            ({**MLA, "kv_lora_rank": "512"}, "kv_lora_rank: expected a positive integer, got '512'"),
            ({**GQA, "num_key_value_heads": 0}, "num_key_value_heads: expected a positive integer, got 0"),
            ({**GQA, "num_hidden_layers": 2**31}, "num_hidden_layers: expected at most 2147483647, got 2147483648"),
            ({**GQA, "num_hidden_layers": 10**5000}, "num_hidden_layers: expected at most 2147483647, got of type int"),
            ({**GQA, "hidden_size": None}, "hidden_size: expected a positive integer, got nothing"),
            ({**GQA, "layer_types": 5}, "layer_types: expected a list, a type a layer, got 5"),
            ({**GQA, "layer_types": "linear_attention"}, "layer_types: expected a list, .*, got 'linear_attention'"),
            ({**GQA, "attn_type_list": 1}, "attn_type_list: expected a list, a type a layer, got 1"),
            ({**GQA, "hidden_size": 63}, "hidden_size: expected num_attention_heads, 64, or more, got 63"),
            ({**GQA, "torch_dtype": "int8"}, "torch_dtype: expected one of float32, .*, got 'int8'. Pass --kv-dtype"),
            ({**GQA, "dtype": 16}, "dtype: expected one of float32, .*, got 16. Pass --kv-dtype"),
            ({"dtype": "int4", "text_config": MLA}, "dtype: expected one of float32, .*, got 'int4'"),
        ],
    )
    def test_a_configuration_that_lacks_something(self, config, message):
        with pytest.raises(ValueError, match=message):
            from_config(config, "x")

    def test_an_unknown_preset(self):
        with pytest.raises(ValueError, match=r"expected one of deepseek-v3, kimi-k2, .*, got 'gpt'"):
            preset("gpt")
        with pytest.raises(ValueError, match=r"got 'x{79} \(... of 5002 characters\)$"):
            preset("x" * 5000)

    @pytest.mark.parametrize(
        ("more", "found"),
        [
            ({"index_topk": 2048}, ("is_dsa",)),
            ({"sliding_window": 4096}, ("has_sliding_window",)),
            ({"sliding_window": 4096, "use_sliding_window": False}, ()),
            ({"sliding_window": 4096, "layer_types": ["full_attention"]}, ()),
            ({"layer_types": ["linear_attention", "full_attention"]}, ("is_hybrid_linear",)),
            ({"layer_types": ["mamba"] * 36 + ["attention"] * 4}, ("is_hybrid_linear",)),
            ({"layer_types": ["full_attention", "something new"]}, ("is_hybrid_linear",)),
            ({"layer_types": ["full_attention", "attention", "sliding_attention"]}, ()),
            ({"layer_types": ["chunked_attention", "full_attention"]}, ("has_sliding_window",)),
            ({"layer_types": ["window_attention"]}, ("has_sliding_window",)),
            ({"attn_type_list": [1, 1], "sliding_window": 4096}, ("has_sliding_window",)),
            ({"layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"]}, ("has_sparse_layers",)),
            ({"sparse_attention_config": {"sparse_topk_blocks": 16}}, ("has_sparse_layers",)),
            ({"attn_type_list": [1.0], "layer_group_size": 0}, ()),
            ({"attention_chunk_size": 8192}, ("has_sliding_window",)),
            ({"layer_types": ["indexed_attention", "some_sparse_attention"]}, ("has_sparse_layers",)),
            ({"layers_block_type": ["attention", "mamba"]}, ("is_hybrid_linear",)),
            ({"attn_type_list": [0, 0, 1]}, ("is_hybrid_linear",)),
            ({"attn_type_list": [1, 1, 1]}, ()),
            ({"full_attention_interval": 4}, ("is_hybrid_linear",)),
            ({"full_attention_interval": None}, ()),
            ({"hybrid_override_pattern": "M-M*-"}, ("is_hybrid_linear",)),
            ({"layer_group_size": 5}, ("is_hybrid_linear",)),
            ({"layer_group_size": 1}, ()),
            ({"is_encoder_decoder": True}, ("is_encoder_decoder",)),
        ],
    )
    def test_what_blocks_are_refused_with(self, more, found):
        assert from_config({**MLA, **more}, "x").unusual == found
