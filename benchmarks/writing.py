"""Writes a result as Markdown, CSV and, with matplotlib (requirements/plots.txt), PNG."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import Result, Row


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a result comes from; the same for all of a run."""

    command: str
    versions: str
    machine: str
    load: str  # while this one ran


def columns(result: Result) -> list[str]:
    """The header of its CSV."""
    case = list(result.rows[0].case) if result.rows else []
    spread = [f"{name}_{result.unit}" for name in ("p20", "p50", "p80")]
    compared = ["baseline", f"baseline_p50_{result.unit}", "ratio"]
    return ["way", *case, "bytes", "segments", *spread, *compared, "versions", "command"]


def as_csv(result: Result, provenance: Provenance) -> str:
    """A line a row. Missing numbers are empty.

    Raises:
        ValueError: rows that do not vary the same things.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns(result))
    for row in result.rows:
        if list(row.case) != list(result.rows[0].case):
            raise ValueError(f"{result.name}: expected columns {list(result.rows[0].case)}, got {list(row.case)}")
        numbers = (row.spread.p20, row.spread.p50, row.spread.p80)
        writer.writerow([
            row.way, *row.case.values(), _or_empty(row.num_bytes), _or_empty(row.segments),
            *(f"{number:.6g}" for number in numbers), row.baseline, f"{row.baseline_p50:.6g}", f"{row.ratio:.4g}",
            provenance.versions, provenance.command,
        ])  # fmt: skip
    return out.getvalue()


def as_markdown(result: Result, provenance: Provenance, *, has_plot: bool) -> str:
    """A page: what was measured, on what, what must hold, the rows; those that lose are marked."""
    parts = [
        f"# {result.title}",
        f"`{provenance.command}`\\\n{provenance.machine}; while it ran: {provenance.load}\\\n{provenance.versions}",
        result.reading,
    ]
    if result.checks:
        parts.append("\n".join(f"- {check}" for check in result.checks))
    parts.append(table(result))
    if result.more:
        parts.append(result.more)
    if has_plot:
        parts.append(f"![{result.title}]({result.name}.png)")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def table(result: Result) -> str:
    """The rows as a Markdown table, in readable units."""
    shown = "ms" if result.unit == "s" else result.unit
    case = list(result.rows[0].case) if result.rows else []
    counted = [
        (name, attribute)
        for name, attribute in (("bytes", "num_bytes"), ("segments", "segments"))
        if any(getattr(row, attribute) is not None for row in result.rows)
    ]
    heads = ["way", *case, *(name for name, _ in counted), f"p20 / p50 / p80, {shown}", "baseline", "ratio"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in result.rows:
        cells = [row.way, *(str(value) for value in row.case.values())]
        cells += [_grouped(getattr(row, attribute)) for _, attribute in counted]
        cells += [_spread(row, result.unit), row.baseline, _ratio(row)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(result: Result, provenance: Provenance, folder: Path) -> bool:
    """Write its files into ``folder``, which must exist; returns whether there is a plot now."""
    (folder / f"{result.name}.csv").write_text(as_csv(result, provenance), encoding="utf-8")
    picture = folder / f"{result.name}.png"
    has_plot = result.draw is not None and _plot(result, picture)
    if not has_plot:
        picture.unlink(missing_ok=True)  # one of an earlier run would show other numbers
    page = as_markdown(result, provenance, has_plot=has_plot)
    (folder / f"{result.name}.md").write_text(page, encoding="utf-8")
    return has_plot


def _plot(result: Result, file: Path) -> bool:
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure = pyplot.figure(layout="constrained")
    assert result.draw is not None
    result.draw(figure)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return True


def _or_empty(number: int | None) -> str:
    return "" if number is None else str(number)


def _grouped(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _ratio(row: Row) -> str:
    if row.way == row.baseline:
        return "1"
    return f"{row.ratio:.2f}" + (" (loses)" if row.loses else "")


def _spread(row: Row, unit: str) -> str:
    factor = 1e3 if unit == "s" else 1
    values = [value * factor for value in (row.spread.p20, row.spread.p50, row.spread.p80)]
    if len(set(values)) == 1:
        return _number(values[0])
    return " / ".join(_number(value) for value in values)


def _number(value: float) -> str:
    """Three digits that say something, and no exponent.

    >>> [_number(value) for value in (0.01234, 1.0, 12.345, 1234567.0)]
    ['0.0123', '1', '12.3', '1,234,567']
    """
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"
