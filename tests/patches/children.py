"""Scripts that must run in a process of their own, because they patch SGLang or count what is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sglang_dcp_block.cpu.environment import cpu_environment

HERE = Path(__file__).parent


def run_script(name: str, order: Any = None, timeout: float = 800, **environ: str) -> Any:
    """Hand ``order`` as JSON to a script of this folder and return its JSON answer."""
    env = {**os.environ, **environ}
    env.update(cpu_environment(2, env))
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        child = subprocess.run(
            [sys.executable, str(HERE / name), answer.name],
            input=json.dumps(order),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            text=True,
            timeout=timeout,
        )
        assert child.returncode == 0, f"{name} ended with {child.returncode}:\n{child.stdout[-4000:]}"
        return json.load(answer)
