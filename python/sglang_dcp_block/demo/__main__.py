"""``python -m sglang_dcp_block.demo``: stock SGLang with and without blocks, side by side, on this machine's CPUs."""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sglang_dcp_block.cpu.smollm2 import BuildError
from sglang_dcp_block.demo.plan import tiny_part, trained_part
from sglang_dcp_block.demo.report import TOLERANCE
from sglang_dcp_block.demo.run import Options, run
from sglang_dcp_block.demo.servers import ServerFailed

PROGRAM = "python -m sglang_dcp_block.demo"

EXAMPLES = f"""\
examples:
  {PROGRAM}                          both parts
  {PROGRAM} --part tiny              eight ranks on the tiny model only
  {PROGRAM} --part trained --real    the trained model, at TP8+DCP8 too (about 8 GB of memory)
  {PROGRAM} --keep-logs logs         keep what each server wrote

Needs no GPU. The first run fetches the trained model with pip (90 MB) and keeps it in ~/.cache/sglang-dcp-block
($SGLANG_DCP_BLOCK_CACHE). Exit status: 0 if everything is equal, 1 for a mismatch or a server that failed.
"""


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    result = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Send the same prompts to real SGLang servers without DCP, with token round-robin and with blocks; "
        "compare log-probabilities and tokens.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--part", choices=("trained", "tiny"), help="run one part only")
    result.add_argument("--real", action="store_true", help="serve the trained model at TP8+DCP8 as well")
    result.add_argument(
        "--port", type=_port, default=0, help="port of the servers, one after the other (default: a free one)"
    )
    result.add_argument("--keep-logs", type=Path, metavar="DIR", help="write the servers' logs there and keep them")
    result.add_argument(
        "--start-timeout", type=_seconds, default=900, metavar="S", help="seconds for a start (default 900)"
    )
    result.add_argument(
        "--answer-timeout", type=_seconds, default=1800, metavar="S", help="seconds for an answer (default 1800)"
    )
    return result


def _port(text: str) -> int:
    value = int(text) if text.isdecimal() else -1
    if not 0 <= value < 1 << 16:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    cli = parser()
    args = cli.parse_args(argv)
    if args.real and args.part == "tiny":
        cli.error("--real serves the trained model: expected --part trained or no --part, got --part tiny")
    # An end from outside must end the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    parts = []
    if args.part != "tiny":
        parts.append(trained_part(args.real))
    if args.part != "trained":
        parts.append(tiny_part())
    logs = args.keep_logs or Path(tempfile.mkdtemp(prefix="sglang-dcp-block-"))
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        cli.error(f"--keep-logs: expected a folder or a path for one, got {logs} ({error.strerror})")
    minutes = sum(part.minutes for part in parts)
    console.print(
        f"About {minutes:.0f} minutes on two cores. Logs of the servers: {logs}", highlight=False, soft_wrap=True
    )
    began = time.monotonic()
    try:
        wrong = run(parts, console, Options(logs, args.port, args.start_timeout, args.answer_timeout))
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
    console.print(
        f"PASSED: tokens equal, log-probabilities within {TOLERANCE:.0e}, layouts as asked for.", highlight=False
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
