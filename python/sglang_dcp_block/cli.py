"""``sglang-dcp-block``: the command for people who run servers.  A subcommand's module is loaded when it is used."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from sglang_dcp_block import __version__

PROGRAM = "sglang-dcp-block"
# Subcommand -> what it is for, and its module: DESCRIPTION, EXAMPLES, add_arguments(parser), run(args) -> exit status.
COMMANDS = {
    "doctor": (
        "what keeps a server with blocks from starting, and what a running one really uses",
        "sglang_dcp_block.doctor.command",
    ),
    "plan": ("which block and page size for a model, its requests and a link", "sglang_dcp_block.plan.command"),
}
EXAMPLES = f"""\
examples:
  {PROGRAM} doctor
  {PROGRAM} doctor -- --model-path MODEL --tp 8 --dcp-size 8 --dcp-block-size 64
  {PROGRAM} doctor --url http://localhost:30000
  {PROGRAM} plan --model deepseek-v3 --tp 8 --dcp 8 --requests agent --link rdma-400
  {PROGRAM} doctor --help

The flags of the servers themselves: sglang serve ... --dcp-block-size N, see docs/operations.md.
"""


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """Build the parser of the command line.

    Args:
        command: the subcommand whose options it knows; of the others, it knows the names.
    """
    result = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Tools for SGLang servers with decode context parallelism in blocks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = result.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (summary, module_name) in COMMANDS.items():
        module = importlib.import_module(module_name) if name == command else None
        sub = commands.add_parser(
            name,
            help=summary,
            description=getattr(module, "DESCRIPTION", summary),
            epilog=getattr(module, "EXAMPLES", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module is not None:
            module.add_arguments(sub)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    words, server_flags = words[:end], words[end + 1 :]
    command = next((word for word in words if word in COMMANDS), None)
    try:
        return _run(command, words, server_flags)
    except KeyboardInterrupt:  # also while a subcommand is imported, which takes longest
        print(f"{PROGRAM}{f' {command}' if command else ''}: interrupted", file=sys.stderr)
        return 130


def _run(command: str | None, words: Sequence[str], server_flags: Sequence[str]) -> int:
    cli = parser(command)
    args = cli.parse_args(words)
    if server_flags:
        if not hasattr(args, "server_flags"):
            cli.error(f"{args.command}: expected nothing behind --, got {' '.join(server_flags)}")
        args.server_flags = server_flags
    _, module_name = COMMANDS[args.command]
    status: int = importlib.import_module(module_name).run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
