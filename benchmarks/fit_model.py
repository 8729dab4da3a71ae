"""Fits the transfer model to the measured transfers over TCP, and writes what it finds where the package reads it.

Least squares of relative errors over benchmarks/results/transfer.csv: seconds of each row from its segments, its bytes, and
for packed rows its bytes through the gather on the host. Rows that no transport carried (memcpy) are left out, and so are
transfers of less than a millisecond, which are a call's own time.

    python benchmarks/fit_model.py [CSV]
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks" / "results" / "transfer.csv"
FITTED = ROOT / "python" / "sglang_dcp_block" / "transfer_model" / "tcp_loopback.json"
LEFT_OUT = ("memcpy",)
PACKED = ("host pack",)
SHORTEST_SECONDS = 1e-3
COLUMNS = ("way", "layers", "tokens", "row_bytes", "bytes", "segments", "p50_s")


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of the benchmark: one way of sending one chunk to one rank."""

    way: str
    layers: int
    tokens: int  # of the chunk, over all ranks
    row_bytes: int
    num_bytes: int
    segments: int
    seconds: float

    @property
    def is_packed(self) -> bool:
        """Whether rows were gathered first."""
        return self.way in PACKED


@dataclass(frozen=True, slots=True)
class Fit:
    """The model's figures."""

    segment_seconds: float
    byte_seconds: float
    gather_byte_seconds: float

    def seconds(self, row: Measured) -> float:
        """What the model says of a measured row."""
        gathered = self.gather_byte_seconds * row.num_bytes if row.is_packed else 0.0
        return self.segment_seconds * row.segments + self.byte_seconds * row.num_bytes + gathered

    def error(self, row: Measured) -> float:
        """Model over measurement, minus 1."""
        return self.seconds(row) / row.seconds - 1


def read(lines: Sequence[str]) -> list[Measured]:
    """The rows that the model speaks of.

    Raises:
        ValueError: a column is missing, or no row is left.
    """
    reader = csv.DictReader(lines)
    if missing := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
        raise ValueError(f"expected columns {', '.join(COLUMNS)}; missing: {', '.join(missing)}")
    rows = [
        Measured(
            way=row["way"],
            layers=int(row["layers"]),
            tokens=int(row["tokens"]),
            row_bytes=int(row["row_bytes"]),
            num_bytes=int(row["bytes"]),
            segments=int(row["segments"]),
            seconds=float(row["p50_s"]),
        )
        for row in reader
        if row["way"] not in LEFT_OUT and row["segments"] and float(row["p50_s"]) >= SHORTEST_SECONDS
    ]
    if not any(row.is_packed for row in rows) or all(row.is_packed for row in rows):
        raise ValueError(f"expected rows that were packed ({', '.join(PACKED)}) and rows that were not, got one kind")
    return rows


def fit(rows: Sequence[Measured]) -> Fit:
    """The figures with the least squares of relative errors.

    Raises:
        ValueError: a figure would be negative: the rows do not tell it.
    """
    terms = np.array([[row.segments, row.num_bytes, row.num_bytes * row.is_packed] for row in rows], float)
    seconds = np.array([row.seconds for row in rows])
    figures, *_ = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(rows)), rcond=None)
    result = Fit(*(float(figure) for figure in figures))
    if min(figures) <= 0:
        raise ValueError(f"expected positive figures, got {result}")
    return result


def as_json(result: Fit, rows: Sequence[Measured], origin: str) -> str:
    """The package's data file."""
    data = {
        "name": "tcp-loopback",
        "segment_seconds": float(f"{result.segment_seconds:.4g}"),
        "bytes_per_second": float(f"{1 / result.byte_seconds:.4g}"),
        "gather_bytes_per_second": float(f"{1 / result.gather_byte_seconds:.4g}"),
        "sync_seconds": 0.0,
        "origin": origin,
        "rows": [
            {
                "way": row.way,
                "layers": row.layers,
                "tokens": row.tokens,
                "row_bytes": row.row_bytes,
                "bytes": row.num_bytes,
                "segments": row.segments,
                "measured_s": row.seconds,
                "modelled_s": float(f"{result.seconds(row):.4g}"),
            }
            for row in rows
        ],
    }
    return json.dumps(data, indent=1) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    cli.add_argument("csv", type=Path, nargs="?", default=MEASURED, metavar="CSV")
    cli.add_argument("--out", type=Path, default=FITTED, help="default: the package's data file")
    args = cli.parse_args(argv)
    try:
        lines = args.csv.read_text(encoding="utf-8").splitlines()
        rows = read(lines)
        result = fit(rows)
    except (OSError, ValueError) as error:
        print(f"fit_model: error: {args.csv}: {error}", file=sys.stderr)
        return 2
    named = args.csv.resolve().relative_to(ROOT) if args.csv.resolve().is_relative_to(ROOT) else Path(args.csv.name)
    first = next(csv.DictReader(lines))
    origin = f"fitted by benchmarks/fit_model.py to {len(rows)} rows of {named}"
    if first.get("versions"):
        origin += f" ({first['versions']})"
    args.out.write_text(as_json(result, rows, origin), encoding="utf-8")
    print(f"{args.out.name}: {result.segment_seconds * 1e6:.1f} µs a segment, {1e-9 / result.byte_seconds:.2f} GB/s, "
          f"gather {1e-9 / result.gather_byte_seconds:.2f} GB/s")  # fmt: skip
    for row in rows:
        print(f"{result.error(row):+7.0%}  {row.way}, {row.layers} layers x {row.tokens} tokens: "
              f"{row.seconds * 1e3:.2f} ms, modelled {result.seconds(row) * 1e3:.2f} ms")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
