"""``python -m sglang_dcp_block.demo``: stock SGLang with and without blocks, side by side, on this machine's CPUs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sglang_dcp_block.demo.cli import add_options, carry_out, port
from sglang_dcp_block.demo.plan import tiny_part, trained_part
from sglang_dcp_block.demo.report import TOLERANCE
from sglang_dcp_block.demo.run import run

PROGRAM = "python -m sglang_dcp_block.demo"

EXAMPLES = f"""\
examples:
  {PROGRAM}                          both parts
  {PROGRAM} --part tiny              eight ranks on the tiny model only
  {PROGRAM} --part trained --real    the trained model, at TP8+DCP8 too (about 8 GB of memory)
  {PROGRAM} --keep-logs logs         keep what each server wrote
  {PROGRAM}.pd --help                prefill and decode servers: the other demo

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
        "--port", type=port, default=0, help="port of the servers, one after the other (default: a free one)"
    )
    add_options(result)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    cli = parser()
    args = cli.parse_args(argv)
    if args.real and args.part == "tiny":
        cli.error("--real serves the trained model: expected --part trained or no --part, got --part tiny")
    parts = []
    if args.part != "tiny":
        parts.append(trained_part(args.real))
    if args.part != "trained":
        parts.append(tiny_part())
    return carry_out(
        cli,
        args,
        lambda console, options: run(parts, console, options),
        sum(part.minutes for part in parts),
        f"tokens equal, log-probabilities within {TOLERANCE:.0e}, layouts as asked for.",
    )


if __name__ == "__main__":
    raise SystemExit(main())
