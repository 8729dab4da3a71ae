"""What the command lines of both demos share: options, where logs go, the last words and the exit status."""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from sglang_dcp_block.cpu.smollm2 import BuildError
from sglang_dcp_block.demo.run import Options
from sglang_dcp_block.demo.servers import ServerFailed


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options about the servers' logs and how long to wait."""
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="write the servers' logs there and keep them")
    parser.add_argument(
        "--start-timeout", type=seconds, default=900, metavar="S", help="seconds for a start (default 900)"
    )
    parser.add_argument(
        "--answer-timeout", type=seconds, default=1800, metavar="S", help="seconds for an answer (default 1800)"
    )


def port(text: str) -> int:
    """Read a TCP port; 0 is a free one."""
    value = int(text) if text.isdecimal() else -1
    if not 0 <= value < 1 << 16:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return value


def seconds(text: str) -> float:
    """Read a time in seconds, above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def carry_out(
    cli: argparse.ArgumentParser,
    args: argparse.Namespace,
    work: Callable[[Console, Options], list[str]],
    minutes: float,
    passed: str,
) -> int:
    """Do the ``work``, which returns a line for everything that is wrong, and say how it ended.

    Args:
        cli: what read ``args``, for errors in them.
        minutes: how long it takes on two idle cores.
        passed: what is known if nothing is wrong.
    Returns:
        The exit status: 0, 1 for a mismatch or a server that failed, 130 for an interrupt.
    """
    # An end from outside must end the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    logs = args.keep_logs or Path(tempfile.mkdtemp(prefix="sglang-dcp-block-"))
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        cli.error(f"--keep-logs: expected a folder or a path for one, got {logs} ({error.strerror})")
    console.print(
        f"About {minutes:.0f} minutes on two cores. Logs of the servers: {logs}", highlight=False, soft_wrap=True
    )
    began = time.monotonic()
    try:
        wrong = work(console, Options(logs, getattr(args, "port", 0), args.start_timeout, args.answer_timeout))
    except (ServerFailed, BuildError) as failure:
        console.print(f"\nFAILED. {failure}", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\ninterrupted")
        return 130
    console.print(f"Took {(time.monotonic() - began) / 60:.1f} minutes.", highlight=False)
    if wrong:
        console.print("\n".join(["FAILED:", *wrong]), markup=False, highlight=False, soft_wrap=True)
        return 1
    if args.keep_logs is None:
        shutil.rmtree(logs)
    console.print(f"PASSED: {passed}", markup=False, highlight=False, soft_wrap=True)
    return 0
