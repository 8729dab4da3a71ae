"""KV rows of the fullest rank over the mean, for mixes of request lengths: what blocks cost short requests."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.record import Result, Row
from benchmarks.timing import spread
from sglang_dcp_block.dcp.layout import DcpLayout

P, REQUESTS = 8, 64
BLOCKS = (1, 8, 16, 64, 256, 512)
STOCK, SPLIT = "token round-robin", "contiguous split"

READING = f"""
{REQUESTS} requests at once on {P} ranks: rows of the fullest rank over the mean, 1 is even. Percentiles are over
batches drawn from a mix. Attention waits for the fullest rank, and a pool is full when one rank's is. All requests
begin at rank 0, so blocks much longer than the requests pile them up there. **{SPLIT}** cuts a prompt into {P} parts
once and appends the answer to the last one, as no row may move later. Computed from the layout, not timed.
"""


@dataclass(frozen=True, slots=True)
class Mix:
    """Lengths of prompts and answers, log-uniform between two lengths each."""

    name: str
    prompt: tuple[int, int]
    answer: tuple[int, int]

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Tokens of (a prompt, its answer so far)."""
        prompt, answer = (
            round(math.exp(rng.uniform(math.log(low), math.log(high)))) for low, high in (self.prompt, self.answer)
        )
        return prompt, rng.randint(0, answer)


MIXES = (
    Mix("tiny, 16-128", (16, 128), (1, 64)),
    Mix("chat, 128-4k", (128, 4096), (16, 1024)),
    Mix("long answers, 256-2k + 1k-32k", (256, 2048), (1024, 32768)),
    Mix("documents, 8k-128k", (8192, 131072), (16, 1024)),
    Mix("all, 16-128k", (16, 131072), (1, 8192)),
)


def unevenness(rows: Any) -> float:
    """Largest over mean of ``[P]`` rows; 1 for none at all.

    >>> unevenness(np.array([3, 1]))
    1.5
    """
    return float(rows.max() / rows.mean()) if rows.any() else 1.0


def dealt(lengths: list[tuple[int, int]], layout: DcpLayout) -> Any:
    """Rows of each rank, ``[P]``, for requests of (prompt, answer) tokens."""
    total = np.array([sum(length) for length in lengths])
    return np.array([int(layout.local_len(total, rank).sum()) for rank in range(layout.dcp_size)])


def split(lengths: list[tuple[int, int]], ranks: int) -> Any:
    """The same where each prompt is cut into parts that differ by at most a token, and answers go to the last one."""
    rows = np.zeros(ranks, np.int64)
    for prompt, answer in lengths:
        edges = [prompt * rank // ranks for rank in range(ranks + 1)]
        rows += np.diff(edges)
        rows[-1] += answer
    return rows


def ways() -> Iterator[tuple[str, int, Callable[[list[tuple[int, int]]], Any]]]:
    """(name, block, rows of each rank)."""
    for block in BLOCKS:
        yield STOCK if block == 1 else f"blocks of {block}", block, partial(dealt, layout=DcpLayout(P, block))
    yield SPLIT, 0, partial(split, ranks=P)


def draw(rows: list[Row], figure: Any) -> None:
    """A line a mix, over ways."""
    figure.set_size_inches(8, 4)
    panel = figure.subplots()
    for mix in MIXES:
        own = [row for row in rows if row.case["mix"] == mix.name]
        panel.errorbar(
            [row.way for row in own],
            [row.spread.p50 for row in own],
            [[row.spread.p50 - row.spread.p20 for row in own], [row.spread.p80 - row.spread.p50 for row in own]],
            label=mix.name, marker="o", markersize=3, capsize=2, linewidth=1,
        )  # fmt: skip
    panel.set(ylabel=f"fullest rank ÷ mean, {REQUESTS} requests, {P} ranks")
    panel.tick_params("x", labelrotation=20)
    panel.legend(frameon=False)


def measure(full: bool) -> Result:
    """Draw batches of each mix, and deal them in each way."""
    rows: list[Row] = []
    for mix in MIXES:
        rng = random.Random(mix.name)
        batches = [[mix.draw(rng) for _ in range(REQUESTS)] for _ in range(1000 if full else 200)]
        spreads = {
            (way, block): spread([unevenness(count(lengths)) for lengths in batches]) for way, block, count in ways()
        }
        stock = spreads[STOCK, 1].p50
        rows += [
            Row(way, {"mix": mix.name, "block": block}, found, STOCK, stock) for (way, block), found in spreads.items()
        ]
    return Result(
        "imbalance", "How evenly ranks are filled", "max_over_mean", READING, rows, draw=lambda figure: draw(rows, figure)
    )  # fmt: skip
