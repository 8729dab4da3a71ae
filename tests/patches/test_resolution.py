"""A block size through SGLang's real argument resolution: what it becomes, what it changes, what it is refused with.

No engine is started. Backends, prefill -> decode and facts have files of their own.
"""

from __future__ import annotations

from typing import Any

import pytest
from resolution_cases import ONE_OF_EACH, STORAGE_NAME, VARIABLE, refusal


class TestSizes:
    @pytest.mark.parametrize(
        ("case", "page_size", "block_size"),
        [
            ("nothing asked for", 1, None),
            ("16", 16, 16),
            ("alias", 16, 16),
            ("yaml", 16, 16),
            ("auto", 64, 64),
            ("explicit page", 32, 4),
            ("auto, explicit page", 32, 32),
            ("keyword", 16, 16),
            ("keyword text", 64, 64),
            ("keyword none", 1, None),
            ("variable", 8, 8),
            ("variable, Engine", 64, 64),
            ("flag beats variable", 16, 16),
            ("flag 1 beats variable", 1, 0),
            ("keyword beats variable", 16, 16),
            ("one", 1, 0),
            ("one, dcp off", 1, 0),
            ("copied first", 16, 16),
        ],
    )
    def test_page_and_block(self, answers: dict[str, Any], case: str, page_size: int, block_size: int | None) -> None:
        outcome = answers["cases"][case]
        assert (outcome.get("page_size"), outcome.get("block_size")) == (page_size, block_size), outcome

    def test_what_was_typed_stays_what_was_typed(self, answers: dict[str, Any]) -> None:
        assert answers["cases"]["auto"]["raw_page_size"] is None
        assert answers["cases"]["explicit page"]["raw_page_size"] == 32

    @pytest.mark.parametrize(
        ("case", "said"),
        [
            ("16", ["--dcp-block-size 16: --page-size is unset, taking 16 tokens."]),
            ("alias", ["--dcp-interleave-size 16: --page-size is unset, taking 16 tokens."]),
            ("keyword", ["Engine(dcp_block_size=...) 16: --page-size is unset, taking 16 tokens."]),
            ("variable", [f"{VARIABLE} 8: --page-size is unset, taking 8 tokens."]),
            ("auto", ["--dcp-block-size auto: --page-size is unset, taking 64 tokens.",
                      "--dcp-block-size auto resolves to blocks of 64 tokens."]),
            ("auto, explicit page", ["--dcp-block-size auto resolves to blocks of 32 tokens."]),
            ("explicit page", []),
            ("one", []),
            ("nothing asked for", []),
        ],
    )  # fmt: skip
    def test_what_was_not_typed_is_said(self, answers: dict[str, Any], case: str, said: list[str]) -> None:
        lines = [line for line in answers["cases"][case]["warnings"] if "attention-backend" not in line]
        assert lines == said

    def test_the_block_size_travels_with_the_record(self, answers: dict[str, Any]) -> None:
        """Another process reads what was resolved, whatever its own environment says."""
        assert answers["cases"]["elsewhere"].get("elsewhere") == 64, answers["cases"]["elsewhere"]
        assert answers["cases"]["elsewhere, one"]["elsewhere"] is None


