"""The docs' tables of what was tried and what is refused, made from the evidence and from the rules that refuse.

``python -m sglang_dcp_block.compatibility docs/compatibility.md`` renews them in place; ``--check`` only says whether they
are up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_dcp_block import evidence, made_tables
from sglang_dcp_block.support import RULES

PROGRAM = "python -m sglang_dcp_block.compatibility"
BEGIN = "<!-- begin {}: made by `make docs`; do not edit -->"


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


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    return made_tables.command(
        argv,
        program=PROGRAM,
        description="Renew the tables of what was tried and what is refused in a page of the docs.",
        page="docs/compatibility.md",
        tables={BEGIN.format(name): table for name, table in TABLES.items()},
    )


if __name__ == "__main__":
    raise SystemExit(main())
