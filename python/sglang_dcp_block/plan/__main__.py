"""``python -m sglang_dcp_block.plan``: the same as ``sglang-dcp-block plan``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sglang_dcp_block.plan.command import DESCRIPTION, EXAMPLES, PROGRAM, add_arguments, run


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
