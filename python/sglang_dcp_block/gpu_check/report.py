"""Tables: with rich where it is installed, plain otherwise."""

from __future__ import annotations

from collections.abc import Sequence


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; all columns but the first and the last align right."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain(title, header, rows))
        return
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if 0 < i < len(header) - 1 else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def plain(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table as text.

    >>> print(plain("t", ["a", "b"], [["x", "1"], ["longer", "2"]]))
    t
    a       b
    x       1
    longer  2
    """
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([title, *text])
