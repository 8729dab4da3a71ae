"""Attention backends through SGLang's real argument resolution: taken, kept or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from resolution_cases import refusal


class TestBackends:
    @pytest.mark.parametrize(
        ("case", "default"),
        [
            ("Hopper", "fa3"),
            ("Blackwell", "trtllm_mha"),
            ("16", "(torch_native|intel_amx)"),
            ("Hopper, MLA", "fa3"),
        ],
    )
    def test_a_default_that_cannot_read_blocks_is_replaced_and_said(
        self, answers: dict[str, Any], case: str, default: str
    ) -> None:
        outcome = answers["cases"][case]
        taken = "flashinfer" if "MLA" in case else "triton"
        assert outcome["backends"] == [taken, taken]
        (said,) = [line for line in outcome["warnings"] if "attention-backend" in line]
        assert re.fullmatch(
            "--dcp-block-size 16: --attention-backend is unset and SGLang's default here, "
            f"{default}, cannot read blocks; taking {taken}.",
            said,
        )

    @pytest.mark.parametrize("case", ["Hopper, nothing asked for", "Hopper, block 1"])
    def test_without_blocks_the_default_stays(self, answers: dict[str, Any], case: str) -> None:
        assert answers["cases"][case]["backends"] == ["fa3", "fa3"]
        assert answers["cases"][case]["warnings"] == []

    def test_a_named_one_with_a_block_path_is_kept_in_silence(self, answers: dict[str, Any]) -> None:
        outcome = answers["cases"]["Hopper, triton"]
        assert outcome["backends"] == ["triton", "triton"]
        assert not any("attention-backend" in line for line in outcome["warnings"])

    @pytest.mark.parametrize(
        ("case", "backends"),
        [("Blackwell, MLA", ["trtllm_mla"] * 2), ("Blackwell, MLA, cutedsl", ["trtllm_mla", "cutedsl_mla"])],
    )
    def test_backends_of_page_tables_take_blocks_and_pages_that_they_know(
        self, answers: dict[str, Any], case: str, backends: list[str]
    ) -> None:
        """SGLang's own default on Blackwell. It raises the page that the block asked for; the block still divides it."""
        outcome = answers["cases"][case]
        assert outcome.get("backends") == backends, outcome
        assert (outcome["page_size"], outcome["block_size"]) == (64, 16)
        assert not any("attention-backend" in line for line in outcome["warnings"])

    @pytest.mark.parametrize("case", ["Hopper, fa3", "Hopper, decode only"])
    def test_a_named_one_without_a_block_path_is_refused(self, answers: dict[str, Any], case: str) -> None:
        text = refusal(answers["cases"][case])
        assert "expected triton for GQA and MHA models, got attention backend fa3. Pass it as --" in text
        assert text.startswith("BlockSizeError: --dcp-block-size 16 cannot be used here:")

    @pytest.mark.parametrize(
        ("case", "backend"), [("model's choice, special", "minicpm_flashattn"), ("model's choice, split", "flashinfer")]
    )
    def test_what_the_model_itself_needs_is_refused_not_replaced(
        self, answers: dict[str, Any], case: str, backend: str
    ) -> None:
        assert f"got attention backend {backend}" in refusal(answers["cases"][case])

    def test_a_named_one_of_mla_too(self, answers: dict[str, Any]) -> None:
        """flashmla forces pages of 64 tokens, so the block still fits: the backend is the one reason."""
        _, reason = refusal(answers["cases"]["Hopper, MLA, flashmla"]).splitlines()
        assert "or cutedsl_mla for MLA models, got attention backend flashmla." in reason


class TestBackendsOnCpus:
    """The stand-in for the platform check lets DCP start off GPUs; only some backends have it there."""

    @pytest.mark.parametrize(
        "case", ["torch_native, no DCP", "flashinfer", "triton, MLA, blocks of 1"],
    )  # fmt: skip
    def test_with_a_dcp_path_it_starts(self, answers: dict[str, Any], case: str) -> None:
        assert "error" not in answers["cases"][f"CPU, {case}"], answers["cases"][f"CPU, {case}"]

    @pytest.mark.parametrize(
        ("case", "right", "got"),
        [
            ("unset", "triton", "(torch_native|intel_amx)"),
            ("torch_native", "triton", "torch_native"),
            ("intel_amx, blocks of 1", "triton", "(torch_native|intel_amx)"),
            ("decode", "triton", "torch_native"),
            ("prefill", "triton", "(torch_native|intel_amx)"),
            ("flashinfer, GQA", "triton", "flashinfer"),
            ("torch_native, MLA", "flashinfer", "torch_native"),
            ("triton, MLA", "flashinfer", "triton"),
        ],
    )
    def test_without_one_it_is_refused(self, answers: dict[str, Any], case: str, right: str, got: str) -> None:
        text = refusal(answers["cases"][f"CPU, {case}"])
        assert re.match(
            f"ShimError: --dcp-size 2 cannot be used here: expected the attention backend {right}, which has DCP on CPUs "
            rf"for .* models, got {got}\. Pass {right} as --attention-backend",
            text,
        ), text

    def test_with_blocks_too(self, answers: dict[str, Any]) -> None:
        text = refusal(answers["cases"]["CPU, torch_native, blocks"])
        assert text.startswith("BlockSizeError: --dcp-block-size 16 cannot be used here:")
        assert "got attention backend torch_native" in text
