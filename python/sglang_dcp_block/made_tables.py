"""Tables in Markdown pages that a program makes: between two markers, renewed in place by a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

END = "<!-- end -->"
Tables = Mapping[
    str, Callable[[], str]
]  # the marker that a table stands behind -> its lines, with a newline at the end


def renew(page: str, tables: Tables) -> str:
    """A page with what stands between the markers replaced.

    Raises:
        ValueError: the page has not exactly one of each marker, with an end after it.
    """
    for marker, table in tables.items():
        before, begin, rest = page.partition(marker)
        _, end, after = rest.partition(END)
        if not begin or not end or marker in rest:
            raise ValueError(f"expected one {marker!r} with one {END!r} after it")
        page = f"{before}{marker}\n{table()}{END}{after}"
    return page


def command(argv: Sequence[str] | None, *, program: str, description: str, page: str, tables: Tables) -> int:
    """The command line ``program [--check] FILE``; returns the exit status.

    Args:
        page: the file of the examples.
    """
    cli = argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog=f"examples:\n  {program} {page}\n  {program} --check {page}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is out of date")
    cli.add_argument("file", type=Path, metavar="FILE", help="Markdown page with the markers of the tables")
    args = cli.parse_args(argv)
    try:
        old = args.file.read_text(encoding="utf-8")
        new = renew(old, tables)
    except (OSError, ValueError, LookupError) as error:
        print(f"{program}: error: {args.file}: {error}", file=sys.stderr)
        return 2
    if args.check and new != old:
        print(f"{args.file} is out of date. Run: {program} {args.file}")
        return 1
    if new != old:
        args.file.write_text(new, encoding="utf-8")
    return 0
