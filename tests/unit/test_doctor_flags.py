"""The doctor on a server's flags: without SGLang by the rules, with it by what SGLang's own resolution says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dcp_block.doctor import child, flags
from sglang_dcp_block.doctor.child import Ending
from sglang_dcp_block.doctor.findings import Finding, Level

BLOCKS = ["--tp", "8", "--dcp-size", "8", "--dcp-block-size", "64"]
OUTCOME: dict[str, Any] = {
    "warnings": [],
    "tp_size": 8,
    "dcp_size": 8,
    "page_size": 64,
    "kv_cache_dtype": "auto",
    "backends": ["triton", "triton"],
    "block_size": 64,
    "group_pages": 0,
    "disaggregation_mode": "null",
    "disaggregation_bootstrap_port": 8998,
    "host": "0.0.0.0",
    "port": 30000,
}


def problems(checked: flags.Checked) -> list[Finding]:
    return [finding for finding in checked.findings if finding.level is Level.PROBLEM]


class TestByRules:
    def test_flags_that_fit(self) -> None:
        checked = flags.by_rules([*BLOCKS, "--mem-fraction-static", "0.8"])
        assert problems(checked) == []
        assert any("blocks of 64, pages of 64 tokens, DCP 8" in finding.got for finding in checked.findings)
        assert any(finding.got == "--mem-fraction-static 0.8" for finding in checked.findings)
        assert checked.ports == (("--port", 30000),)

    @pytest.mark.parametrize(
        ("more", "text"),
        [
            (["--page-size", "48"], "block size that does not divide the page size"),
            (["--attention-backend", "fa3"], "attention backends without a block path"),
            (["--pp-size", "2"], "pipeline parallelism"),
            (["--speculative-algorithm", "EAGLE"], "speculative decoding"),
            (["--dcp-size", "3"], "attention TP that dcp_size does not divide"),
            (["--enable-hierarchical-cache", "--disaggregation-mode", "prefill"], "HiCache with prefill/decode"),
            (["--dcp-group-pages", "8"], "servers that transfer nothing"),
            (["--dcp-group-pages", "none"], "expected the decode servers' --dcp-size"),
            (["--dcp-block-size", "-4"], "--dcp-block-size: expected"),
            (["--dcp-block-size", ""], "--dcp-block-size: expected"),
            (["--tp", "eight"], "expected a number from 1 to 2147483647, got 'eight'"),
            (["--tp", "0"], "expected a number from 1 to 2147483647, got '0'"),
            (["--dcp-size", "-8"], "expected a number from 1 to 2147483647, got '-8'"),
            (["--page-size", "9" * 5000], "expected a number from 1 to 2147483647, got '999"),
            (["--disaggregation-mode", "both"], "invalid choice: 'both'"),
        ],
    )
    def test_flags_that_are_refused(self, more: list[str], text: str) -> None:
        found = problems(flags.by_rules([*BLOCKS, *more]))
        assert found
        assert any(text in finding.got for finding in found), found
        assert all(finding.advice for finding in found)

    @pytest.mark.parametrize(
        ("value", "more", "got"),
        [
            ("nonsense", [], "SGLANG_DCP_BLOCK_SIZE: expected a positive number of tokens or 'auto', got 'nonsense'"),
            ("nonsense", ["--dcp-block-size", "64"], None),
            ("64", ["--page-size", "48"], "block size that does not divide the page size"),
            ("64", ["--page-size", "48", "--dcp-block-size", "16"], None),
        ],
    )
    def test_a_flag_wins_over_the_variable(
        self, value: str, more: list[str], got: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SGLANG_DCP_BLOCK_SIZE", value)
        found = problems(flags.by_rules(["--tp", "8", "--dcp-size", "8", *more]))
        assert [finding.got.startswith(str(got)) for finding in found] == ([] if got is None else [True])

    def test_no_blocks_asked_for(self) -> None:
        assert problems(flags.by_rules(["--tp", "8", "--pp", "2"])) == []

    @pytest.mark.parametrize(
        ("model", "refused"),
        [
            ({"num_attention_heads": 32, "num_key_value_heads": 1}, None),
            ({"num_attention_heads": 32, "num_key_value_heads": 8}, "KV heads split inside a DCP group"),
            (
                {"text_config": {"num_attention_heads": 12, "num_key_value_heads": 1}},
                "query heads that dcp_size does not divide",
            ),
            ({"num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512}, None),
            (
                {"text_config": None, "num_attention_heads": 12, "num_key_value_heads": 1},
                "query heads that dcp_size does not divide",
            ),
        ],
    )
    def test_the_model_is_asked(self, model: Any, refused: str | None, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(model))
        found = problems(flags.by_rules([*BLOCKS, "--model-path", str(tmp_path)]))
        assert [finding.got.partition(":")[0] for finding in found] == ([refused] if refused else [])

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "[" * 100_000,
            "\0",
            "\xff",
            "[]",
            '{"num_attention_heads": "many"}',
            '{"num_key_value_heads": true}',
            '{"num_attention_heads": -2}',
            '{"kv_lora_rank": ' + "9" * 5000 + "}",
        ],
    )
    def test_a_configuration_that_is_none(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        (finding,) = problems(flags.by_rules([*BLOCKS, "--model-path", str(tmp_path)]))
        assert finding.got.startswith(f"{tmp_path}/config.json: ")

    def test_a_folder_in_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").mkdir()
        (finding,) = problems(flags.by_rules([*BLOCKS, "--model-path", str(tmp_path)]))
        assert finding.got.endswith("config.json: expected a model's configuration, got: Is a directory")

    @pytest.mark.parametrize("path", ["org/model", "", "a" * 5000, "a\0b"])
    def test_a_model_that_is_not_here_is_no_problem(self, path: str) -> None:
        assert problems(flags.by_rules([*BLOCKS, "--model-path", path])) == []

    @pytest.mark.parametrize("asked", [["--dcp-block-size", "64"], []])
    def test_blocks_are_ignored_on_a_prefill_server_without_dcp(
        self, monkeypatch: pytest.MonkeyPatch, asked: list[str]
    ) -> None:
        monkeypatch.setenv("SGLANG_DCP_BLOCK_SIZE", "64")
        checked = flags.by_rules(["--disaggregation-mode", "prefill", "--tp", "8", *asked])
        assert problems(checked) == []
        assert any("ignored on a prefill server without DCP" in finding.got for finding in checked.findings)
        assert problems(flags.by_rules(["--disaggregation-mode", "decode", "--tp", "8", *asked])) != []

    def test_a_prefill_server_needs_its_bootstrap_port(self) -> None:
        checked = flags.by_rules(["--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "9000"])
        assert checked.exchanges_kv
        assert checked.ports == (("--port", 30000), ("--disaggregation-bootstrap-port", 9000))


class TestOfOutcome:
    """What the child wrote; tests/patches/test_doctor_resolve.py asks SGLang itself."""

    def test_blocks(self) -> None:
        checked = flags.of_outcome(OUTCOME, BLOCKS)
        assert [finding.level for finding in checked.findings] == [Level.OK, Level.OK]
        assert checked.findings[0].got == "blocks of 64 tokens over 8 ranks"
        assert (checked.host, checked.ports) == ("0.0.0.0", (("--port", 30000),))

    @pytest.mark.parametrize(
        ("changes", "level", "got"),
        [
            ({"block_size": None}, Level.NOTE, "token round-robin: SGLang runs as it is"),
            ({"block_size": None, "dcp_size": 1}, Level.NOTE, "no DCP: SGLang runs as it is"),
            ({"block_size": None, "disaggregation_mode": "prefill"}, Level.OK, "each decode server names its own"),
        ],
    )
    def test_no_blocks(self, changes: dict[str, Any], level: Level, got: str) -> None:
        finding = flags.of_outcome({**OUTCOME, **changes}, []).findings[0]
        assert finding.level is level
        assert got in finding.got

    @pytest.mark.parametrize(
        ("changes", "environ", "needed"),
        [
            ({}, {}, set()),
            ({"backends": ["flashinfer", "trtllm_mla"]}, {}, {"flashinfer"}),
            ({"backends": ["flashinfer"]}, {"SGLANG_DCP_BLOCK_CPU": "1"}, set()),
            ({"disaggregation_mode": "decode", "backends": ["flashinfer"]}, {}, {"flashinfer", "mooncake"}),
            ({"disaggregation_mode": "prefill"}, {"SGLANG_DCP_BLOCK_CPU": "1"}, {"mooncake"}),
        ],
    )
    def test_what_it_needs(self, changes: dict[str, Any], environ: dict[str, str], needed: set[str]) -> None:
        assert flags.of_outcome({**OUTCOME, **changes}, []).needs(environ) == needed

    def test_warnings_and_grouping_are_told(self) -> None:
        checked = flags.of_outcome({**OUTCOME, "warnings": ["taking 64"], "group_pages": 8}, [])
        assert [finding.level for finding in checked.findings] == [Level.NOTE, Level.OK, Level.OK, Level.OK]
        assert "8 decode ranks" in checked.findings[-1].got

    @pytest.mark.parametrize(
        ("error", "advice"),
        [
            ("sglang serve: error: unrecognized arguments: --dcp-block-size 8", "see the heading `plugin`"),
            ("sglang serve: error: unrecognized arguments: --dcp-bloc-size 8", "docs/operations.md"),
            ("--dcp-block-size 6 cannot be used here: ...", "docs/operations.md"),
        ],
    )
    def test_an_error_is_a_problem_with_advice(self, error: str, advice: str) -> None:
        (finding,) = flags.of_outcome({"warnings": [], "error": error}, []).findings
        assert (finding.level, finding.got) == (Level.PROBLEM, error)
        assert advice in finding.advice

    def test_an_error_of_the_machine_is_not_taken_for_one_of_the_flags(self) -> None:
        outcome = {"warnings": [], "error": "operator torchvision::nms does not exist", "kind": "RuntimeError"}
        (finding,) = flags.of_outcome(outcome, []).findings
        assert "python -m sglang_dcp_block.cpu -- sglang-dcp-block doctor" in finding.advice


@pytest.mark.parametrize("has_sglang", [True, False])
@pytest.mark.parametrize(
    ("argv", "got", "advice"),
    [
        (["sglang", "serve", *BLOCKS], "expected flags only behind --, got 'sglang serve'", "doctor -- --model-path"),
        (["org/model", *BLOCKS], "expected flags only behind --, got 'org/model'", "doctor -- --model-path"),
        (["--help"], "expected flags of a server to judge, got --help", "sglang serve --help"),
        ([*BLOCKS, "-h"], "expected flags of a server to judge, got -h", "sglang serve --help"),
    ],
)
def test_what_is_no_flag_of_a_server(
    argv: list[str], got: str, advice: str, has_sglang: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "run", lambda *_, **__: pytest.fail("SGLang was asked"))
    (finding,) = flags.check(argv, has_sglang).findings
    assert (finding.level, finding.got) == (Level.PROBLEM, got)
    assert advice in finding.advice


@pytest.mark.parametrize("written", [None, "", "{"])
def test_a_child_that_writes_nothing(written: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: list[str], timeout: float, stdin: str) -> Ending:
        if written is not None:
            Path(arguments[-1]).write_text(written)
        return Ending(False, "", "ended by signal 9")

    monkeypatch.setattr(child, "run", run)
    (finding,) = flags.by_sglang(BLOCKS).findings
    assert finding.level is Level.PROBLEM
    assert "ended by signal 9" in finding.got
