"""``python -m upstream``: build the patch series."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from upstream import build, wheel


def main() -> int:
    cli = argparse.ArgumentParser(prog="python -m upstream", description=__doc__)
    cli.add_argument("command", choices=["patch"], help="patch: write dist/upstream")
    cli.add_argument("--version", default=wheel.VERSION, help="SGLang release (default %(default)s)")
    arguments = cli.parse_args()
    return build.main(Path.cwd(), arguments.version)


if __name__ == "__main__":
    sys.exit(main())
