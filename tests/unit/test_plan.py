"""``sglang-dcp-block plan``: laws of its figures, what it recommends, its command line, and that it needs no SGLang."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from sglang_dcp_block.cli import main
from sglang_dcp_block.cpu.checkpoints import tiny_config
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.demo.pd.plan import PAGE_SIZE, pd_plan
from sglang_dcp_block.plan.figures import balance, memory, rounding, sendings
from sglang_dcp_block.plan.inputs import InputError, Inputs, default_backend, shape_of
from sglang_dcp_block.plan.mix import Lengths, Mix, read
from sglang_dcp_block.plan.page import html
from sglang_dcp_block.plan.show import show
from sglang_dcp_block.plan.to_json import as_dict
from sglang_dcp_block.plan.whole import plan
from sglang_dcp_block.transfer_model.links import presets
from sglang_dcp_block.transfer_model.shapes import from_config, preset

laws = settings(max_examples=60)
mixes = st.lists(
    st.builds(Lengths, st.integers(1, 3000), st.integers(0, 500), st.integers(1, 5)), min_size=1, max_size=4
).map(lambda requests: Mix("any", tuple(requests)))


def inputs(model: str = "deepseek-v3", requests: str | Mix = "agent", **changes) -> Inputs:
    shape = preset(model)
    mix = read(requests) if isinstance(requests, str) else requests
    basic = Inputs(shape, 8, 8, mix, presets()["rdma-400"], default_backend(shape))
    return replace(basic, **changes)


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


ARGUMENTS = ["--model", "kimi-k2", "--tp", "8", "--dcp", "8", "--requests", "2000+100:10,40000:2"]


class TestCommand:
    def test_json_has_stable_keys(self, capsys):
        assert main(["plan", *ARGUMENTS, "--json"]) == 0
        got = json.loads(capsys.readouterr().out)
        assert sorted(got) == [
            "advice", "balance", "block_goes_direct", "break_even_block", "candidates", "inputs", "kv_bytes_per_gpu",
            "rounding", "schema", "transfers",
        ]  # fmt: skip
        assert got == json.loads(json.dumps(as_dict(plan(inputs("kimi-k2", read("2000+100:10,40000:2"))))))
        assert {key for one in got["transfers"] for key in one} == {
            "name", "block_size", "segments", "bytes", "staged_bytes", "modelled_rank_seconds",
            "modelled_longest_prompt_seconds",
        }  # fmt: skip

    def test_every_key_of_the_json_is_described(self):
        page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
        keys = _keys(as_dict(plan(inputs())))
        assert not {key for key in keys if f"`{key}`" not in page}

    def test_tables_name_what_was_found(self, capsys):
        assert main(["plan", *ARGUMENTS]) == 0
        said = capsys.readouterr().out
        made = plan(inputs("kimi-k2", read("2000+100:10,40000:2")))
        for one in made.sendings:
            assert f"{one.segments:,}" in said
        for number in (*made.by_tokens.rows, *made.by_blocks.rows):
            assert f"{number:,}" in said
        assert " ".join(made.advice.decode_flags) in said

    def test_models_without_transfers_have_tables_too(self):
        console = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
        show(plan(inputs("qwen3-235b-a22b", tp_size=8, dcp_size=2)), console)
        assert "No transfers: PD decode of GQA and MHA models" in console.export_text()

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (["--model", "nobody"], "--model: expected one of deepseek-v3, kimi-k2"),
            (["--model", "none.json"], "--model: none.json: expected a model's configuration, got: [Errno 2]"),
            (["--model", ""], "--model: expected one of deepseek-v3, kimi-k2"),
            (["--model", "a" * 5000 + ".json"], "expected a model's configuration, got: [Errno 36]"),
            (["--requests", "soon"], "--requests: expected one of chat"),
            (["--link", "string"], "--link: expected one of rdma-400"),
            (["--max-imbalance", "0.5"], "--max-imbalance: expected a number, 1 or more, got 0.5"),
            (["--max-imbalance", "inf"], "--max-imbalance: expected a number, 1 or more, got inf"),
            (["--max-rounding", "nan"], "--max-rounding: expected a number, 0 or more, got nan"),
            (["--model", "org/name"], "got 'org/name'; or the path of a config.json. Nothing is fetched by a name."),
            (["--dcp", "5"], "this server would not start:"),
            (["--png", "plan.pdf"], "--png: expected a name that ends in .png, got plan.pdf. It writes nothing else."),
            (["--png", "-"], "--png: expected a name that ends in .png, got -."),
            (["--png", "a.png", "--html", "./a.png"], "--html: expected another file than --png a.png, got a.png."),
        ],
    )
    def test_wrong_input_is_status_2(self, capsys, more, message):
        assert main(["plan", *ARGUMENTS, *more]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("sglang-dcp-block plan: error: ")
        assert message in printed.err

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (["--tp", "abc"], "argument --tp: expected a whole number, such as 8, got 'abc'"),
            (["--page-size", "1.5"], "argument --page-size: expected a whole number, such as 8, got '1.5'"),
            (["--chunked-prefill-size", "9" * 5000], "--chunked-prefill-size: expected a whole number, .* characters"),
            (["--max-imbalance", ""], "argument --max-imbalance: expected a number, such as 1.5, got ''"),
        ],
    )
    def test_what_is_no_number(self, capsys, more, message):
        with pytest.raises(SystemExit) as end:
            main(["plan", *ARGUMENTS, *more])
        assert end.value.code == 2
        assert re.search(message, capsys.readouterr().err)

    def test_a_configuration_file_and_its_folder(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(tiny_config("mla")))
        assert shape_of(str(tmp_path)) == shape_of(str(tmp_path / "config.json"))
        assert shape_of(str(tmp_path)).row_bytes() == 288 * 4

    @pytest.mark.parametrize(
        ("name", "shown"),
        [
            ("org/model", "org/model"),
            ("\x1b[2Ja\nb\ud800", r"\x1b[2Ja b\ud800"),
            ("x" * 3000, "x" * 80),
            (" ", "here"),
            (None, "here"),
        ],
    )
    def test_the_name_in_a_configuration_is_a_line(self, tmp_path, name, shown):
        (tmp_path / "here").mkdir()
        (tmp_path / "here" / "config.json").write_text(json.dumps({**tiny_config("mla"), "_name_or_path": name}))
        assert shape_of(str(tmp_path / "here")).name == shown

    def test_a_type_that_is_not_known_and_the_way_out(self, tmp_path, capsys):
        (tmp_path / "config.json").write_text(json.dumps({**tiny_config("mla"), "torch_dtype": "int8"}))
        arguments = ["plan", *ARGUMENTS, "--model", str(tmp_path)]
        assert main(arguments) == 2
        assert "torch_dtype: expected one of float32" in capsys.readouterr().err
        assert main([*arguments, "--kv-dtype", "fp8", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["inputs"]["row_bytes"] == 288
        assert main(["plan", *ARGUMENTS, "--kv-dtype", "fp8", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["inputs"]["row_bytes"] == 576

    @pytest.mark.parametrize(
        "text", ["", "null", "[1]", "[" * 100_000, '{"num_hidden_layers": ' + "9" * 5000 + "}", "\xff"]
    )
    def test_a_file_that_is_no_configuration(self, capsys, tmp_path, text):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        assert main(["plan", *ARGUMENTS, "--model", str(tmp_path)]) == 2
        assert "config.json: expected a model's configuration, got: " in capsys.readouterr().err

    def test_plots_without_matplotlib(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert main(["plan", *ARGUMENTS, "--png", str(tmp_path / "plan.png")]) == 2
        assert "plots: expected matplotlib to load" in capsys.readouterr().err

    def test_plots(self, tmp_path, capsys):
        pytest.importorskip("matplotlib")
        png, html = tmp_path / "plan.png", tmp_path / "plan.html"
        assert main(["plan", *ARGUMENTS, "--png", str(png), "--html", str(html)]) == 0
        assert png.read_bytes().startswith(b"\x89PNG")
        page = html.read_text()
        assert "data:image/png;base64," in page
        assert "Recommended: blocks of" in page
        assert "http" not in page.replace("http-equiv", ""), "it needs nothing else"
        assert main(["plan", *ARGUMENTS, "--png", str(tmp_path / "no" / "plan.png")]) == 2
        assert "No such file or directory" in capsys.readouterr().err

    def test_a_model_s_name_is_no_markup_in_the_page(self):
        pytest.importorskip("matplotlib")
        page = html(plan(inputs(shape=replace(preset("kimi-k2"), name="<script>alert(1)</script>"))))
        assert "<script>" not in page
        assert "<title>plan: &lt;script&gt;" in page

    def test_neither_sglang_nor_torch_is_needed(self):
        code = (
            "import sys\n"
            "for name in ('sglang', 'torch', 'triton', 'matplotlib', 'transformers'): sys.modules[name] = None\n"
            "from sglang_dcp_block.cli import main\n"
            f"raise SystemExit(main({['plan', *ARGUMENTS, '--json']!r}))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["schema"] == 1


def _keys(data) -> set[str]:
    if isinstance(data, dict):
        return set(data) | {key for value in data.values() for key in _keys(value)}
    return {key for value in data for key in _keys(value)} if isinstance(data, list) else set()
