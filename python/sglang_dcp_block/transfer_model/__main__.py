"""``python -m sglang_dcp_block.transfer_model docs/transfer-model.md``: renew the tables of that page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_dcp_block.transfer_model.tables import with_tables

PROGRAM = "python -m sglang_dcp_block.transfer_model"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    cli = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Renew the tables of modelled times in a page of the docs.",
        epilog=f"examples:\n  {PROGRAM} docs/transfer-model.md\n  {PROGRAM} --check docs/transfer-model.md",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is out of date")
    cli.add_argument("file", type=Path, metavar="FILE", help="Markdown page with the markers of the tables")
    args = cli.parse_args(argv)
    try:
        page = args.file.read_text(encoding="utf-8")
        renewed = with_tables(page)
    except (OSError, ValueError) as error:
        print(f"{PROGRAM}: error: {args.file}: {error}", file=sys.stderr)
        return 2
    if args.check and renewed != page:
        print(f"{args.file} is out of date. Run: {PROGRAM} {args.file}")
        return 1
    if renewed != page:
        args.file.write_text(renewed, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
