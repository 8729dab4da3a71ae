"""Compares the answers of several configurations; the table and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sglang_dcp_block.demo.client import Answer
from sglang_dcp_block.demo.plan import Case

TOLERANCE = 1e-4  # on log-probabilities in float32


@dataclass(frozen=True, slots=True)
class Result:
    """What one configuration did."""

    case: Case
    answers: tuple[Answer, ...]  # one a prompt
    start_seconds: float
    answer_seconds: float  # for all prompts together
    info: Mapping[str, Any]  # the server's own, of /server_info

    @property
    def seconds_per_token(self) -> float:
        """Wall time of one new token of every prompt at once, reading the prompts included."""
        return self.answer_seconds / max(len(answer.tokens) for answer in self.answers)


def difference(result: Result, reference: Result) -> float:
    """The largest difference of log-probabilities, over all new tokens; infinite if their numbers differ."""
    return max(answer_difference(*pair) for pair in zip(result.answers, reference.answers, strict=True))


def answer_difference(mine: Answer, other: Answer) -> float:
    """The largest difference of log-probabilities; infinite if their numbers differ."""
    if len(mine.logprobs) != len(other.logprobs):
        return float("inf")
    largest = 0.0
    for x, y in zip(mine.logprobs, other.logprobs, strict=True):
        # A NaN must not pass as small.
        largest = max(largest, abs(x - y)) if x - y == x - y else float("inf")
    return largest


def tokens_equal(result: Result, reference: Result) -> bool:
    """Whether every answer has the same tokens and the same text."""
    pairs = zip(result.answers, reference.answers, strict=True)
    return all((mine.tokens, mine.text) == (other.tokens, other.text) for mine, other in pairs)


def rows_per_rank(result: Result) -> list[int]:
    """KV rows that each DCP rank holds for all requests together, by the layout."""
    layout = result.case.layout
    return [sum(layout.local_len(a.kv_tokens, rank) for a in result.answers) for rank in range(layout.dcp_size)]


def imbalance(rows: Sequence[int]) -> float:
    """The fullest rank against the mean; 1 is perfect."""
    return max(rows) * len(rows) / sum(rows)


def misreported(case: Case, info: Mapping[str, Any]) -> list[str]:
    """Where the server's own words (``/server_info``) differ from what was asked of it."""
    report = info.get("dcp_block") or {}
    facts = [
        ("dcp_size", case.dcp_size, info.get("dcp_size")),
        ("page_size", case.page_size, info.get("page_size")),
        ("dcp_block_size", case.block_size, info.get("dcp_block_size")),
        ("dcp_block.block_size", case.block_size, report.get("block_size")),
        ("dcp_block.dcp_size", case.dcp_size if case.block_size else None, report.get("dcp_size")),
    ]
    return [f"/server_info {name}: expected {expected}, got {got}" for name, expected, got in facts if got != expected]


def mismatches(results: Sequence[Result]) -> list[str]:
    """One line for everything that is wrong; empty if all results equal the first."""
    reference = results[0]
    lines = []
    for result in results:
        name = result.case.name
        lines += [f"{name}: {line}" for line in misreported(result.case, result.info)]
        if not tokens_equal(result, reference):
            lines.append(f"{name}: expected the tokens of {reference.case.name}, got others")
        largest = difference(result, reference)
        if not largest <= TOLERANCE:
            expected = f"expected within {TOLERANCE:.0e} of {reference.case.name}"
            lines.append(f"{name}: log-probabilities: {expected}, got {largest:.1e}")
    return lines


def table(title: str, results: Sequence[Result]) -> Table:
    """The results side by side, in 80 columns."""
    reference = results[0]
    result_table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    result_table.add_column("server")
    for heading in ("|Δ log p|", "tokens", "KV rows of each rank", "max/mean", "start", "s/token"):
        result_table.add_column(heading, justify="right")
    for result in results:
        rows, first = rows_per_rank(result), result is reference
        result_table.add_row(
            result.case.name,
            "reference" if first else f"{difference(result, reference):.1e}",
            "" if first else "equal" if tokens_equal(result, reference) else "DIFFER",
            row_text(rows, result.case),
            f"{imbalance(rows):.2f}",
            f"{result.start_seconds:.0f} s",
            f"{result.seconds_per_token:.1f}",
        )
    return result_table


def row_text(rows: Sequence[int], case: Case) -> str:
    """Rows of each DCP rank; equal ranks are not listed one by one."""
    if case.dcp_size > 1:
        return " ".join(map(str, rows))
    return f"{rows[0]} on all {case.tp_size}" if case.tp_size > 1 else str(rows[0])


def occupancy_note(results: Sequence[Result], long_tokens: int = 100_000) -> str | None:
    """What the imbalance of these short prompts becomes for a long one; None where no case deals blocks."""
    blocks = [result.case for result in results if result.case.block_size]
    if not blocks:
        return None
    case = max(blocks, key=lambda case: case.layout.cycle)
    rows = [case.layout.local_len(long_tokens, rank) for rank in range(case.dcp_size)]
    return (
        "B=1 is token round-robin. KV rows: the layout's, prompts and answers\n"
        "together. Ranks differ by at most B rows a request: much for short prompts, but\n"
        f"a max/mean of {imbalance(rows):.4f} for one of {long_tokens:,} tokens."
    )
