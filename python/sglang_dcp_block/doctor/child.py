"""Runs Python in a process of its own: what is imported there may crash or hang without taking the doctor along."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dcp_block.shown import plain

MAX_TEXT = 400  # characters of what a child said


@dataclass(frozen=True, slots=True)
class Ending:
    """How a child ended."""

    ok: bool
    output: str  # its standard output
    error: str  # its last line on standard error, or why there is none


def run(arguments: Sequence[str], timeout: float, stdin: str = "") -> Ending:
    """Run this Python with ``arguments``; never raises.

    Args:
        timeout: seconds until it is killed.
    """
    try:
        child = subprocess.run(
            [sys.executable, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ending(False, "", f"no answer in {timeout:.0f} s")
    except OSError as error:
        return Ending(False, "", f"cannot start {sys.executable}: {error.strerror}")
    lines = [line for line in child.stderr.splitlines() if line.strip()]
    last = plain(lines[-1])[:MAX_TEXT] if lines else ""
    if child.returncode < 0:
        last = f"ended by signal {-child.returncode}{': ' if last else ''}{last}"
    elif child.returncode and not last:
        last = f"ended with status {child.returncode}"
    return Ending(child.returncode == 0, child.stdout, last)
