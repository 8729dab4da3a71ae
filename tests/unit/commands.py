"""Commands with changes to the environment, and scripts inside the CPU environment."""

from __future__ import annotations

import os
import subprocess
import sys

from sglang_dcp_block.cpu import cpu_environment


def run(*command: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env={**os.environ, **changes}, capture_output=True, text=True, timeout=120)


def python(script: str, *, ranks: int = 1, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a script inside the environment."""
    return run(sys.executable, "-c", script, **{**cpu_environment(ranks), **changes})
