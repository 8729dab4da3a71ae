"""The docs' table of what blocks are refused with, made from the rules that refuse.

``python -m sglang_dcp_block.compatibility docs/compatibility.md`` renews it in place; ``--check`` only says whether it is
up to date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_dcp_block.support import RULES

PROGRAM = "python -m sglang_dcp_block.compatibility"
BEGIN = "<!-- begin: made from support.RULES by `make docs`; do not edit -->"
END = "<!-- end -->"


def table() -> str:
    """The rules as a Markdown table."""
    lines = ["| not with blocks | expected | what to do |", "|---|---|---|"]
    cells = ((rule.feature, rule.expected, rule.advice) for rule in RULES)
    lines += ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in cells]
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """A page with what stands between its two markers replaced by :func:`table`.

    Raises:
        ValueError: the page has not exactly one of each marker, in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest:
        raise ValueError(f"expected one {BEGIN!r} with one {END!r} after it")
    return f"{before}{BEGIN}\n{table()}{END}{after}"


def main(argv: list[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    cli = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Renew the table of refused combinations in a page of the docs.",
        epilog=f"examples:\n  {PROGRAM} docs/compatibility.md\n  {PROGRAM} --check docs/compatibility.md",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the table is out of date")
    cli.add_argument("file", type=Path, metavar="FILE", help="Markdown page with the markers of the table")
    args = cli.parse_args(argv)
    try:
        page = args.file.read_text(encoding="utf-8")
        renewed = with_table(page)
    except (OSError, ValueError) as error:
        print(f"{PROGRAM}: error: {args.file}: {error}", file=sys.stderr)
        return 2
    if args.check and renewed != page:
        print(f"{args.file} is out of date. Run: {PROGRAM} {args.file}")
        return 1
    if not args.check:
        args.file.write_text(renewed, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
