"""The doctor asks SGLang itself what flags resolve to: the real resolution, in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dcp_block.config import GROUP_KEYWORD, KEYWORD
from sglang_dcp_block.doctor import command, flags, resolve, server
from sglang_dcp_block.doctor.findings import Level

COMMON = ["--device", "cpu", "--skip-tokenizer-init", "--tp", "2", "--dcp-size", "2"]


@pytest.mark.parametrize(
    ("argv", "level", "got"),
    [
        (["--dcp-block-size", "auto"], Level.OK, "blocks of 64 tokens over 2 ranks"),
        (["--dcp-block-size", "6", "--page-size", "16"], Level.PROBLEM, "got block size 6 with page size 16"),
    ],
)
def test_what_sglang_makes_of_them(
    argv: list[str], level: Level, got: str, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    checked = flags.by_sglang(["--model-path", str(checkpoints("gqa")), *COMMON, *argv], timeout=600)
    assert any(finding.level is level and got in finding.got for finding in checked.findings), checked.findings
    assert (level is Level.PROBLEM) == any(finding.level is Level.PROBLEM for finding in checked.findings)


@pytest.mark.parametrize(("flag", "problems"), [(["--dcp-block-size", "64"], 0), ([], 1)])
def test_a_variable_that_is_no_block_size_is_one_problem_at_most(
    flag: list[str], problems: int, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.setenv("SGLANG_DCP_BLOCK_SIZE", "nonsense")
    monkeypatch.setattr(command.libraries, "check", lambda **_: [])  # seconds, and nothing about variables
    findings = command.of_machine(["--model-path", str(checkpoints("gqa")), *COMMON, *flag])
    about = [finding for finding in findings if "nonsense" in finding.got]
    assert sum(finding.level is Level.PROBLEM for finding in about) == problems, about
    layouts = [finding.got for finding in findings if finding.what == "layout"]
    assert layouts == ["blocks of 64 tokens over 2 ranks"] * (1 - problems)


def test_what_is_read_of_a_server_is_there() -> None:
    """Else the doctor would take a renamed argument for one that is unset."""
    from sglang.srt.arg_groups.field_order import POSITIONAL_FIELD_ORDER

    arguments = set(POSITIONAL_FIELD_ORDER)
    of_others = {"version", "max_total_num_tokens"}  # of the HTTP server, and of a scheduler's start-up info
    ours = {KEYWORD, GROUP_KEYWORD}
    assert set(server.FIELDS) - of_others - ours <= arguments
    assert set(resolve.FIELDS) <= arguments