class TestRefused:
    @pytest.mark.parametrize(
        ("case", "text"),
        [
            ("auto, page 1", "expected a page size above 1, got --page-size 1"),
            ("not a divisor", "got block size 6 with page size 16"),
            ("larger than the page", "got block size 64 with page size 32"),
            ("dcp off", "DCP off: expected --dcp-size above 1: blocks are dealt over DCP ranks, got --dcp-size 1"),
            ("keyword zero", "Engine(dcp_block_size=...): expected a positive number of tokens or 'auto', got 0"),
            ("keyword true", "Engine(dcp_block_size=...): expected a positive number of tokens or 'auto', got True"),
            ("variable, nonsense", f"{VARIABLE}: expected a positive number of tokens or 'auto', got 'big'"),
        ],
    )
    def test_with_the_reason(self, answers: dict[str, Any], case: str, text: str) -> None:
        outcome = answers["cases"][case]
        assert outcome.get("error") == "BlockSizeError", outcome
        assert text in outcome["message"]

    @pytest.mark.parametrize(
        ("case", "source"), [("variable, dcp off", VARIABLE), ("keyword, dcp off", "Engine(dcp_block_size=...)")]
    )
    def test_naming_where_the_block_size_came_from(self, answers: dict[str, Any], case: str, source: str) -> None:
        text = refusal(answers["cases"][case])
        assert text.startswith(f"BlockSizeError: {source} 8 cannot be used here:")
        assert text.endswith(f"or leave {source} out.")

    def test_dcp_off_is_not_blamed_on_anything_else(self, answers: dict[str, Any]) -> None:
        assert len(answers["cases"]["dcp off"]["message"].splitlines()) == 2

    @pytest.mark.parametrize(("case", "got"), [("zero", "'0'"), ("text", "'many'")])
    def test_on_the_command_line_before_anything_starts(self, answers: dict[str, Any], case: str, got: str) -> None:
        outcome = answers["cases"][case]
        assert (outcome["error"], outcome["status"]) == ("SystemExit", 2)
        assert outcome["message"].endswith(f"expected a positive number of tokens or 'auto', got {got}")

    def test_an_unknown_version(self, answers: dict[str, Any]) -> None:
        text = refusal(answers["cases"]["unknown version"])
        assert text.startswith("PatchError: cannot place KV in blocks: ")
        assert "do not fit SGLang 0.5.99 (known versions: 0.5.23)" in text

    @pytest.mark.parametrize("case", ["unknown version, block 1", "unknown version, nothing asked for"])
    def test_an_unknown_version_serves_without_blocks(self, answers: dict[str, Any], case: str) -> None:
        assert "error" not in answers["cases"][case]

    @pytest.mark.parametrize("target", ONE_OF_EACH)
    def test_an_altered_definition(self, answers: dict[str, Any], target: str) -> None:
        text = refusal(answers["cases"][f"altered {target}"])
        assert text.startswith("PatchError: cannot place KV in blocks: 1 patch point(s) do not fit SGLang 0.5.23")
        assert f"{target}: source " in text
        assert "expected 0123456789abcdef" in text

    @pytest.mark.parametrize("case", ["HiCache", "HiCache, direct", "HiCache, file", "no HiCache, altered"])
    def test_hicache_with_what_was_tried(self, answers: dict[str, Any], case: str) -> None:
        assert answers["cases"][case].get("block_size") == 16, answers["cases"][case]

    @pytest.mark.parametrize(
        ("case", "text"),
        [
            ("HiCache, GQA", "NotImplementedError: HiCache with --dcp-size > 1 is only supported for MLA models"),
            ("HiCache, page_head", "got --hicache-io-backend kernel with --hicache-mem-layout page_head."),
            ("HiCache, mooncake", "HiCache storage that nobody tried: expected no third tier, or file, got "
             "--hicache-storage-backend mooncake."),
            ("HiCache, altered", f"PatchError: cannot place KV in blocks: 1 patch point(s) do not fit SGLang 0.5.23 (known "
             f"versions: 0.5.23).\n  {STORAGE_NAME}: source "),
        ],
    )  # fmt: skip
    def test_hicache_with_what_was_not(self, answers: dict[str, Any], case: str, text: str) -> None:
        """SGLang itself refuses models without MLA."""
        assert text in refusal(answers["cases"][case])

    def test_all_reasons_at_once(self, answers: dict[str, Any]) -> None:
        text = refusal(answers["cases"]["several"])
        assert "got block size 6 with page size 16" in text
        assert "got attention backend torch_native" in text


class TestExcluded:
    """SGLANG_PLUGINS leaves the plugin out: what names blocks is an error, and the variable alone does nothing."""

    def test_flag(self, answers: dict[str, Any]) -> None:
        outcome = answers["excluded"]["flag"]
        assert (outcome["error"], outcome["status"]) == ("SystemExit", 2)
        assert "unrecognized arguments: --dcp-block-size 16" in outcome["message"]

    def test_keyword(self, answers: dict[str, Any]) -> None:
        assert refusal(answers["excluded"]["keyword"]).startswith("TypeError: Unexpected keyword argument")
        assert "dcp_block_size" in answers["excluded_engine"]
        assert answers["excluded_engine"].startswith("TypeError")

    def test_variable_alone_is_stock_sglang(self, answers: dict[str, Any]) -> None:
        outcome = answers["excluded"]["variable"]
        assert (outcome["page_size"], outcome["block_size"], outcome["warnings"]) == (1, None, [])
        assert answers["excluded_registered"] == {"hooks": [], "steps": [], "imported": False, "layout": False}


def test_only_the_flag_and_the_start_are_hooked_until_blocks_are_asked_for(answers: dict[str, Any]) -> None:
    """All cases above only resolved arguments: nothing of the KV cache may be patched by that."""
    found = answers["registered"]
    assert found["hooks"] == ["add_flag", "carry_flag", "arm_process"]
    assert found["steps"] == ["_choose_page_size", "_choose_backend", "_finish"]
    assert not found["layout"]
