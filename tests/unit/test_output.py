"""What commands print where it cannot be written, is not read to its end, or must be plain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import run
from rich.console import Console
from rich.text import Text

from sglang_dcp_block import output

PLAN = (sys.executable, "-m", "sglang_dcp_block.cli", "plan", "--model", "kimi-k2", "--tp", "8", "--dcp", "8")
DOCTOR = (sys.executable, "-m", "sglang_dcp_block.cli", "doctor", "--url", "http://127.0.0.1:1")
FULL = Path("/dev/full")


@pytest.mark.parametrize(
    "command", [PLAN, (*PLAN, "--json"), DOCTOR, (*DOCTOR, "--json")], ids=lambda c: " ".join(c[3:])
)
class TestEnds:
    def ended(self, command: tuple[str, ...], shell: str) -> subprocess.CompletedProcess[str]:
        return run("bash", "-c", f'"$@" {shell}', "bash", *command)

    @pytest.mark.skipif(not FULL.exists(), reason="expected /dev/full")
    def test_a_full_disk_is_a_line(self, command: tuple[str, ...]) -> None:
        got = self.ended(command, "> /dev/full")
        assert (got.returncode, got.stderr.count("\n")) == (2, 1), got.stderr
        assert "error: expected to write to standard output, got: No space left on device" in got.stderr
        assert self.ended(command, "> /dev/full 2> /dev/full").returncode == 2

    def test_closed_output_is_a_line(self, command: tuple[str, ...]) -> None:
        got = self.ended(command, ">&-")
        assert (got.returncode, got.stderr.count("\n")) == (2, 1), got.stderr
        assert "expected to write to standard output, got: it is closed" in got.stderr

    def test_a_reader_that_has_gone_is_no_error(self, command: tuple[str, ...]) -> None:
        got = self.ended(command, "| true; exit ${PIPESTATUS[0]}")
        assert (got.returncode, got.stderr) == (141, "")


def test_a_terminal_without_these_letters_gets_others() -> None:
    got = run(*PLAN, PYTHONIOENCODING="ascii")
    assert got.returncode == 0, got.stderr
    assert got.stdout.isascii()
    assert "TP alone" in got.stdout


@pytest.mark.parametrize(("more", "is_plain"), [({}, True), ({"NO_COLOR": "1"}, True), ({"NO_COLOR": ""}, False)])
def test_escape_codes_only_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, str], is_plain: bool
) -> None:
    """The last case forces a terminal; on one, NO_COLOR ends bold letters, too."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in more.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setenv("FORCE_COLOR", "1")
    said = output.rendered(output.console(), lambda on: on.print(Text("heading", style="bold red")))
    assert ("\x1b" not in said) is is_plain
    assert "heading" in said


def test_a_shorter_terminal_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert output.console().width == Console().width == 40
    assert output.console(width=120).width == 120


def test_what_is_printed_is_as_it_was_rendered(capsys: pytest.CaptureFixture[str]) -> None:
    assert output.put("program", "a ÷ b\n", 1) == 1
    assert capsys.readouterr().out == "a ÷ b\n"
