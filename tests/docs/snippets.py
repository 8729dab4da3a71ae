"""Runs what the docs mark as runnable: Python sessions by doctest, other blocks by Python or the shell."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pages import ROOT, Code, Page

TIMEOUT_SECONDS = 300


def runnable(page: Page) -> Iterator[Code]:
    """Sessions with prompts, and blocks that are marked."""
    for code in page.code():
        if code.is_block and (code.runnable or ">>> " in code.text):
            yield code


def failure(code: Code, folder: Path) -> str | None:
    """Run a block; what went wrong, or None.

    Args:
        folder: an empty one, for a stand-in of the console script, which need not be installed.
    """
    if ">>> " in code.text:
        test = doctest.DocTestParser().get_doctest(code.text, {}, f"line {code.line}", None, 0)
        said: list[str] = []
        result = doctest.DocTestRunner().run(test, out=said.append)
        return "".join(said) if result.failed else None
    if code.language in ("py", "python"):
        command = [sys.executable, "-c", code.text]
    else:
        command = ["bash", "-euo", "pipefail", "-c", code.text]
    script = folder / "sglang-dcp-block"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m sglang_dcp_block.cli "$@"\n')
    script.chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    child = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    return f"status {child.returncode}\n{child.stdout}{child.stderr}" if child.returncode else None
