"""``sglang-dcp-block plan``: its command line, what it writes, and that it needs no SGLang."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from plan_inputs import inputs
from rich.console import Console

from sglang_dcp_block.cli import main
from sglang_dcp_block.cpu.checkpoints import tiny_config
from sglang_dcp_block.plan.inputs import shape_of
from sglang_dcp_block.plan.mix import read
from sglang_dcp_block.plan.page import html
from sglang_dcp_block.plan.show import show
from sglang_dcp_block.plan.to_json import as_dict
from sglang_dcp_block.plan.whole import plan
from sglang_dcp_block.transfer_model.shapes import preset

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
