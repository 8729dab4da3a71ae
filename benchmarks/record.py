"""What a benchmark finds: rows that compare a way of doing something with a baseline, and figures that must hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Value = int | float | str


@dataclass(frozen=True, slots=True)
class Spread:
    """Three percentiles of a quantity of which less is better, such as a time."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def exactly(cls, value: float) -> Spread:
        """A quantity that is the same each time."""
        return cls(value, value, value)


@dataclass(frozen=True, slots=True)
class Row:
    """One way in one case, beside a baseline in the same case and the same run."""

    way: str
    case: Mapping[str, Value]  # what was varied, by the names of columns; the same names in all rows of a result
    spread: Spread  # in the result's unit
    baseline: str  # the way that it is compared with
    baseline_p50: float  # in the result's unit
    num_bytes: int | None = None  # sent or held
    segments: int | None = None  # pieces handed to the transfer engine

    @property
    def ratio(self) -> float:
        """Baseline over this, of medians: above 1 is a gain, below 1 a loss. Two zeros are equal."""
        if self.spread.p50 == self.baseline_p50:
            return 1.0
        return self.baseline_p50 / self.spread.p50 if self.spread.p50 else float("inf")

    @property
    def loses(self) -> bool:
        """Whether it is worse than its baseline by more than rounding."""
        return self.ratio < 0.995


@dataclass(frozen=True, slots=True)
class Check:
    """A figure with a limit that was set before it was measured."""

    text: str
    value: float
    limit: float
    at_most: bool  # else at least

    @property
    def holds(self) -> bool:
        """Whether it does. A value that is no number does not."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        """In one line, with the verdict."""
        sign = "≤" if self.at_most else "≥"
        return f"{self.text}: {self.value:.3g} ({sign} {self.limit:g}: {'holds' if self.holds else 'DOES NOT HOLD'})"


@dataclass(frozen=True, slots=True)
class Result:
    """What one benchmark found."""

    name: str  # of its files
    title: str
    unit: str  # of spreads: "s", "bytes", ...
    reading: str  # Markdown: what was measured, and how to read it
    rows: Sequence[Row]
    checks: Sequence[Check] = ()
    more: str = ""  # Markdown below the table
    draw: Callable[[Any], None] | None = field(default=None, compare=False)  # onto a matplotlib figure


def find(rows: Sequence[Row], way: str, **case: Value) -> Row:
    """The one row of a way in a case.

    Raises:
        LookupError: there is none, or more than one.
    """
    found = [row for row in rows if row.way == way and all(row.case.get(key) == value for key, value in case.items())]
    if len(found) != 1:
        raise LookupError(f"expected one row of {way!r} with {case}, got {len(found)}")
    return found[0]
