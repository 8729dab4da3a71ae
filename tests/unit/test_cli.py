"""``sglang-dcp-block``: the command finds its subcommands, and their options, lazily."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sglang_dcp_block import __version__, cli

ROOT = Path(__file__).parents[2]


def test_the_console_script_is_this_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {cli.PROGRAM: "sglang_dcp_block.cli:main"}


def test_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0
    assert all(name in said for name in cli.COMMANDS)
    assert "examples:" in said


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_each_subcommand_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0
    assert f"usage: {cli.PROGRAM} {command}" in said
    assert "examples:" in said


@pytest.mark.parametrize("argv", [[], ["mend"], ["doctor", "--colour"]])
def test_wrong_use_ends_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("during", "argv", "said"),
    [
        ("importlib.import_module", ["plan"], "sglang-dcp-block plan: interrupted\n"),
        ("parser", ["doctor"], "sglang-dcp-block doctor: interrupted\n"),
        ("parser", ["--version"], "sglang-dcp-block: interrupted\n"),
    ],
)
def test_an_interrupt_before_a_subcommand_runs_is_a_line(
    during: str, argv: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"sglang_dcp_block.cli.{during}", interrupted)
    assert cli.main(argv) == 130
    assert capsys.readouterr().err == said


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"sglang-dcp-block {__version__}\n"


def test_help_imports_neither_torch_nor_sglang_nor_a_subcommand() -> None:
    script = (
        "import sys\nfrom sglang_dcp_block import cli\ncli.parser()\n"
        "print([m for m in ('torch', 'sglang', 'rich', 'sglang_dcp_block.doctor') if m in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert child.stdout == "[]\n"
