"""``python -m sglang_dcp_block.cpu``: run a command where stock SGLang works without a GPU."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from sglang_dcp_block.cpu.environment import MAX_RANKS, PLUGIN, PLUGIN_GROUP, RAGGED_LSE, TORCH_MERGE, cpu_environment
from sglang_dcp_block.output import put
from sglang_dcp_block.shown import shown

PROGRAM = "python -m sglang_dcp_block.cpu"

EXAMPLES = f"""\
examples:
  {PROGRAM} --ranks 2 -- python my_engine_script.py
  {PROGRAM} --ranks 2 -- python -m sglang.launch_server --model-path MODEL \\
      --device cpu --tp-size 2 --dcp-size 2 --attention-backend triton --disable-cuda-graph --max-total-tokens 1024
  {PROGRAM} --ranks 8 -- pytest tests/engine
  eval "$({PROGRAM} --ranks 2 --print)"

With --dcp-size, pass --attention-backend triton (flashinfer, for MLA): SGLang's backends for CPUs know nothing of DCP, and
are refused.
Programs are looked for beside this Python first, as in an active virtual environment.
The command replaces this process, so its exit status is the command's; 127 or 126 if it is not found or cannot be run.

variables that change the stand-ins:
  {RAGGED_LSE}=e   the ragged FlashInfer wrapper returns natural-log LSE (default 2: base 2, as FlashInfer does)
  {TORCH_MERGE}=1  merge partial attention outputs in torch, not in the interpreted Triton kernel
"""


def _rank_count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 1 <= count <= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {MAX_RANKS}, got {shown(text)}")
    return count


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    result = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [--ranks N] (--print | -- COMMAND [ARG ...])",
        description="Run a command in an environment where stock SGLang, with TP and DCP, works without a GPU.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "--ranks",
        type=_rank_count,
        default=1,
        metavar="N",
        help="scheduler processes of one server, tp_size * pp_size * dp_size (default 1; more do no harm)",
    )
    result.add_argument("--print", action="store_true", help="print the variables as `export` lines and run nothing")
    result.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run, after a lone --")
    return result


def _plugin_is_installed() -> bool:
    return any(entry.name == PLUGIN for entry in entry_points(group=PLUGIN_GROUP))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns an exit status only if the command could not be started, or for ``--print``."""
    cli = parser()
    args = cli.parse_args(argv)
    command: list[str] = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.print and command:
        cli.error(f"--print runs nothing: expected no command, got {shlex.join(command)!r}")
    if not args.print and not any(command[:1]):
        cli.error("expected a command after --, got none")
    if not _plugin_is_installed():
        print(
            f"{PROGRAM}: warning: SGLang will not find the plugin {PLUGIN!r}, the package is importable but not"
            " installed (pip install --no-deps . in a checkout)",
            file=sys.stderr,
        )
    environment = cpu_environment(args.ranks)
    if args.print:
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in environment.items()]
        return put(PROGRAM, "".join(lines), 0)
    try:
        os.execvpe(command[0], command, {**os.environ, **environment})
    except FileNotFoundError:
        print(f"{PROGRAM}: error: command not found: {command[0]}", file=sys.stderr)
        return 127
    except OSError as error:
        print(f"{PROGRAM}: error: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 126


if __name__ == "__main__":
    sys.exit(main())
