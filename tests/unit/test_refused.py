"""Refused starts: a command ends with the text alone, a program catches an exception, and nothing else is hidden."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sglang_dcp_block.config import BlockSizeError
from sglang_dcp_block.cpu.shims import ShimError
from sglang_dcp_block.patches.agreement import DisagreementError
from sglang_dcp_block.patches.register import PatchError
from sglang_dcp_block.refused import StartRefused

TEXT = "--dcp-block-size 6 cannot be used here:\n  a reason."


def ended(body: str) -> subprocess.CompletedProcess[str]:
    """A command that turns refusals into their text, and then runs ``body``."""
    script = (
        "from sglang_dcp_block.config import BlockSizeError\nfrom sglang_dcp_block.refused import end_with_the_text\n"
        f"end_with_the_text()\nend_with_the_text()\ntext = {TEXT!r}\n{body}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    return done


def test_the_text_alone() -> None:
    assert ended("raise BlockSizeError(text)").stderr == f"BlockSizeError: {TEXT}\n"


def test_another_error_as_ever() -> None:
    lines = ended("raise ValueError(text)").stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert f"ValueError: {TEXT}".splitlines() == lines[-2:]


@pytest.mark.parametrize("how", ["from error", ""])
def test_what_it_came_of_is_shown(how: str) -> None:
    shown = ended(f"try:\n  1 / 0\nexcept ZeroDivisionError as error:\n  raise BlockSizeError(text) {how}").stderr
    assert "ZeroDivisionError: division by zero" in shown
    assert shown.endswith(f"BlockSizeError: {TEXT}\n")


def test_nothing_is_swallowed_from_a_program() -> None:
    done = ended("try:\n  raise BlockSizeError(text)\nexcept ValueError as error:\n  raise SystemExit(str(error))")
    assert done.stderr == f"{TEXT}\n"


@pytest.mark.parametrize("error", [BlockSizeError, PatchError, DisagreementError, ShimError])
def test_one_type_for_all(error: type[Exception]) -> None:
    assert issubclass(error, StartRefused)
    assert issubclass(error, ValueError if error is BlockSizeError else RuntimeError)
