"""The doctor on a machine that has neither SGLang nor torch: it says so, and judges flags all the same."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

HAS = ("numpy", "numpy.libs", "rich", "markdown_it", "mdurl", "pygments")  # what the package depends on


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder of modules: this package and what it depends on."""
    numpy = importlib.util.find_spec("numpy")
    assert numpy is not None
    assert numpy.origin is not None
    installed = Path(numpy.origin).parents[1]
    for name in HAS:
        if (installed / name).exists():
            (tmp_path / name).symlink_to(installed / name)
    package = importlib.util.find_spec("sglang_dcp_block")
    assert package is not None
    assert package.origin is not None
    (tmp_path / "sglang_dcp_block").symlink_to(Path(package.origin).parent)
    return tmp_path


def doctor(bare: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Without site-packages; processes that it starts have them."""
    command = [sys.executable, "-S", "-m", "sglang_dcp_block.cli", "doctor", *argv]
    return subprocess.run(command, env={"PYTHONPATH": str(bare)}, capture_output=True, text=True, timeout=120)


def test_it_says_what_is_missing_and_judges_the_flags(bare: Path) -> None:
    flags = ["--tp", "8", "--dcp-size", "8", "--dcp-block-size", "48", "--page-size", "64"]
    ended = doctor(bare, "--json", "--", *flags)
    assert ended.returncode == 1, ended.stderr
    found = {finding["what"]: finding for finding in json.loads(ended.stdout)["findings"]}
    for what in ("sglang", "torch", "triton", "SGLang's source", "entry point"):
        assert found[what]["level"] == "problem", found[what]
    assert "got block size 48 with page size 64" in found["refused"]["got"]


def test_running_servers_can_be_asked(bare: Path) -> None:
    ended = doctor(bare, "--url", "http://127.0.0.1:1", "--timeout", "5")
    assert ended.returncode == 1, ended.stderr
    assert "refused" in ended.stdout
