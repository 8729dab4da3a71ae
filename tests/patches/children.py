"""Scripts that must run in a process of their own, because they patch SGLang or count what is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sglang_dcp_block.cpu.environment import cpu_environment

HERE = Path(__file__).parent


def run_script(name: str, order: Any = None, timeout: float = 300, **environ: str) -> Any:
    """Hand ``order`` as JSON to a script of this folder and return its JSON answer."""
    env = {**os.environ, **environ}
    env.update(cpu_environment(2, env))
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, str(HERE / name), str(writer)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[writer],
        env=env,
        text=True,
    ) as process:
        os.close(writer)
        try:
            said, _ = process.communicate(json.dumps(order), timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    with os.fdopen(reader) as answer:
        text = answer.read()
    assert process.returncode == 0, f"{name} ended with {process.returncode}:\n{said[-4000:]}"
    return json.loads(text)
