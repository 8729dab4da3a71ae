"""The docs' tables of what was tried and what is refused, made from the evidence and from the rules that refuse.

``python -m sglang_dcp_block.compatibility docs/compatibility.md`` renews them in place; ``--check`` only says whether they
are up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from sglang_dcp_block import evidence
from sglang_dcp_block.support import RULES

PROGRAM = "python -m sglang_dcp_block.compatibility"
BEGIN = "<!-- begin {}: made by `make docs`; do not edit -->"
END = "<!-- end -->"


def _row(*cells: str) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"


def tried() -> str:
    """What was tried, as a Markdown table."""
    lines = ["| area | with blocks | state | how | seen by |", "|---|---|---|---|---|"]
    for row in evidence.ROWS:
        files = dict.fromkeys(test.partition("::")[0] for test in row.tests)
        tests = ", ".join(f"`tests/{file}`" for file in files) or "-"
        lines.append(_row(row.area, row.what, row.state.value, row.how, tests))
    return "\n".join(lines) + "\n"


def refused() -> str:
    """The rules as a Markdown table."""
    lines = ["| not with blocks | expected | what to do |", "|---|---|---|"]
    lines += [_row(rule.feature, rule.expected, rule.advice) for rule in RULES]
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {"tried": tried, "refused": refused}


def with_tables(page: str) -> str:
    """A page with what stands between the markers of each of :data:`TABLES` replaced.

    Raises:
        ValueError: the page has not exactly one of each marker, with an end after it.
    """
    for name, table in TABLES.items():
        marker = BEGIN.format(name)
        before, begin, rest = page.partition(marker)
        _, end, after = rest.partition(END)
        if not begin or not end or marker in rest:
            raise ValueError(f"expected one {marker!r} with one {END!r} after it")
        page = f"{before}{marker}\n{table()}{END}{after}"
    return page


def main(argv: list[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    cli = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Renew the tables of what was tried and what is refused in a page of the docs.",
        epilog=f"examples:\n  {PROGRAM} docs/compatibility.md\n  {PROGRAM} --check docs/compatibility.md",
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
    if not args.check:
        args.file.write_text(renewed, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
