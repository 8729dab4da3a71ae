"""``python -m upstream``: the patch series for upstream, its verification, and the fork that it makes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_dcp_block import __version__
from upstream import build, fork, verify, wheel

COMMANDS = """\
patch: write the series to dist/upstream, and apply it to a fresh copy of the release
verify: build it, then run its own tests, upstream's kits and, with --engine, the engine suite, without the plugin
fork: build it, then write the tree as a wheel to dist/fork
"""


def main() -> int:
    """Run the command line; returns an exit status."""
    cli = argparse.ArgumentParser(
        prog="python -m upstream",
        description=__doc__,
        epilog=COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("command", choices=["patch", "verify", "fork"])
    cli.add_argument("--version", default=wheel.VERSION, help="SGLang release (default %(default)s)")
    cli.add_argument(
        "--engine", action="store_true", help="verify: also the real engine (26 minutes on two idle cores)"
    )
    arguments = cli.parse_args()
    root = Path.cwd()
    if arguments.command == "verify":
        return verify.main(root, arguments.version, arguments.engine)
    status = build.main(root, arguments.version)
    if status == 0 and arguments.command == "fork":
        release = wheel.find(arguments.version)
        try:
            made = fork.build(root / "build" / "upstream" / "tree", release, __version__, root / "dist" / "fork")
        except fork.ForkError as error:
            print(f"upstream fork: {error}", file=sys.stderr)
            return 1
        print(made.relative_to(root))
    return status


if __name__ == "__main__":
    sys.exit(main())
