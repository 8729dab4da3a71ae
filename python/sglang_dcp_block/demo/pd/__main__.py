"""``python -m sglang_dcp_block.demo.pd``: prefill and decode servers over Mooncake, on this machine's CPUs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sglang_dcp_block.demo.cli import add_options, carry_out
from sglang_dcp_block.demo.pd import mooncake
from sglang_dcp_block.demo.pd.plan import DCP_SIZES, DEFAULT_DCP_SIZE, pd_plan
from sglang_dcp_block.demo.pd.run import run
from sglang_dcp_block.demo.report import TOLERANCE

PROGRAM = "python -m sglang_dcp_block.demo.pd"

EXAMPLES = f"""\
examples:
  {PROGRAM}                     prefill on one and on two ranks, decode on eight
  {PROGRAM} --dcp 2             decode on two: a quick look
  {PROGRAM} --keep-logs logs    keep what each server wrote

Needs no GPU and no RDMA: Mooncake sends over TCP, on this machine only. It needs the system library libibverbs.
Exit status: 0 if everything is as expected, 1 for a mismatch, a server that failed, or if Mooncake does not load.
"""


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    result = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Send the same prompts to one plain SGLang server, and to prefill and decode servers that keep KV by "
        "tokens and in blocks; compare log-probabilities and what was sent.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "--dcp",
        type=int,
        choices=DCP_SIZES,
        default=DEFAULT_DCP_SIZE,
        help=f"ranks of the decode servers (default {DEFAULT_DCP_SIZE})",
    )
    add_options(result)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    cli = parser()
    args = cli.parse_args(argv)
    try:
        mooncake.check()
    except mooncake.MooncakeMissing as missing:
        print(f"{PROGRAM}: error: {missing}", file=sys.stderr)
        return 1
    plan = pd_plan(args.dcp)
    return carry_out(
        cli,
        args,
        lambda console, options: run(plan, console, options),
        plan.minutes,
        f"tokens equal, log-probabilities within {TOLERANCE:.0e}, each row sent once, in the expected segments.",
    )


if __name__ == "__main__":
    raise SystemExit(main())
