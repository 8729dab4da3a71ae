"""The README's table of figures, made from the results' CSVs.

``python -m benchmarks.headline README.md`` renews it in place; ``--check`` only says whether it is up to date.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_dcp_block import made_tables

PROGRAM = "python -m benchmarks.headline"
BEGIN = "<!-- begin: made from benchmarks/results by `make readme-table`; do not edit -->"
RESULTS = Path(__file__).parent / "results"

Record = Mapping[str, str]  # a line of a CSV


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: two rows of one benchmark beside each other."""

    text: str
    benchmark: str  # name of the files
    case: Mapping[str, str]  # columns that pick the rows
    stock: str  # way
    ours: str  # way
    column: str  # the quantity
    unit: str  # "ms", "GiB" or "" for a plain number

    def line(self, records: Sequence[Record]) -> str:
        """As a row of Markdown.

        Raises:
            LookupError: the CSV has not exactly one such row for a way.
        """
        stock, ours = (float(self._pick(records, way)[self.column]) for way in (self.stock, self.ours))
        link = f"[{self.text}](benchmarks/results/{self.benchmark}.md)"
        return f"| {link} | {shown(stock, self.unit)} | {shown(ours, self.unit)} | {compared(stock, ours)} |"

    def _pick(self, records: Sequence[Record], way: str) -> Record:
        found = [r for r in records if r["way"] == way and all(r.get(key) == value for key, value in self.case.items())]
        if len(found) != 1:
            raise LookupError(
                f"{self.benchmark}.csv: expected one row of {way!r} with {dict(self.case)}, got {len(found)}"
            )
        return found[0]


_RR, _GROUPED = "token round-robin", "blocks of 64, grouped"


def _chunk(layers: int) -> dict[str, str]:
    return {"layers": str(layers), "tokens": "16384", "row_bytes": "1152"}


FIGURES = (
    *(
        Figure(
            f"16,384 tokens, {layers} layers, to a rank of 8; grouped", "transfer", _chunk(layers), _RR, _GROUPED,
            "p50_s", "ms",
        )
        for layers in (8, 61)
    ),
    Figure("its segments, 61 layers; grouped", "transfer", _chunk(61), _RR, _GROUPED, "segments", ""),
    Figure(
        "plan of 131,072 tokens", "planning", {"tokens": "131072"}, "SGLang's plan, by tokens", "runs of blocks of 64",
        "p50_s", "ms",
    ),
    Figure(
        "pack buffers of a prefill rank, 61 layers, chunks of 32,768", "memory",
        {
            "memory": "pack buffers of a prefill rank", "model": "DeepSeek-V3, Kimi-K2: 61 layers, bf16",
            "tokens": "32768",
        },
        _RR, "blocks of 64", "bytes", "GiB",
    ),
    Figure(
        "scheduling a chunk of 16,384 tokens", "grouping", {"timed": "a pass of the scheduler's loop"}, "stock",
        "--dcp-group-pages 8", "p50_s", "ms",
    ),
    *(
        Figure(f"fullest rank ÷ mean, 64 requests: {mix}", "imbalance", {"mix": mix}, _RR, "blocks of 64",
               "p50_max_over_mean", "")
        for mix in ("documents, 8k-128k", "chat, 128-4k", "tiny, 16-128")
    ),
)  # fmt: skip


def shown(value: float, unit: str) -> str:
    """A number of a CSV in a readable unit.

    >>> shown(0.0123, "ms"), shown(9210691584, "GiB"), shown(124928, ""), shown(1.18, "")
    ('12.3 ms', '8.58 GiB', '124,928', '1.18')
    >>> shown(0, "GiB")
    'none'
    """
    value /= {"ms": 1e-3, "GiB": 2**30, "": 1}[unit]
    return f"{_number(value)} {unit}".strip() if value else "none"


def compared(stock: float, ours: float) -> str:
    """How many times less ours is; or that it is more.

    >>> compared(30, 1), compared(1, 1.18), compared(5, 0)
    ('÷ 30', '× 1.18', '')
    """
    if ours == 0:
        return ""
    return f"÷ {_number(stock / ours)}" if stock >= ours else f"× {_number(ours / stock)}"


def _number(value: float) -> str:
    """Three digits, or all of the whole part."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def table(results: Path = RESULTS) -> str:
    """All figures as a Markdown table.

    Raises:
        OSError: a CSV is not there.
        LookupError: a row is not in it.
    """
    lines = ["| | token round-robin, SGLang | blocks of 64 | |", "|---|---|---|---|"]
    for figure in FIGURES:
        with (results / f"{figure.benchmark}.csv").open(newline="", encoding="utf-8") as file:
            lines.append(figure.line(list(csv.DictReader(file))))
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    return made_tables.command(
        argv,
        program=PROGRAM,
        description="Renew the table of figures in the README from the results of the benchmarks.",
        page="README.md",
        tables={BEGIN: table},
    )


if __name__ == "__main__":
    raise SystemExit(main())
