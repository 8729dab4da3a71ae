"""How findings are shown: a table for people, JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_dcp_block.doctor.findings import Finding, Level, exit_status
from sglang_dcp_block.doctor.pair import Row
from sglang_dcp_block.shown import plain

_MARK = {Level.OK: ("ok", "green"), Level.NOTE: ("note", "yellow"), Level.PROBLEM: ("PROBLEM", "bold red")}
INDENT = " " * 10
FOLD_FROM = 8  # findings that are all well under one heading: more of them are shown as one line


def as_json(findings: Sequence[Finding], servers: Sequence[str] = (), rows: Sequence[Row] = ()) -> str:
    """All of it, for programs."""
    side_by_side = {"servers": list(servers), "rows": [asdict(row) for row in rows]}
    data = {"status": exit_status(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps({**data, "side_by_side": side_by_side} if rows else data, indent=2)


def show(
    console: Console,
    findings: Sequence[Finding],
    servers: Sequence[str] = (),
    rows: Sequence[Row] = (),
    all_of_them: bool = False,
) -> None:
    """Print findings under their headings, servers side by side, and the verdict.

    Args:
        all_of_them: also those of long lists that are all well.
    """
    for part in dict.fromkeys(finding.part for finding in findings):
        here = [finding for finding in findings if finding.part == part]
        console.print(Text(part, style="bold"))
        for finding in here if all_of_them else folded(here):
            _show(console, finding)
    if len(servers) > 1:
        console.print(_table(servers, rows))
    counted = Counter(finding.level for finding in findings)
    problems, notes = counted[Level.PROBLEM], counted[Level.NOTE]
    end = f"{problems} problem{'s' * (problems != 1)}" if problems else "No problem"
    console.print(f"{end}, {notes} note{'s' * (notes != 1)}.", highlight=False)


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """The findings under one heading, those that are all well as one where they are many."""
    well = [finding for finding in findings if finding.level is Level.OK]
    rest = [finding for finding in findings if finding.level is not Level.OK]
    if len(well) < FOLD_FROM:
        return list(findings)
    return [
        Finding(well[0].part, f"{len(well)} of {len(findings)}", Level.OK, "as known (--verbose lists them)"),
        *rest,
    ]


def _show(console: Console, finding: Finding) -> None:
    word, style = _MARK[finding.level]
    line = Text(f"  {word:<8}", style=style)
    line.append(plain(f"{finding.what}: {finding.got}").replace("\n", f"\n{INDENT}"), style="")
    console.print(line, soft_wrap=True)
    if finding.advice:
        console.print(Text(f"{INDENT}{plain(finding.advice)}", style="dim"), soft_wrap=True)


def _table(servers: Sequence[str], rows: Sequence[Row]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("side by side")
    for server in servers:
        table.add_column(Text(server), overflow="fold")
    table.add_column("")
    for row in rows:
        mark = Text("DIFFERS", style="bold red") if row.differs else Text("")
        table.add_row(row.what, *(Text(plain(cell)) for cell in row.cells), mark)
    return table
